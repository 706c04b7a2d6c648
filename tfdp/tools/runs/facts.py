"""Computes the figures that `tfdp report` prints, draws and writes as JSON."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfdp.errors import DataError
from tfdp.files.checked_json import finite
from tfdp.tools.runs import together
from tfdp.tools.runs.entries import Epoch
from tfdp.tools.runs.read import Run, Session, WorkerRun
from tfdp.tools.runs.together import AlignedSteps
from tfdp.tools.runs.traces import ReplicaTrace, read_trace


@dataclasses.dataclass(frozen=True)
class Rate:
    """The speed of the training over some steps."""

    at_seconds: float  # end of the steps, since the run began
    steps: int
    seconds: float  # without validation
    samples: int | None  # None: unknown
    is_first: bool  # TensorFlow traced in them

    @property
    def samples_per_second(self) -> float | None:
        if self.samples is None or not self.seconds:
            return None
        return self.samples / self.seconds


def merged(rates: Sequence[Rate]) -> Rate:
    """Merges consecutive rates, at least one."""
    samples = [rate.samples for rate in rates if rate.samples is not None]
    return Rate(
        rates[-1].at_seconds,
        sum(rate.steps for rate in rates),
        sum(rate.seconds for rate in rates),
        sum(samples) if len(samples) == len(rates) else None,
        any(rate.is_first for rate in rates),
    )


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the training, until its end or failure."""

    from_seconds: float  # since the run began, by the clock of its first worker
    to_seconds: float
    workers: int
    first_step: int | None  # steps done before; None: unknown
    steps: int
    has_ended: bool  # normally; else it was killed, or still trains
    lost_steps: int | None = None  # repeated by the next start; None: unknown or none


@dataclasses.dataclass(frozen=True)
class TraceOfStep:
    """A trace of `StepTimeline`."""

    name: str  # of the file
    replicas: Sequence[ReplicaTrace]  # by rank


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The figures of a run."""

    run: Run
    rates: Sequence[Rate]  # in order of time
    starts: Sequence[Attempt]
    part_seconds: Mapping[int, Mapping[str, float]]  # by worker and part
    stragglers: StragglerFacts
    traces: Sequence[TraceOfStep]
    notes: Sequence[str]  # what is missing or damaged, in sentences

    @property
    def steady(self) -> list[Rate]:
        """The rates without the steps in which TensorFlow traced."""
        return [rate for rate in self.rates if not rate.is_first and rate.seconds > 0]

    @property
    def samples_per_second(self) -> float | None:
        """The rate over all steady steps; None: unknown, or there are none."""
        steady = self.steady
        if not steady or any(rate.samples is None for rate in steady):
            return None
        samples = sum(rate.samples or 0 for rate in steady)
        return samples / sum(rate.seconds for rate in steady)

    @property
    def step_seconds(self) -> float | None:
        """The mean of steady steps; None: there are none."""
        steps = sum(rate.steps for rate in self.steady)
        return sum(rate.seconds for rate in self.steady) / steps if steps else None

    @property
    def step_spread(self) -> tuple[float, float, float] | None:
        """The 10th, 50th and 90th percentile in seconds; None: fewer than ten lines."""
        found = [rate.seconds / rate.steps for rate in self.steady]
        if len(found) < 10:
            return None
        tenths = statistics.quantiles(found, n=10, method="inclusive")
        return tenths[0], tenths[4], tenths[-1]

    @property
    def seconds(self) -> float:
        return max(start.to_seconds for start in self.starts)

    @property
    def steps(self) -> int:
        """All steps, including repeated ones."""
        return sum(start.steps for start in self.starts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time of all workers, by part."""
        return self._shares(together.PARTS)

    @property
    def steady_shares(self) -> dict[str, float]:
        """`shares` without the steps in which TensorFlow traced."""
        return self._shares([part for part in together.PARTS if part != together.FIRST])

    def _shares(self, names: Sequence[str]) -> dict[str, float]:
        workers = self.part_seconds.values()
        seconds = {name: sum(parts[name] for parts in workers) for name in names}
        total = sum(seconds.values())
        return {name: each / total if total else 0.0 for name, each in seconds.items()}

    @property
    def hidden_share(self) -> float | None:
        """Share of the traces' exchange time that overlaps computing, if any."""
        found = [
            replica.hidden_share
            for trace in self.traces
            for replica in trace.replicas
            if replica.hidden_share is not None
        ]
        return statistics.fmean(found) if found else None

    def most(self, field: str) -> dict[int, int]:
        """The maximum of a field of lines, by worker, where known."""
        found: dict[int, int] = {}
        for worker in _workers(self.run):
            rank = worker.start.worker
            for line in worker.steps:
                value = getattr(line, field)
                if value is not None:
                    found[rank] = max(found.get(rank, 0), value)
        return dict(sorted(found.items()))

    def per_step(self, field: str) -> dict[int, float]:
        """The mean of a field over steps, by worker, where known."""
        total: dict[int, float] = collections.defaultdict(float)
        steps: dict[int, int] = collections.defaultdict(int)
        for worker in _workers(self.run):
            for line in worker.steps:
                if getattr(line, field) is not None:
                    total[worker.start.worker] += getattr(line, field)
                    steps[worker.start.worker] += line.steps
        return {rank: total[rank] / steps[rank] for rank in sorted(total)}

    def to_json(self) -> dict[str, Any]:
        """Plain data, in which None stands for numbers that JSON lacks."""
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
            "epochs": [{"epoch": e.epoch, **e.logs} for e in epochs_of(self.run)],
            "settings": dict(first.settings),
            "versions": dict(first.versions),
            "notes": list(self.notes),
        }
        return dict(finite(content, lambda _: None))


def facts_of(run: Run) -> RunFacts:
    """Computes the figures of a run."""
    starts, rates = [], []
    for session, begin in zip(run.sessions, _begins(run), strict=True):
        starts.append(_start(session, begin))
        rates += _rates(session, begin)
    traces, notes = [], [*run.notes, *mixture_notes(run)]
    for path in run.traces:
        try:
            traces.append(TraceOfStep(path.name, read_trace(path)))
        except DataError as error:
            notes.append(str(error))
    starts, stragglers = _with_lost_steps(starts), find_stragglers(run)
    return RunFacts(run, rates, starts, _parts(run), stragglers, traces, notes)


def epochs_of(run: Run) -> list[Epoch]:
    """The epochs; a repeated one as its last start reported it."""
    found = {e.epoch: e for session in run.sessions for e in session.first.epochs}
    return [found[number] for number in sorted(found)]


def _workers(run: Run) -> Iterable[WorkerRun]:
    for session in run.sessions:
        yield from session.workers.values()


def _begins(run: Run) -> list[float]:
    """Seconds from the first start to each; at least the end of the one before."""
    first, reached, found = run.sessions[0].first.start.began_seconds, 0.0, []
    for session in run.sessions:
        begin = max(session.first.start.began_seconds - first, reached)
        found.append(begin)
        reached = begin + session.first.last_seconds
    return found


def _start(session: Session, begin: float) -> Attempt:
    first = session.first
    return Attempt(
        begin,
        begin + first.last_seconds,
        first.start.workers,
        first.first_step,
        first.steps[-1].step if first.steps else 0,
        first.end is not None,
    )


def _with_lost_steps(starts: Sequence[Attempt]) -> list[Attempt]:
    found = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        lost = None
        if after is not None and None not in (start.first_step, after.first_step):
            reached = (start.first_step or 0) + start.steps
            lost = max(0, reached - (after.first_step or 0))
        found.append(dataclasses.replace(start, lost_steps=lost))
    return found


def _rates(session: Session, begin: float) -> list[Rate]:
    found = []
    for each in together.aligned_steps(session):
        if each.is_whole:
            line = each.lines[min(each.lines)]
            at, seconds = begin + line.at_seconds, each.training_seconds
            found.append(Rate(at, line.steps, seconds, each.samples, each.is_first))
    return found


def _parts(run: Run) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for session in run.sessions:
        for each in together.aligned_steps(session):
            waits = each.waiting_seconds or {}
            for rank, line in each.lines.items():
                mine = found.setdefault(rank, dict.fromkeys(together.PARTS, 0.0))
                parts = together.parts_of(line, waits.get(rank), each.is_first)
                for part, seconds in parts.items():
                    mine[part] += seconds
        for rank, worker in session.workers.items():
            mine = found.setdefault(rank, dict.fromkeys(together.PARTS, 0.0))
            for part, seconds in _tail(worker).items():
                mine[part] += seconds
    return dict(sorted(found.items()))


def _tail(worker: WorkerRun) -> dict[str, float]:
    """The time after the last line of steps: validation and callbacks."""
    if not worker.steps:
        return {together.FIRST: worker.last_seconds}
    last = worker.steps[-1]
    rest = max(0.0, worker.last_seconds - last.at_seconds)
    late = [epoch for epoch in worker.epochs if epoch.step >= last.step]
    validated = sum(epoch.validation_seconds for epoch in late)
    validation = min(validated, rest)
    return {together.VALIDATION: validation, together.BETWEEN: rest - validation}


# Tolerance for clocks, and for the delay between an event and its line.
LEAST_OVERLAP_SECONDS = 2.0


def mixture_notes(run: Run) -> Iterator[str]:
    """Notes, in sentences, if the directory holds several trainings."""
    starts = [session.first.start for session in run.sessions]
    models = [start.settings.get("model", "") for start in starts]
    found = [re.search(r"[\d,]+ weights", model) for model in models]
    weights = {match[0] for match in found if match}
    if len(weights) > 1:
        yield (
            f"its starts trained models of {' and '.join(sorted(weights))}: totals mix "
            "several trainings. Give each training its own directory."
        )
    for before, after in itertools.pairwise(run.sessions):
        first, second = before.first.start, after.first.start
        ended_seconds = first.began_seconds + before.first.last_seconds
        overlap_seconds = ended_seconds - second.began_seconds
        if first.host == second.host and overlap_seconds > LEAST_OVERLAP_SECONDS:
            yield (
                f"a training began in this directory {overlap_seconds:.0f} s before "
                "another one ended: totals mix several trainings. Give each training "
                "its own directory."
            )
            return


# Share of the step time: a worker that delays the others by less is no straggler.
LEAST_SHARE = 0.05
OWN = (together.COMPUTING, together.INPUT, together.BETWEEN)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A worker for which others waited."""

    worker: int
    share: float  # of all steps, those in which it was the last
    lost_seconds: float  # that each of the others waited for it, on average
    lost_share: float  # `lost_seconds` as a share of the time of all steps
    cause: str  # the part that took longer than on the others; "": none stands out
    more_share: float  # by which its own work exceeded the others' median


@dataclasses.dataclass(frozen=True)
class StragglerFacts:
    """The stragglers of a run."""

    found: Sequence[Straggler]  # the most expensive first
    waited_seconds: Mapping[int, float]  # for others, by worker
    steps: int  # that were examined
    unknown: str = ""  # why there is no answer; "": there is


def find_stragglers(run: Run) -> StragglerFacts:
    """Finds the workers that were last to enter exchanges, step by step.

    In a synchronous training a step takes equally long on all workers, slow or waiting;
    only the time that each spends in exchanges distinguishes them.
    """
    if all(session.first.start.workers == 1 for session in run.sessions):
        return StragglerFacts(
            (), {}, 0, "There is one worker, which waits for no other."
        )
    looked = [
        each
        for session in run.sessions
        for each in together.aligned_steps(session)
        if each.is_whole and not each.is_first
    ]
    known = [each for each in looked if each.waiting_seconds is not None]
    if not known:
        return StragglerFacts((), {}, 0, _why_unknown(run))
    seconds = sum(each.seconds for each in known)
    steps = sum(_steps(each) for each in known)
    slowest: dict[int, list[AlignedSteps]] = collections.defaultdict(list)
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
    return StragglerFacts(found, dict(sorted(waited.items())), steps)


def _steps(each: AlignedSteps) -> int:
    return next(iter(each.lines.values())).steps


def _straggler(
    rank: int, mine: Sequence[AlignedSteps], steps: int, seconds: float
) -> Straggler:
    lost = 0.0
    own: dict[int, dict[str, float]] = {}
    for each in mine:
        waits = each.waiting_seconds or {}
        lost += statistics.fmean(wait for r, wait in waits.items() if r != rank)
        for worker, line in each.lines.items():
            parts = together.parts_of(line, waits[worker], False)
            so_far = own.setdefault(worker, dict.fromkeys(OWN, 0.0))
            own[worker] = {part: so_far[part] + parts[part] for part in OWN}
    median = statistics.median
    others = {p: median(own[r][p] for r in own if r != rank) for p in OWN}
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
            "Stragglers are unknown: the file of one worker alone is here, and finding "
            "them needs the time that each one waited for the others."
        )
    return (
        "Stragglers are unknown: the duration of exchanges between hosts is measured "
        'over sockets and MPI only (Communication(engine="sockets")), and compared in '
        "steps that at least two workers recorded."
    )
