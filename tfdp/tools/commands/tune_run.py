"""The trials of `tfdp tune`, one after the other, told as they end."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import parse_json, write_json
from tfdp.plan.shards import shard_stage
from tfdp.progress_bar import progress_bar
from tfdp.tools.commands.plan_model import load_model
from tfdp.tools.commands.tune_processes import Measured, TrialFailed, run_module
from tfdp.tools.tune.proposal import in_order
from tfdp.tools.tune.space import DEFAULTS, Place, Setting, Space
from tfdp.tools.tune.tuning import Trial, Tuning, Verdict, search_of
from tfdp.tools.tune.words import Terms, line_of_round, line_of_trial, outcome

# What `tfdp tune` asks of the planner, in a process of its own: what fits the memory.
#
# `python -m tfdp.tools.commands.tune_run ORDERS`, JSON. In the command's own process
# TensorFlow would take the GPUs that the trials need.


# Shard, remat, steps of accumulation: what decides the memory.
Stored = tuple[str, bool, int]
TIMEOUT_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Orders:
    """What the process is told.

    Args:
      target: as `tfdp plan` takes it.
      rows: of the global batch.
      processes, replicas: how many, and of each.
      memory_bytes: of one replica.
      stored: what to look at.
      result_path: where the answer goes.
    """

    target: str
    rows: int
    processes: int
    replicas: int
    memory_bytes: int
    stored: list[list[Any]]
    result_path: str


def what_fits(
    target: str, place: Place, memory_bytes: int, stored: Sequence[Stored]
) -> dict[Stored, tuple[int, bool]]:
    """The bytes that a replica needs at its peak, and whether that fits.

    Args:
      target: as `tfdp plan` takes it.
      place: where it trains.
      memory_bytes: of one replica.
      stored: what to look at; what cannot be planned is not in the answer.

    Raises:
      TrialFailed: the model could not be planned.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-tune-") as folder:
        path = pathlib.Path(folder, "fits.json")
        orders = Orders(
            target,
            place.rows,
            place.processes,
            place.replicas,
            memory_bytes,
            [list(each) for each in stored],
            str(path),
        )
        words = json.dumps(dataclasses.asdict(orders))
        run_module(
            ["-m", "tfdp.tools.commands.tune_run", words],
            TIMEOUT_SECONDS,
            CUDA_VISIBLE_DEVICES="",
        )
        said = parse_json(path.read_text("utf-8"))
    return {
        (shard, remat, steps): (peak_bytes, fits)
        for (shard, remat, steps), peak_bytes, fits in said
    }


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    orders = Orders(**json.loads(arguments[0]))
    write_json(orders.result_path, _answers(orders))


def _answers(orders: Orders) -> list[Any]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()

    from tfdp.tools.planning.memory_plan import needed_for
    from tfdp.tools.planning.planner import Planner, have_devices

    have_devices(orders.replicas)
    build, batch = load_model(orders.target, orders.rows)
    planner = Planner(
        build,
        batch,
        replicas=orders.replicas,
        hosts=orders.processes,
    )
    found: list[Any] = []
    for shard, remat, steps in orders.stored:
        rows = -(-planner.local_rows // steps)
        try:
            plan = planner.at(rows, shard=shard, remat=remat)
        except ConfigurationError:
            continue  # an optimizer that cannot be sharded, a layer not recomputed
        peak_bytes = plan.peak_bytes
        if steps > 1:
            # One more set of gradients, whole or a shard of it.
            parts = planner.replicas if shard_stage(shard) >= 2 else 1
            peak_bytes += plan.trainable_bytes // parts
        fits = plan.is_known and needed_for(peak_bytes) <= orders.memory_bytes
        found.append([[shard, remat, steps], peak_bytes, fits])
    return found


if __name__ == "__main__":
    main(sys.argv[1:])


KEEPS = ("shard", "remat", "accumulation_steps")


class Measures(Protocol):
    """What trains for a few steps; `tune_processes.Trials`, or a test's own."""

    @property
    def target(self) -> str:
        """What trains, for people."""

    def measure(self, setting: Setting, asks_facts: bool = False) -> Measured:
        """The steps of one setting.

        Raises:
          TrialFailed: it came to no figure.
        """


@dataclasses.dataclass(frozen=True)
class Finished:
    """What came of it all.

    Args:
      verdict: what to train with.
      trials: the baseline first.
      lines: the log.
      place: where.
      load: of the machine, before and after.
      seconds: that it took.
    """

    verdict: Verdict
    trials: tuple[Trial, ...]
    lines: tuple[str, ...]
    place: Place
    load: tuple[float, float]
    seconds: float


class TuneRun:
    """One call of `tfdp tune`.

    Args:
      trials: what measures.
      place: where, as far as it is known.
      knobs: what may be turned.
      memory_bytes: of one replica; None: everything fits.
      most_trials, rounds, finalists: see `Tuning`.
      minutes: that all of it may take. A trial that has begun is not cut short, and a
        trial is not begun whose end, and the rounds after it, would be too late.
      say: told each line of the log.
      clock: seconds.
      fits: which of what is stored fits the memory, see `what_fits`.
    """

    def __init__(
        self,
        trials: Measures,
        place: Place,
        knobs: Mapping[str, Sequence[Any]],
        *,
        memory_bytes: int | None = None,
        most_trials: int,
        rounds: int,
        finalists: int,
        minutes: float,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
        fits: Callable[..., dict[Any, tuple[int, bool]]] = what_fits,
    ):
        self._trials, self._place, self._knobs = trials, place, dict(knobs)
        self._memory_bytes, self._ask_what_fits = memory_bytes, fits
        self._most_trials, self._rounds = most_trials, rounds
        self._finalists = finalists
        self._say, self._clock = say, clock
        self._seconds = 60 * minutes
        self._lines: list[str] = []
        self._durations: list[float] = []

    def run(self) -> Finished:
        """Tries, and decides.

        Raises:
          ConfigurationError: nothing fits, or the first trial failed.
          MissingDependencyError: Optuna is needed and not installed.
          TrialFailed: the model could not be planned.
        """
        self._start, load = self._clock(), os.getloadavg()[0]
        self._tell(f"{self._trials.target}: {self._place.rows:,} rows on {self._place}")
        fits = self._fitting()
        baseline = self._baseline(fits)
        tuning = Tuning(
            baseline,
            finalists=self._finalists,
            rounds=self._rounds,
            most_trials=self._most_trials,
        )
        with progress_bar("tuning", tuning.runs_left) as advance:
            space = self._first_trial(tuning, fits)
            advance(1)
            while (setting := tuning.setting) is not None:
                self._one(tuning, setting, space)
                advance(1)
        verdict = tuning.verdict()
        terms = Terms() if baseline == DEFAULTS else Terms("the first that fits")
        for line in [*outcome(verdict, tuning.trials, terms), *verdict.winner.lines]:
            self._tell(line)
        return Finished(
            verdict,
            tuple(tuning.trials),
            tuple(self._lines),
            self._place,
            (load, os.getloadavg()[0]),
            self._clock() - self._start,
        )

    def _fitting(self) -> Callable[[Setting], bool] | None:
        if self._memory_bytes is None:
            return None
        stored = [
            (shard, remat, steps)
            for shard in self._knobs["shard"]
            for remat in self._knobs["remat"]
            for steps in self._knobs["accumulation_steps"]
        ]
        with progress_bar("planning the memory", 0):
            found = self._ask_what_fits(
                self._trials.target, self._place, self._memory_bytes, stored
            )
        small = {each for each, (_, does) in found.items() if does}
        self._tell(
            f"{len(small)} of {len(stored)} ways to keep weights, gradients and "
            f"activations fit in {self._memory_bytes / 1e6:,.0f} MB"
        )
        if not small:
            least = min((peak for peak, _ in found.values()), default=None)
            needs = (
                "" if least is None else f"; the smallest needs {least / 1e6:,.0f} MB"
            )
            raise ConfigurationError(
                f"Nothing fits in {self._memory_bytes / 1e6:,.0f} MB{needs}, with its "
                "margin: take fewer rows (--batch), or more replicas. `tfdp plan` says "
                "what takes how much."
            )
        return lambda setting: tuple(getattr(setting, n) for n in KEEPS) in small

    def _baseline(self, fits: Callable[[Setting], bool] | None) -> Setting:
        """The defaults, or what fits and changes least."""
        if fits is None or fits(DEFAULTS):
            return DEFAULTS
        kept = {name: self._knobs[name] for name in KEEPS}
        ways = [
            Setting(shard=shard, remat=remat, accumulation_steps=steps)
            for shard in kept["shard"]
            for remat in kept["remat"]
            for steps in kept["accumulation_steps"]
        ]
        found = min(filter(fits, ways), key=lambda each: len(each.changes))
        self._tell(f"The defaults do not fit; the first that does: {found.lines}")
        return found

    def _first_trial(
        self, tuning: Tuning, fits: Callable[[Setting], bool] | None
    ) -> Space:
        baseline, before = tuning.baseline, self._clock()
        try:
            measured = self._trials.measure(baseline, asks_facts=True)
        except TrialFailed as error:
            tuning.note(None, str(error))
            raise
        self._durations.append(self._clock() - before)
        if baseline.engine == "auto":
            self._place = dataclasses.replace(
                self._place, automatic_engine=measured.engine
            )
        space = Space(self._place, self._knobs, measured.facts.model, fits)
        tuning.note(measured.speed(self._place.rows))
        predicted = in_order(space, measured.facts, baseline)
        order = [each for each, _ in predicted if each != space.same_as(baseline)]
        tuning.search(search_of(space, order, self._most_trials - 1), dict(predicted))
        first = tuning.trials[0]
        self._tell(
            f"{len(space.settings)} settings differ here, and "
            f"{min(self._most_trials, len(space.settings))} will be tried, those first "
            "that the simulator takes to be fast"
        )
        self._tell(line_of_trial(0, first, first, space))
        self._go_on(tuning)
        return space

    def _one(self, tuning: Tuning, setting: Setting, space: Space) -> None:
        first, was_searching = tuning.trials[0], tuning.is_searching
        trial = next(t for t in tuning.trials if t.setting == setting)
        before = self._clock()
        try:
            speed = self._trials.measure(setting).speed(self._place.rows)
            tuning.note(speed)
        except TrialFailed as error:
            tuning.note(None, str(error))
        self._durations.append(self._clock() - before)
        if was_searching:
            number = tuning.trials.index(trial)
            self._tell(line_of_trial(number, trial, first, space))
        else:
            self._tell(line_of_round(trial, first))
        self._go_on(tuning)

    def _go_on(self, tuning: Tuning) -> None:
        """The next trial, the rounds, or the end, as there is time."""
        left = self._seconds - (self._clock() - self._start)
        each = sum(self._durations) / len(self._durations)
        if tuning.is_searching and left < each * (1 + tuning.runs_of_rounds):
            self._tell("no time for more trials: the best so far meet the defaults")
            tuning.begin_rounds()
        else:
            tuning.go_on()
        if not tuning.is_searching and tuning.setting is not None and left < each:
            self._tell("the time is over")
            tuning.stop()

    def _tell(self, line: str) -> None:
        self._lines.append(line)
        self._say(line)
