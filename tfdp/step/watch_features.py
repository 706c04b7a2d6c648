"""Notes what each feature does in a step, for a tool that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdp.chain.reduction import Reduction, Stage
from tfdp.seams.replace import Override
from tfdp.step.features import FEATURES, Feature

#: Of a feature: its name, what it is for, and what it did at each moment.
Facts = dict[str, Any]


def watch_features(tell: Callable[[int, list[Facts]], None]) -> None:
    """Calls `tell` at the end of each step that is traced from now on, in this process,
    and updates weights: with the number of replicas, and facts about each feature."""
    watched = [WatchedFeature(feature) for feature in FEATURES]
    FEATURES[:] = [*watched, EndOfStep(watched, tell)]


class WatchedFeature(Feature):
    """A feature as it is, and notes of what it does."""

    def __init__(self, feature: Feature):
        self._feature = feature

    def begin(self, call: Any) -> None:
        self._begins: list[str] = []
        # The names of the targets, by attribute and class.
        self._overrides: dict[tuple[str, str], list[str]] = {}
        self._stages: dict[str, None] = {}  # in order, each once: replicas do the same
        before, mode = call.replica_fn, call.step.mode
        self._feature.begin(call)
        if call.replica_fn is not before:
            self._begins.append("wraps the step")
        if call.step.mode is not mode:
            self._begins.append(f"makes the step {call.step.mode.value}")

    def overrides(self, call: Any) -> Iterator[Override]:
        for override in self._feature.overrides(call):
            target = override.target
            kind = (override.attribute, type(target).__name__)
            self._overrides.setdefault(kind, []).append(getattr(target, "name", ""))
            yield override

    def stages(self, reduction: Reduction) -> Iterator[Stage]:
        for stage in self._feature.stages(reduction):
            self._stages[type(stage).__name__] = None
            yield stage

    def finish(self, call: Any) -> None:
        self._feature.finish(call)
        self._remarks = list(self._feature.remarks(call))

    def facts(self) -> Facts:
        """The feature's name, what it is for, and what it has done."""
        kind = type(self._feature)
        return {
            "feature": kind.__name__,
            "about": (kind.__doc__ or "").splitlines()[0],
            "begin": self._begins,
            "overrides": [
                f"{attribute} of {owner} {', '.join(filter(None, names))}".rstrip()
                for (attribute, owner), names in self._overrides.items()
            ],
            "stages": list(self._stages),
            "remarks": self._remarks,
        }


class EndOfStep(Feature):
    """The last feature, at the end of a step: tells what the others did in it."""

    def __init__(
        self,
        watched: Sequence[WatchedFeature],
        tell: Callable[[int, list[Facts]], None],
    ):
        self._watched, self._tell = watched, tell

    def finish(self, call: Any) -> None:
        if call.step.has_updated:
            self._tell(call.step.replicas, [one.facts() for one in self._watched])
