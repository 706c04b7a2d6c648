"""What a run was, in numbers: what `tfdp report` prints, draws and writes as JSON."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfdp.errors import DataError
from tfdp.tools.runs.read import Run, Session, WorkerRun
from tfdp.tools.runs.together import (
    BETWEEN,
    COMPUTING,
    FIRST,
    INPUT,
    PARTS,
    VALIDATION,
    Together,
    parts_of,
    steps_together,
)
from tfdp.tools.runs.traces import ReplicaTrace, read_trace


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast the training was over some steps.

    Args:
      at_seconds: when they ended, since the run began.
      steps: how many.
      seconds: how long they took, validation left out.
      samples: None: not known.
      is_first: whether TensorFlow traced in them.
    """

    at_seconds: float
    steps: int
    seconds: float
    samples: int | None
    is_first: bool

    @property
    def samples_per_second(self) -> float | None:
        """None: not known."""
        if self.samples is None or not self.seconds:
            return None
        return self.samples / self.seconds


def merged(rates: Sequence[Rate]) -> Rate:
    """Steps that follow each other as one; at least one of them."""
    samples = [rate.samples for rate in rates if rate.samples is not None]
    return Rate(
        rates[-1].at_seconds,
        sum(rate.steps for rate in rates),
        sum(rate.seconds for rate in rates),
        sum(samples) if len(samples) == len(rates) else None,
        any(rate.is_first for rate in rates),
    )


@dataclasses.dataclass(frozen=True)
class Stretch:
    """One start of the training, and how it ended.

    Args:
      from_seconds, to_seconds: since the run began, by the clock of its first worker.
      workers: how many.
      first_step: steps that were done before; None: not known.
      steps: that it made.
      has_ended: whether as it should; else it was killed, or trains on.
      lost_steps: that the next start made again; None: not known, or there is none.
    """

    from_seconds: float
    to_seconds: float
    workers: int
    first_step: int | None
    steps: int
    has_ended: bool
    lost_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step that `StepTimeline` has drawn.

    Args:
      name: of the file, in the run's directory.
      replicas: by rank.
    """

    name: str
    replicas: Sequence[ReplicaTrace]


@dataclasses.dataclass(frozen=True)
class Facts:
    """A run in numbers.

    Args:
      run: what was read.
      rates: over the time, in order.
      starts: in order.
      part_seconds: by worker and part.
      stragglers: who was slow.
      traces: of single steps.
      notes: what is missing or damaged, in sentences.
    """

    run: Run
    rates: Sequence[Rate]
    starts: Sequence[Stretch]
    part_seconds: Mapping[int, Mapping[str, float]]
    stragglers: Stragglers
    traces: Sequence[Trace]
    notes: Sequence[str]

    @property
    def steady(self) -> list[Rate]:
        """Without the steps in which TensorFlow traced."""
        return [rate for rate in self.rates if not rate.is_first and rate.seconds > 0]

    @property
    def samples_per_second(self) -> float | None:
        """Over all steady steps together; None: not known, or there are none."""
        steady = self.steady
        if not steady or any(rate.samples is None for rate in steady):
            return None
        samples = sum(rate.samples or 0 for rate in steady)
        return samples / sum(rate.seconds for rate in steady)

    @property
    def step_seconds(self) -> float | None:
        """Of a steady step, on average; None: there was none."""
        steps = sum(rate.steps for rate in self.steady)
        return sum(rate.seconds for rate in self.steady) / steps if steps else None

    @property
    def step_spread(self) -> tuple[float, float, float] | None:
        """Seconds of a steady step: a tenth are faster, the median, a tenth slower.

        Of the means of lines; None: there are fewer than ten.
        """
        found = [rate.seconds / rate.steps for rate in self.steady]
        if len(found) < 10:
            return None
        tenths = statistics.quantiles(found, n=10, method="inclusive")
        return tenths[0], tenths[4], tenths[-1]

    @property
    def seconds(self) -> float:
        """From the first start to what was heard last."""
        return max(start.to_seconds for start in self.starts)

    @property
    def steps(self) -> int:
        """That were made, those that were made again included."""
        return sum(start.steps for start in self.starts)

    @property
    def shares(self) -> dict[str, float]:
        """Where the time went, over all workers together; of it all, by part."""
        return self._shares(PARTS)

    @property
    def steady_shares(self) -> dict[str, float]:
        """The same of the time without the steps in which TensorFlow traced."""
        return self._shares([part for part in PARTS if part != FIRST])

    def _shares(self, names: Sequence[str]) -> dict[str, float]:
        workers = self.part_seconds.values()
        seconds = {name: sum(parts[name] for parts in workers) for name in names}
        total = sum(seconds.values())
        return {name: each / total if total else 0.0 for name, each in seconds.items()}

    @property
    def hidden_share(self) -> float | None:
        """Of the exchanges' time in the traces, that behind computing; None: none."""
        found = [
            replica.hidden_share
            for trace in self.traces
            for replica in trace.replicas
            if replica.hidden_share is not None
        ]
        return statistics.fmean(found) if found else None

    def most(self, field: str) -> dict[int, int]:
        """The most of a field of lines, by worker; who does not know is left out."""
        found: dict[int, int] = {}
        for worker in _workers(self.run):
            rank = worker.start.worker
            for line in worker.steps:
                value = getattr(line, field)
                if value is not None:
                    found[rank] = max(found.get(rank, 0), value)
        return dict(sorted(found.items()))

    def per_step(self, field: str) -> dict[int, float]:
        """The mean of a field over steps, by worker; who does not know is left out."""
        total: dict[int, float] = collections.defaultdict(float)
        steps: dict[int, int] = collections.defaultdict(int)
        for worker in _workers(self.run):
            for line in worker.steps:
                if getattr(line, field) is not None:
                    total[worker.start.worker] += getattr(line, field)
                    steps[worker.start.worker] += line.steps
        return {rank: total[rank] / steps[rank] for rank in sorted(total)}

    def to_json(self) -> dict[str, Any]:
        """For a file: numbers, and no number that JSON has not."""
        first = self.run.sessions[-1].first.start
        content = {
            "seconds": self.seconds,
            "steps": self.steps,
            "samples_per_second": self.samples_per_second,
            "step_seconds": self.step_seconds,
            "step_seconds_spread": self.step_spread,
            "shares": self.shares,
            "part_seconds": {str(r): dict(p) for r, p in self.part_seconds.items()},
            "stragglers": dataclasses.asdict(self.stragglers),
            "hidden_share": self.hidden_share,
            "traces": [dataclasses.asdict(trace) for trace in self.traces],
            "peak_bytes": self.most("peak_bytes"),
            "device_peak_bytes": self.most("device_peak_bytes"),
            "within_bytes_per_step": self.per_step("within_bytes"),
            "between_bytes_per_step": self.per_step("between_bytes"),
            "starts": [dataclasses.asdict(start) for start in self.starts],
            "epochs": [
                {"epoch": epoch.epoch, **epoch.logs} for epoch in epochs_of(self.run)
            ],
            "settings": dict(first.settings),
            "versions": dict(first.versions),
            "notes": list(self.notes),
        }
        return {name: _finite(value) for name, value in content.items()}


def facts_of(run: Run) -> Facts:
    """What a run says, in numbers."""
    starts, rates = [], []
    for session, begin in zip(run.sessions, _begins(run), strict=True):
        starts.append(_start(session, begin))
        rates += _rates(session, begin)
    traces, notes = [], [*run.notes, *what_is_mixed(run)]
    for path in run.traces:
        try:
            traces.append(Trace(path.name, read_trace(path)))
        except DataError as error:
            notes.append(str(error))
    return Facts(
        run,
        rates,
        _with_lost_steps(starts),
        _parts(run),
        find_stragglers(run),
        traces,
        notes,
    )


def epochs_of(run: Run) -> list[Any]:
    """The epochs, each once, as the last start that made it reports it."""
    found = {}
    for session in run.sessions:
        for epoch in session.first.epochs:
            found[epoch.epoch] = epoch
    return [found[number] for number in sorted(found)]


def _workers(run: Run) -> Iterable[WorkerRun]:
    for session in run.sessions:
        yield from session.workers.values()


def _begins(run: Run) -> list[float]:
    """When each start began, since the first; no clock is believed that went back."""
    first, reached, found = run.sessions[0].first.start.began_seconds, 0.0, []
    for session in run.sessions:
        begin = max(session.first.start.began_seconds - first, reached)
        found.append(begin)
        reached = begin + session.first.last_seconds
    return found


def _start(session: Session, begin: float) -> Stretch:
    first = session.first
    return Stretch(
        begin,
        begin + first.last_seconds,
        first.start.workers,
        first.first_step,
        first.steps[-1].step if first.steps else 0,
        first.end is not None,
    )


def _with_lost_steps(starts: Sequence[Stretch]) -> list[Stretch]:
    found = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        lost = None
        if after is not None and None not in (start.first_step, after.first_step):
            reached = (start.first_step or 0) + start.steps
            lost = max(0, reached - (after.first_step or 0))
        found.append(dataclasses.replace(start, lost_steps=lost))
    return found


def _rates(session: Session, begin: float) -> list[Rate]:
    return [
        Rate(
            begin + each.lines[min(each.lines)].at_seconds,
            each.lines[min(each.lines)].steps,
            each.training_seconds,
            each.samples,
            each.is_first,
        )
        for each in steps_together(session)
        if each.is_whole
    ]


def _parts(run: Run) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for session in run.sessions:
        for each in steps_together(session):
            waits = each.waiting_seconds or {}
            for rank, line in each.lines.items():
                mine = found.setdefault(rank, dict.fromkeys(PARTS, 0.0))
                parts = parts_of(line, waits.get(rank), each.is_first)
                for part, seconds in parts.items():
                    mine[part] += seconds
        for rank, worker in session.workers.items():
            mine = found.setdefault(rank, dict.fromkeys(PARTS, 0.0))
            for part, seconds in _tail(worker).items():
                mine[part] += seconds
    return dict(sorted(found.items()))


def _tail(worker: WorkerRun) -> dict[str, float]:
    """What came after the last line of steps: the last validation, callbacks."""
    if not worker.steps:
        return {FIRST: worker.last_seconds}
    last = worker.steps[-1]
    rest = max(0.0, worker.last_seconds - last.at_seconds)
    validated = sum(
        epoch.validation_seconds for epoch in worker.epochs if epoch.step >= last.step
    )
    validation = min(validated, rest)
    return {VALIDATION: validation, BETWEEN: rest - validation}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


# Whether what a run's directory holds is of one training.


# What a clock, and the time between a line and its writing, may be off.
LEAST_OVERLAP_SECONDS = 2.0


def what_is_mixed(run: Run) -> Iterator[str]:
    """Notes where numbers that are added up are of several trainings, in sentences."""
    starts = [session.first.start for session in run.sessions]
    weights = {_weights_of(start.settings.get("model", "")) for start in starts}
    if len(weights - {""}) > 1:
        models = " and ".join(sorted(weights - {""}))
        yield (
            f"its starts trained models of {models}: what is said of all of it is a "
            "mixture. Give each training a directory of its own."
        )
    for before, after in itertools.pairwise(run.sessions):
        first, second = before.first.start, after.first.start
        ended_seconds = first.began_seconds + before.first.last_seconds
        overlap_seconds = ended_seconds - second.began_seconds
        if first.host == second.host and overlap_seconds > LEAST_OVERLAP_SECONDS:
            yield (
                f"a training began in this directory {overlap_seconds:.0f} s before "
                "another one ended: what is said of all of it is a mixture. Give "
                "each training a directory of its own."
            )
            return


def _weights_of(model: str) -> str:
    """How many, in words; nothing where that was not known."""
    found = re.search(r"[\d,]+ weights", model)
    return found[0] if found else ""


# Who was slow, how often, what it cost the others, and in what it was slow.


# Of the time of a step: who holds up the others by less is not called slow.
LEAST_SHARE = 0.05
OWN = (COMPUTING, INPUT, BETWEEN)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A worker for which others waited.

    Args:
      worker: its rank.
      share: of all steps, those in which it was the one.
      lost_seconds: that each of the others waited for it, on average.
      lost_share: the same, of the time of all steps.
      cause: what took it longer than the others: a name of a part; "": none stands out.
      more_share: by how much longer all that it did itself took it than the median of
        the others, in the steps in which it was the one.
    """

    worker: int
    share: float
    lost_seconds: float
    lost_share: float
    cause: str
    more_share: float


@dataclasses.dataclass(frozen=True)
class Stragglers:
    """What can be said of who was slow.

    Args:
      found: the one that cost most first.
      waited_seconds: by worker, for others.
      steps: that were looked at.
      unknown: why nothing can be said; "": it can.
    """

    found: Sequence[Straggler]
    waited_seconds: Mapping[int, float]
    steps: int
    unknown: str = ""


def find_stragglers(run: Run) -> Stragglers:
    """Who was slow in a run: the one that came last to exchanges, step by step.

    In a synchronous training all workers take as long for a step, the slow ones and
    those that wait for them; what tells them apart is how long each was in exchanges.
    """
    if all(session.first.start.workers == 1 for session in run.sessions):
        return Stragglers((), {}, 0, "There is one worker: nobody waits for another.")
    looked = [
        together
        for session in run.sessions
        for together in steps_together(session)
        if together.is_whole and not together.is_first
    ]
    known = [each for each in looked if each.waiting_seconds is not None]
    if not known:
        return Stragglers((), {}, 0, _why_unknown(run))
    seconds = sum(each.seconds for each in known)
    steps = sum(_steps(each) for each in known)
    slowest: dict[int, list[Together]] = collections.defaultdict(list)
    waited: dict[int, float] = collections.defaultdict(float)
    for each in known:
        waits = each.waiting_seconds or {}
        for rank, wait in waits.items():
            waited[rank] += wait
        rank = min(waits, key=lambda rank: waits[rank])
        if max(waits.values()) > LEAST_SHARE * each.seconds:
            slowest[rank].append(each)
    found = [_straggler(rank, mine, steps, seconds) for rank, mine in slowest.items()]
    found.sort(key=lambda straggler: -straggler.lost_seconds)
    return Stragglers(found, dict(sorted(waited.items())), steps)


def _steps(together: Together) -> int:
    return next(iter(together.lines.values())).steps


def _straggler(
    rank: int, mine: Sequence[Together], steps: int, seconds: float
) -> Straggler:
    lost = 0.0
    own: dict[int, dict[str, float]] = collections.defaultdict(
        lambda: dict.fromkeys(OWN, 0.0)
    )
    for each in mine:
        waits = each.waiting_seconds or {}
        lost += statistics.fmean(wait for r, wait in waits.items() if r != rank)
        for worker, line in each.lines.items():
            parts = parts_of(line, waits[worker], False)
            for part in OWN:
                own[worker][part] += parts[part]
    others = {
        part: statistics.median(own[r][part] for r in own if r != rank) for part in OWN
    }
    more = {part: own[rank][part] - others[part] for part in OWN}
    cause = max(more, key=lambda part: more[part])
    usual = sum(others.values())
    return Straggler(
        rank,
        sum(map(_steps, mine)) / steps if steps else 0.0,
        lost,
        lost / seconds if seconds else 0.0,
        cause if more[cause] > 0.5 * max(sum(more.values()), 1e-12) else "",
        sum(more.values()) / usual if usual else 0.0,
    )


def _why_unknown(run: Run) -> str:
    workers = max(len(session.workers) for session in run.sessions)
    if workers < 2:
        return (
            "Who was slow cannot be told: the file of one worker alone is here, and "
            "what tells is how long each one waited for the others."
        )
    return (
        "Who was slow cannot be told: how long exchanges between hosts lasted is known "
        'over sockets and MPI only (Communication(engine="sockets")), and of steps '
        "that at least two workers tell of."
    )
