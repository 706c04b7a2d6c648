"""The trials, and the rounds in which the best of them meet the defaults. Pure.

search     each setting once, as the search asks; the first is the baseline
rounds     the baseline and the finalists in turn: A B C, B C A, ...
verdict    by the rounds alone: what was fast once was lucky, too

Who owns it asks for `setting`, tries it, and tells by `note` what came of it.
"""

from __future__ import annotations

import dataclasses

from tfdp.errors import ConfigurationError
from tfdp.tools.tune.decision import Verdict, decide
from tfdp.tools.tune.search import Search
from tfdp.tools.tune.setting import Setting

__all__ = ["FINALISTS", "ROUNDS", "Trial", "Tuning"]

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
