"""The trials of a tuning, and the rounds that compare the best with the baseline.

search     each setting once, in the order of the search; the first is the baseline
rounds     the baseline and the finalists in turn: A B C, B C A, ...
verdict    by the rounds only: a fast single trial may be luck

The caller runs `setting` and reports the result with `note`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.errors import ConfigurationError, MissingDependencyError
from tfdp.tools.tune.space import Setting, Space

FINALISTS, ROUNDS = 2, 3


@dataclasses.dataclass
class Trial:
    """One setting and its results.

    `speed` (None: it failed), `predicted` by the simulator, and the speeds in the
    `rounds` are samples per second.
    """

    setting: Setting
    predicted: float | None = None
    speed: float | None = None
    failure: str = ""
    rounds: list[float] = dataclasses.field(default_factory=list)


class Tuning:
    """Trials of one program.

    `baseline` are the defaults or, if these do not fit, the nearest setting that does;
    it counts among `most_trials`. The rounds compare `finalists` others with it.
    """

    def __init__(
        self,
        baseline: Setting,
        *,
        finalists: int = FINALISTS,
        rounds: int = ROUNDS,
        most_trials: int,
    ):
        self.baseline = baseline
        self.trials: list[Trial] = [Trial(baseline)]
        self._finalists, self._rounds = finalists, rounds
        self._most_trials = most_trials
        self._search: Search | None = None
        #: The remaining trials of the rounds; None: still searching.
        self._in_turn: list[Trial] | None = None
        self._current: Trial | None = self.trials[0]

    @property
    def setting(self) -> Setting | None:
        """The setting to try now; None: finished."""
        return None if self._current is None else self._current.setting

    @property
    def is_searching(self) -> bool:
        return self._in_turn is None

    @property
    def runs_left(self) -> int:
        """How many trials are left, at most, rounds included."""
        if self._in_turn is not None:
            return len(self._in_turn) + (self._current is not None)
        return self._most_trials - len(self.trials) + 1 + self.runs_of_rounds

    @property
    def runs_of_rounds(self) -> int:
        """How many trials the rounds have."""
        return self._rounds * (1 + self._finalists)

    def search(self, search: Search, predicted: dict[Setting, float]) -> None:
        """Sets the search for the trials after the first, and the predicted speeds."""
        self._search, self._predicted = search, predicted
        self.trials[0].predicted = predicted.get(self.baseline)

    def note(self, speed: float | None, failure: str = "") -> None:
        """Records the result of `setting`, in samples per second (None: it failed).

        Raises ConfigurationError if the baseline failed: nothing to compare with.
        """
        trial = self._current
        if trial is None:
            raise RuntimeError("no trial is running")
        if self._in_turn is not None:
            self._note_round(trial, speed, failure)
            return
        trial.speed, trial.failure = speed, failure
        if trial is self.trials[0]:
            if speed is None:
                raise ConfigurationError(
                    f"The first trial failed ({self.baseline.communication_line}), so "
                    f"there is no baseline to compare others with: {failure}"
                )
            self._current = None
        elif self._search is not None:
            self._search.record(trial.setting, speed)

    def go_on(self) -> None:
        """Chooses the next setting; call it after each `note` of the search."""
        if self._in_turn is not None:
            return
        setting = None
        if self._search is not None and len(self.trials) < self._most_trials:
            setting = self._search.next_setting()
        if setting is None:
            self.begin_rounds()
            return
        self._current = Trial(setting, self._predicted.get(setting))
        self.trials.append(self._current)

    def begin_rounds(self) -> None:
        """Ends the search: compares the best with the baseline."""
        first, *others = self.trials
        ran = [trial for trial in others if trial.speed is not None]
        ran.sort(key=lambda trial: -(trial.speed or 0.0))
        compared = [first, *ran[: self._finalists]]
        self._in_turn = []
        if len(compared) > 1:
            for number in range(self._rounds):
                shift = number % len(compared)
                self._in_turn += [*compared[shift:], *compared[:shift]]
        self._current = self._in_turn.pop(0) if self._in_turn else None

    def _note_round(self, trial: Trial, speed: float | None, failure: str) -> None:
        turns = self._in_turn or []
        if speed is None:
            # It failed now, so it may fail in training.
            trial.failure = failure
            turns = [each for each in turns if each is not trial]
            if trial is self.trials[0]:
                turns = []
        else:
            trial.rounds.append(speed)
        self._in_turn = turns
        self._current = turns.pop(0) if turns else None

    def stop(self) -> None:
        """Ends the trials: the time is up."""
        self._in_turn, self._current = [], None

    def verdict(self) -> TuningResult:
        """The winner by the rounds that are complete."""
        first, *others = self.trials
        ran = [trial for trial in others if trial.rounds and not trial.failure]
        full = min((len(each.rounds) for each in (first, *ran)), default=0)
        return decide(
            self.baseline,
            first.rounds[:full],
            {trial.setting: trial.rounds[:full] for trial in ran},
        )


# After this many repeated suggestions in a row, take the simulator's next best.
MOST_REPEATS = 30
SEED = 0


class InOrder:
    """Tries all settings, in the given order."""

    def __init__(self, settings: Sequence[Setting]):
        self._left = list(settings)

    def next_setting(self) -> Setting | None:
        return self._left.pop(0) if self._left else None

    def record(self, setting: Setting, speed: float | None) -> None:
        pass


class SearchByOptuna:
    """The simulator's best for half of the trials, then Optuna's TPE.

    TPE: Bergstra et al. 2011, "Algorithms for hyper-parameter optimization". A repeated
    suggestion is answered from memory, since a trial starts TensorFlow. `order`: the
    settings, the best as predicted first.
    """

    def __init__(self, space: Space, order: Sequence[Setting], trials: int):
        try:
            import optuna
        except ImportError:
            raise MissingDependencyError(
                f"There are {len(order) + 1} settings with the defaults, and --trials "
                f"is {trials + 1}. Optuna, which chooses among them, is not installed: "
                f"pip install 'tfdp[tune]', or try all with --trials {len(order) + 1}."
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._left = space, list(order)
        # Values of any type by index, which is a plain number.
        self._knobs: dict[str, tuple[Any, ...]] = {
            name: values for name, values in space.knobs.items() if len(values) > 1
        }
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(range(len(values)))
            for name, values in self._knobs.items()
        }
        self._study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(
                seed=SEED, multivariate=True, n_startup_trials=max(2, trials // 2)
            ),
        )
        self._failed = optuna.trial.TrialState.FAIL
        for setting in order[: max(1, trials // 2)]:
            self._study.enqueue_trial(self._places_of(setting))
        self._pending: dict[Setting, Any] = {}
        self._speeds: dict[Setting, float | None] = {}

    def next_setting(self) -> Setting | None:
        for _ in range(MOST_REPEATS):
            trial = self._study.ask(self._distributions)
            setting = self._space.same_as(self._setting_of(trial.params))
            if setting in self._left:
                self._left.remove(setting)
                self._pending[setting] = trial
                return setting
            # Already tried, does not fit, or cannot run.
            self._report(trial, self._speeds.get(setting))
        return self._left.pop(0) if self._left else None

    def record(self, setting: Setting, speed: float | None) -> None:
        self._speeds[setting] = speed
        trial = self._pending.pop(setting, None)
        if trial is not None:
            self._report(trial, speed)

    def _report(self, trial: Any, speed: float | None) -> None:
        if speed is None:
            self._study.tell(trial, state=self._failed)
        else:
            self._study.tell(trial, speed)

    def _places_of(self, setting: Setting) -> dict[str, int]:
        return {
            name: values.index(getattr(setting, name))
            for name, values in self._knobs.items()
        }

    def _setting_of(self, places: Mapping[str, int]) -> Setting:
        return Setting(
            **{name: values[places[name]] for name, values in self._knobs.items()}
        )


Search = InOrder | SearchByOptuna


def search_of(space: Space, order: Sequence[Setting], trials: int) -> Search:
    """All settings in `order` if there are enough trials, else Optuna's choice."""
    if len(order) <= trials:
        return InOrder(order)
    return SearchByOptuna(space, order, trials)


# A challenger's gain is its speed over that of the defaults in the same round: a slow
# minute of the machine cancels out. With G the median of its gains and S their range,
# it beats the defaults where G - 1 > S; then it was faster in every round. If speeds
# differ by chance only, 4.5% of single challengers pass in three rounds, and one of two
# finalists in 8% of cases (counted by tests/pure/test_tune_decision.py).
LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Gain:
    """Gain on the defaults: median of the speed ratios by round less 1; their range."""

    median: float
    spread: float

    @classmethod
    def of(cls, challenger: Sequence[float], defaults: Sequence[float]) -> Gain:
        """Computes the gain from samples per second, by round."""
        ratios = [a / b for a, b in zip(challenger, defaults, strict=True)]
        return cls(statistics.median(ratios) - 1, max(ratios) - min(ratios))

    @property
    def is_beyond_chance(self) -> bool:
        return self.median > self.spread


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The winner, the gain of each challenger, and the number of rounds measured."""

    winner: Setting
    gains: Mapping[Setting, Gain]
    rounds: int


def decide(
    defaults: Setting,
    default_speeds: Sequence[float],
    challengers: Mapping[Setting, Sequence[float]],
) -> TuningResult:
    """The fastest challenger that beats the defaults by more than the spread, or these.

    A challenger without a speed in every round of the defaults cannot win.
    """
    rounds = len(default_speeds)
    gains = {
        setting: Gain.of(speeds, default_speeds)
        for setting, speeds in challengers.items()
        if len(speeds) == rounds >= LEAST_ROUNDS
    }
    better = [setting for setting, gain in gains.items() if gain.is_beyond_chance]
    winner = max(better, key=lambda each: gains[each].median, default=defaults)
    return TuningResult(winner, gains, rounds)
