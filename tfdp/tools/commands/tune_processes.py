"""Starts the processes of a trial, and stops them, also when they hang."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.checks import is_number
from tfdp.errors import TfdpError
from tfdp.tools.processes.children import ProcessFailed, ask_child
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.model import ModelProfile
from tfdp.tools.tune.proposal import COMPUTE_SHARE, TrialFacts
from tfdp.tools.tune.space import Setting, TrialLayout


class TrialFailed(TfdpError, RuntimeError):
    """A trial returned no measurement."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of a trial."""

    seconds: tuple[float, ...]  # of each step of the whole batch
    engine: str  # that summed the gradients
    facts: TrialFacts  # for the simulator

    def speed(self, rows: int) -> float:
        return rows / statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Trials:
    """Trials of one model in one place."""

    target: str  # as `tfdp check` takes it
    place: TrialLayout
    steps: int  # timed in each trial
    timeout_seconds: float  # of each trial
    arguments: tuple[str, ...] = ()  # of a script that is run

    def measure(self, setting: Setting, with_facts: bool = False) -> Measured:
        """Times one setting in fresh processes; raises TrialFailed."""
        place = self.place
        launcher: list[str] = []
        if place.processes > 1:
            launcher = ["-m", "tfdp", "launch", "--workers", str(place.processes)]
            launcher += ["--devices-per-worker", str(place.replicas)]
        request = dataclasses.asdict(self)
        request |= {"setting": setting.as_json(), "with_facts": with_facts}
        module, seconds = "tfdp.tools.commands.tune_trial", self.timeout_seconds
        try:
            return _parse(result_of(module, request, seconds, launcher))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TrialFailed(f"it wrote no result: {error!r}") from None


def result_of(
    module: str,
    request: Mapping[str, Any],
    timeout_seconds: float,
    launcher: Sequence[str] = (),
    **more: str,
) -> Any:
    """The result of `ask_child`; raises TrialFailed with last lines and advice."""
    try:
        return ask_child(module, request, timeout_seconds, launcher, **more)
    except ProcessFailed as error:
        hint = ". Give a larger --timeout-seconds." if error.took_too_long else ""
        reason = "\n".join([*error.last_lines, f"{error.how}{hint}"])
        raise TrialFailed(reason) from None


def _parse(found: Any) -> Measured:
    seconds = tuple(found["seconds"])
    if not seconds or not all(is_number(s) and s > 0 for s in seconds):
        raise ValueError(f"no seconds: {seconds!r}")
    link = None
    if "link" in found:
        link = Link(**found["link"], compute_share=COMPUTE_SHARE)
    model = ModelProfile.from_plain("target", found["profile"])
    facts = TrialFacts(model, statistics.median(seconds), link)
    return Measured(seconds, str(found["engine"]), facts)
