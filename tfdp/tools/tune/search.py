"""Which setting is tried next: all of them in order, or those that Optuna asks for.

Optuna's TPE (Bergstra et al. 2011, "Algorithms for hyper-parameter optimization") is
told what the simulator likes best, and then asks by what was measured. What it asks for
twice is answered from memory: a trial costs a start of TensorFlow, an answer nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfdp.errors import MissingDependencyError
from tfdp.tools.tune.setting import Setting
from tfdp.tools.tune.space import Space

__all__ = ["InOrder", "Search", "SearchByOptuna", "search_of"]

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
