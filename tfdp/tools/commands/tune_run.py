"""Runs the trials of `tfdp tune`, one after the other, and reports each."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.plan.shards import shard_stage
from tfdp.progress_bar import progress_bar
from tfdp.tools.commands.end_of_process import leave
from tfdp.tools.commands.plan_model import load_model, parse_model
from tfdp.tools.commands.tune_processes import TrialFailed, Trials, result_of
from tfdp.tools.processes.children import answer
from tfdp.tools.tune.proposal import in_order
from tfdp.tools.tune.space import DEFAULTS, Setting, Space, TrialLayout
from tfdp.tools.tune.tuning import Trial, Tuning, TuningResult, search_of
from tfdp.tools.tune.words import Terms, line_of_round, line_of_trial, outcome

# Plans the memory in a process in which TensorFlow takes no GPU, since the trials need
# them: `python -m tfdp.tools.commands.tune_run`.

# The options that decide the memory.
Stored = tuple[str, bool, int]
STORED = ("shard", "remat", "accumulation_steps")
TIMEOUT_SECONDS = 1800.0
MODULE = "tfdp.tools.commands.tune_run"


def what_fits(
    target: str,
    place: TrialLayout,
    memory_bytes: int,
    stored: Sequence[Stored],
    arguments: Sequence[str] = (),
) -> dict[Stored, tuple[int, bool]]:
    """A replica's peak memory in bytes, and whether it fits, for each of `stored`.

    Omits those that cannot be planned; raises TrialFailed if the model cannot.

    Args:
      target: as `tfdp plan` takes it.
      place: the processes and replicas.
      memory_bytes: of one replica.
      stored: the ways to plan.
      arguments: of a script that is run.
    """
    request = {
        "target": target,
        "place": [place.rows, place.processes, place.replicas],
        "memory_bytes": memory_bytes,
        "stored": [list(each) for each in stored],
        "arguments": list(arguments),
    }
    found = result_of(MODULE, request, TIMEOUT_SECONDS, CUDA_VISIBLE_DEVICES="")
    return {tuple(each): (peak_bytes, fits) for each, peak_bytes, fits in found}


def batch_of_script(target: str, arguments: Sequence[str], replicas: int) -> int:
    """The batch size of the first `fit` of a script.

    Raises:
      ConfigurationError: the script has no such fit.
      TrialFailed: it raised an error.
    """
    request = {"target": target, "arguments": list(arguments), "replicas": replicas}
    found = result_of(MODULE, request, TIMEOUT_SECONDS, CUDA_VISIBLE_DEVICES="")
    if isinstance(found, str):
        raise ConfigurationError(found)
    return int(found)


def _batch_of(target: str, arguments: list[str], replicas: int) -> int | str:
    """The batch size, or why there is none."""
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    from tfdp.tools.planning.traced_step import batch_of

    parsed = parse_model(target, arguments, None)
    try:
        build, batch = load_model(parsed, None, replicas)
    except ConfigurationError as error:
        return str(error)
    return int(batch_of(batch, build).rows)


def _answers(
    target: str,
    place: list[int],
    memory_bytes: int,
    stored: list[list[Any]],
    arguments: list[str],
) -> list[Any]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    from tfdp.tools.planning.memory_plan import needed_for
    from tfdp.tools.planning.planner import Planner, have_devices

    global_rows, processes, replicas = place
    have_devices(replicas)
    parsed = parse_model(target, arguments, global_rows)
    build, batch = load_model(parsed, global_rows, replicas * processes)
    planner = Planner(build, batch, replicas=replicas, hosts=processes)
    found: list[Any] = []
    for shard, remat, steps in stored:
        rows = -(-planner.local_rows // steps)
        try:
            plan = planner.at(rows, shard=shard, remat=remat)
        except ConfigurationError:
            continue  # its optimizer cannot be sharded, or a layer not recomputed
        peak_bytes = plan.peak_bytes
        if steps > 1:
            # The accumulated gradients, whole or sharded.
            parts = planner.replicas if shard_stage(shard) >= 2 else 1
            peak_bytes += plan.trainable_bytes // parts
        fits = plan.is_known and needed_for(peak_bytes) <= memory_bytes
        found.append([[shard, remat, steps], peak_bytes, fits])
    return found


@dataclasses.dataclass(frozen=True)
class Finished:
    """The result of `tfdp tune`."""

    verdict: TuningResult
    trials: tuple[Trial, ...]  # the baseline first
    lines: tuple[str, ...]  # the log
    place: TrialLayout
    load: tuple[float, float]  # of the machine, before and after
    seconds: float


@dataclasses.dataclass
class TuneRun:
    """One call of `tfdp tune`, within a time limit.

    It does not interrupt a trial; a trial does not start if it, and the rounds after
    it, would end too late.
    """

    trials: Trials
    place: TrialLayout  # the first trial reports its engine
    knobs: Mapping[str, Sequence[Any]]  # option name -> values to try
    _: dataclasses.KW_ONLY
    memory_bytes: int | None = None  # of one replica; None: everything fits
    most_trials: int
    rounds: int
    finalists: int  # of the rounds
    minutes: float
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    clock: Callable[[], float] = time.monotonic  # seconds
    fits: Callable[..., dict[Any, tuple[int, bool]]] = what_fits

    def run(self) -> Finished:
        """Tries settings, and decides.

        Raises:
          ConfigurationError: nothing fits, or the first trial failed.
          MissingDependencyError: Optuna is needed and not installed.
          TrialFailed: the model could not be planned.
        """
        self._lines: list[str] = []
        self._durations: list[float] = []
        self._start, load = self.clock(), os.getloadavg()[0]
        self._log(f"{self.trials.target}: {self.place.rows:,} rows on {self.place}")
        fits = self._fitting()
        baseline = self._baseline(fits)
        tuning = Tuning(
            baseline,
            finalists=self.finalists,
            rounds=self.rounds,
            most_trials=self.most_trials,
        )
        with progress_bar("tuning", tuning.runs_left) as advance:
            space = self._first_trial(tuning, fits)
            advance(1)
            while (setting := tuning.setting) is not None:
                self._run_trial(tuning, setting, space)
                advance(1)
        verdict = tuning.verdict()
        terms = Terms() if baseline == DEFAULTS else Terms("the first that fits")
        for line in [*outcome(verdict, tuning.trials, terms), *verdict.winner.lines]:
            self._log(line)
        return Finished(
            verdict,
            tuple(tuning.trials),
            tuple(self._lines),
            self.place,
            (load, os.getloadavg()[0]),
            self.clock() - self._start,
        )

    def _stored(self) -> list[Stored]:
        return list(itertools.product(*(self.knobs[name] for name in STORED)))

    def _fitting(self) -> Callable[[Setting], bool] | None:
        if self.memory_bytes is None:
            return None
        stored = self._stored()
        with progress_bar("planning the memory", 0):
            target, memory_bytes = self.trials.target, self.memory_bytes
            found = self.fits(target, self.place, memory_bytes, stored)
        small = {each for each, (_, does) in found.items() if does}
        self._log(
            f"{len(small)} of {len(stored)} ways to keep weights, gradients and "
            f"activations fit in {self.memory_bytes / 1e6:,.0f} MB"
        )
        if not small:
            least = min((peak for peak, _ in found.values()), default=None)
            needs = f"; the smallest needs {least / 1e6:,.0f} MB" if least else ""
            raise ConfigurationError(
                f"Nothing fits in {self.memory_bytes / 1e6:,.0f} MB{needs}, with its "
                "margin: use fewer rows (--batch) or more replicas. `tfdp plan` shows "
                "what needs how much."
            )
        return lambda setting: tuple(getattr(setting, n) for n in STORED) in small

    def _baseline(self, fits: Callable[[Setting], bool] | None) -> Setting:
        """The defaults, or the setting that fits with the fewest changes."""
        if fits is None or fits(DEFAULTS):
            return DEFAULTS
        ways = [
            Setting(shard=shard, remat=remat, accumulation_steps=steps)
            for shard, remat, steps in self._stored()
        ]
        found = min(filter(fits, ways), key=lambda each: len(each.changes))
        self._log(f"The defaults do not fit; the first that does: {found.lines}")
        return found

    def _first_trial(
        self, tuning: Tuning, fits: Callable[[Setting], bool] | None
    ) -> Space:
        baseline, before = tuning.baseline, self.clock()
        try:
            measured = self.trials.measure(baseline, with_facts=True)
        except TrialFailed as error:
            tuning.note(None, str(error))
            raise
        self._durations.append(self.clock() - before)
        if baseline.engine == "auto":
            engine = measured.engine
            self.place = dataclasses.replace(self.place, automatic_engine=engine)
        space = Space(self.place, self.knobs, measured.facts.model, fits)
        tuning.note(measured.speed(self.place.rows))
        predicted = in_order(space, measured.facts, baseline)
        order = [each for each, _ in predicted if each != space.same_as(baseline)]
        tuning.search(search_of(space, order, self.most_trials - 1), dict(predicted))
        first = tuning.trials[0]
        self._log(
            f"{len(space.settings)} settings differ here, and "
            f"{min(self.most_trials, len(space.settings))} will be tried, starting "
            "with those that the simulator predicts to be fastest"
        )
        self._log(line_of_trial(0, first, first, space))
        self._go_on(tuning)
        return space

    def _run_trial(self, tuning: Tuning, setting: Setting, space: Space) -> None:
        first, was_searching = tuning.trials[0], tuning.is_searching
        trial = next(t for t in tuning.trials if t.setting == setting)
        before = self.clock()
        try:
            speed = self.trials.measure(setting).speed(self.place.rows)
            tuning.note(speed)
        except TrialFailed as error:
            tuning.note(None, str(error))
        self._durations.append(self.clock() - before)
        if was_searching:
            number = tuning.trials.index(trial)
            self._log(line_of_trial(number, trial, first, space))
        else:
            self._log(line_of_round(trial, first))
        self._go_on(tuning)

    def _go_on(self, tuning: Tuning) -> None:
        """Selects the next trial, the rounds or the end, by the time left."""
        left = 60 * self.minutes - (self.clock() - self._start)
        each = sum(self._durations) / len(self._durations)
        if tuning.is_searching and left < each * (1 + tuning.runs_of_rounds):
            self._log("no time for more trials: comparing the best with the defaults")
            tuning.begin_rounds()
        else:
            tuning.go_on()
        if not tuning.is_searching and tuning.setting is not None and left < each:
            self._log("the time limit is reached")
            tuning.stop()

    def _log(self, line: str) -> None:
        self._lines.append(line)
        self.say(line)


def _answer(request: dict[str, Any]) -> Any:
    return _answers(**request) if "stored" in request else _batch_of(**request)


if __name__ == "__main__":
    answer(sys.argv[1:], _answer)
    leave(0)
