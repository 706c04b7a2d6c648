"""The trials, and the rounds in which the best of them meet the defaults. Pure.

search     each setting once, as the search asks; the first is the baseline
rounds     the baseline and the finalists in turn: A B C, B C A, ...
verdict    by the rounds alone: what was fast once was lucky, too

Who owns it asks for `setting`, tries it, and tells by `note` what came of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfdp.errors import ConfigurationError, MissingDependencyError
from tfdp.tools.tune.space import Setting, Space

FINALISTS, ROUNDS = 2, 3


@dataclasses.dataclass
class Trial:
    """One setting, and what came of it.

    Args:
      setting: that was tried.
      predicted: samples per second, by the simulator; None: it was not asked.
      speed: samples per second, in the search; None: it failed.
      failure: why, in words.
      rounds: its speeds in the rounds.
    """

    setting: Setting
    predicted: float | None = None
    speed: float | None = None
    failure: str = ""
    rounds: list[float] = dataclasses.field(default_factory=list)


class Tuning:
    """Trials of one program.

    Args:
      baseline: the defaults; where these do not fit, what comes nearest to them.
      finalists: how many meet it in the rounds, at least 1.
      rounds: at least 2.
      most_trials: in the search, the baseline among them.
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
        #: What comes in the rounds; None: the search goes on.
        self._in_turn: list[Trial] | None = None
        self._current: Trial | None = self.trials[0]

    @property
    def setting(self) -> Setting | None:
        """What is to be tried now; None: it is over."""
        return None if self._current is None else self._current.setting

    @property
    def is_searching(self) -> bool:
        """Whether the rounds have not begun."""
        return self._in_turn is None

    @property
    def runs_left(self) -> int:
        """How many times a setting will be tried from now on, at the most."""
        if self._in_turn is not None:
            return len(self._in_turn) + (self._current is not None)
        return self._most_trials - len(self.trials) + 1 + self.runs_of_rounds

    @property
    def runs_of_rounds(self) -> int:
        """How many of them are in rounds."""
        return self._rounds * (1 + self._finalists)

    def search(self, search: Search, predicted: dict[Setting, float]) -> None:
        """What asks for the trials after the first, once that is known.

        Args:
          search: it.
          predicted: samples per second by setting, for the words.
        """
        self._search, self._predicted = search, predicted
        self.trials[0].predicted = predicted.get(self.baseline)

    def note(self, speed: float | None, failure: str = "") -> None:
        """What came of `setting`; then `setting` is the next one.

        Args:
          speed: samples per second; None: it failed.
          failure: why.

        Raises:
          ConfigurationError: the baseline failed: there is nothing to compare with.
        """
        trial = self._current
        if trial is None:
            raise RuntimeError("nothing is being tried")
        if self._in_turn is not None:
            self._note_round(trial, speed, failure)
            return
        trial.speed, trial.failure = speed, failure
        if trial is self.trials[0]:
            if speed is None:
                raise ConfigurationError(
                    "The first trial failed, that of "
                    f"{self.baseline.communication_line}, and there is nothing to "
                    f"compare others with: {failure}"
                )
            self._current = None
        elif self._search is not None:
            self._search.tell(trial.setting, speed)

    def go_on(self) -> None:
        """Chooses the next setting; after each `note` of the search."""
        if self._in_turn is not None:
            return
        asked = None
        if self._search is not None and len(self.trials) < self._most_trials:
            asked = self._search.ask()
        if asked is None:
            self.begin_rounds()
            return
        self._current = Trial(asked, self._predicted.get(asked))
        self.trials.append(self._current)

    def begin_rounds(self) -> None:
        """Ends the search: the best and the baseline meet."""
        first, *others = self.trials
        ran = [trial for trial in others if trial.speed is not None]
        ran.sort(key=lambda trial: -(trial.speed or 0.0))
        met = [first, *ran[: self._finalists]]
        self._in_turn = []
        if len(met) > 1:
            for number in range(self._rounds):
                shift = number % len(met)
                self._in_turn += [*met[shift:], *met[:shift]]
        self._current = self._in_turn.pop(0) if self._in_turn else None

    def _note_round(self, trial: Trial, speed: float | None, failure: str) -> None:
        turns = self._in_turn or []
        if speed is None:
            # It has failed now, so it may fail in the training.
            trial.failure = failure
            turns = [each for each in turns if each is not trial]
            if trial is self.trials[0]:
                turns = []
        else:
            trial.rounds.append(speed)
        self._in_turn = turns
        self._current = turns.pop(0) if turns else None

    def stop(self) -> None:
        """The time is over: no more trials."""
        self._in_turn, self._current = [], None

    def verdict(self) -> Verdict:
        """Who wins by the rounds that were measured in full."""
        first, *others = self.trials
        met = [trial for trial in others if trial.rounds and not trial.failure]
        full = min((len(each.rounds) for each in (first, *met)), default=0)
        return decide(
            self.baseline,
            first.rounds[:full],
            {trial.setting: trial.rounds[:full] for trial in met},
        )


# Which setting is tried next: all of them in order, or those that Optuna asks for.
#
# Optuna's TPE (Bergstra et al. 2011, "Algorithms for hyper-parameter optimization") is
# told what the simulator likes best, and then asks by what was measured. What it asks
# for twice is answered from memory: a trial costs a start of TensorFlow, an answer
# nothing.


# In a row, which have all been tried; then the simulator chooses.
MOST_REPEATS = 30
SEED = 0
NOT_INSTALLED = (
    "There are {settings} settings for {trials} trials, and what chooses among them, "
    "Optuna, is not installed: pip install 'tfdp[tune]', or give --trials {settings}, "
    "which tries them all."
)


class Search(Protocol):
    """Says what to try."""

    def ask(self) -> Setting | None:
        """The next setting; None: there is no other."""

    def tell(self, setting: Setting, speed: float | None) -> None:
        """What came of it: samples per second; None: it failed."""


class InOrder:
    """All settings, one after the other.

    Args:
      settings: in their order.
    """

    def __init__(self, settings: Sequence[Setting]):
        self._left = list(settings)

    def ask(self) -> Setting | None:
        return self._left.pop(0) if self._left else None

    def tell(self, setting: Setting, speed: float | None) -> None:
        """Nothing comes of it: the order stands."""


class SearchByOptuna:
    """Half of the trials are the simulator's best, the others are TPE's.

    Args:
      space: what may be tried.
      order: its settings, the best as predicted first.
      trials: how many there will be.

    Raises:
      MissingDependencyError: Optuna is not installed.
    """

    def __init__(self, space: Space, order: Sequence[Setting], trials: int):
        try:
            import optuna
        except ImportError:
            raise MissingDependencyError(
                NOT_INSTALLED.format(settings=len(order), trials=trials)
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._left = space, list(order)
        # Values of all types by their place, which is a plain number.
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
        self._asked: dict[Setting, Any] = {}
        self._known: dict[Setting, float | None] = {}

    def ask(self) -> Setting | None:
        for _ in range(MOST_REPEATS):
            trial = self._study.ask(self._distributions)
            setting = self._space.same_as(self._setting_of(trial.params))
            if setting in self._left:
                self._left.remove(setting)
                self._asked[setting] = trial
                return setting
            # Tried, does not fit, or cannot act.
            self._tell(trial, self._known.get(setting))
        return self._left.pop(0) if self._left else None

    def tell(self, setting: Setting, speed: float | None) -> None:
        self._known[setting] = speed
        trial = self._asked.pop(setting, None)
        if trial is not None:
            self._tell(trial, speed)

    def _tell(self, trial: Any, speed: float | None) -> None:
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


def search_of(space: Space, order: Sequence[Setting], trials: int) -> Search:
    """All settings where there are trials enough, else those that Optuna asks for.

    Args:
      space: what may be tried.
      order: its settings without those that were tried, the best as predicted first.
      trials: how many there will be.

    Raises:
      MissingDependencyError: Optuna is needed and not installed.
    """
    if len(order) <= trials:
        return InOrder(order)
    return SearchByOptuna(space, order, trials)


# Who wins: a challenger that beats the defaults by more than the spread. Pure.
#
# The defaults and the challengers are measured in rounds, in turn. In each round the
# gain of a challenger is its speed over that of the defaults in the same round, so that
# a slow minute of the machine cancels out. With G the median of its gains over the
# rounds and S their range, the largest less the smallest,
#
#     it beats the defaults where  G - 1 > S
#
# Then it was faster in every round, too. Of figures that differ by chance alone it lets
# 4.5% of single challengers pass in three rounds, and one of two finalists in 8% of the
# cases, which are then as fast as the defaults; tests/pure/test_tune_decision.py
# counts.


LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Gain:
    """What a challenger gained on the defaults.

    Args:
      median: of its speed over theirs, in each round, less 1.
      spread: of these ratios, the largest less the smallest.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, challenger: Sequence[float], defaults: Sequence[float]) -> Gain:
        """From speeds in samples per second, by round.

        >>> Gain.of([11.0, 12.0, 13.0], [10.0, 10.0, 10.0]).median
        0.19999999999999996
        """
        ratios = [a / b for a, b in zip(challenger, defaults, strict=True)]
        return cls(statistics.median(ratios) - 1, max(ratios) - min(ratios))

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it is faster by more than the spread."""
        return self.median > self.spread


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What to train with.

    Args:
      winner: the setting.
      gains: of each challenger.
      rounds: that were measured.
    """

    winner: Setting
    gains: Mapping[Setting, Gain]
    rounds: int


def decide(
    defaults: Setting,
    default_speeds: Sequence[float],
    challengers: Mapping[Setting, Sequence[float]],
) -> Verdict:
    """The fastest challenger that beats the defaults by more than the spread, or they.

    Args:
      defaults: what nobody has to be told to use.
      default_speeds: samples per second, by round.
      challengers: the same of others; one that was not measured in every round that
        the defaults were cannot win.
    """
    rounds = len(default_speeds)
    gains = {
        setting: Gain.of(speeds, default_speeds)
        for setting, speeds in challengers.items()
        if len(speeds) == rounds >= LEAST_ROUNDS
    }
    better = [setting for setting, gain in gains.items() if gain.is_beyond_chance]
    winner = max(better, key=lambda each: gains[each].median, default=defaults)
    return Verdict(winner, gains, rounds)
