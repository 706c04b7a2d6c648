"""Starts the processes of a trial, and stops them, also when they hang."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
from typing import Any

from tfdp.checks import is_number
from tfdp.errors import TfdpError
from tfdp.files.checked_json import parse_json
from tfdp.tools.bench.python_process import ProcessFailed, run_python
from tfdp.tools.commands.tune_trial import TrialOrders
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.model import Gradient, ModelProfile
from tfdp.tools.tune.proposal import COMPUTE_SHARE, TrialFacts
from tfdp.tools.tune.space import Place, Setting


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
    place: Place
    steps: int  # timed in each trial
    timeout_seconds: float  # of each trial

    def measure(self, setting: Setting, with_facts: bool = False) -> Measured:
        """Times one setting in fresh processes; raises TrialFailed."""
        place, words = self.place, ["-m", "tfdp.tools.commands.tune_trial"]
        if place.processes > 1:
            launch = ["-m", "tfdp", "launch", "--workers", str(place.processes)]
            words = [*launch, "--devices-per-worker", str(place.replicas), *words]
        orders = TrialOrders(
            self.target,
            place.rows,
            place.processes,
            place.replicas,
            setting.as_json(),
            self.steps,
            self.timeout_seconds,
            with_facts,
        )
        seconds = self.timeout_seconds
        try:
            found = result_of(words, dataclasses.asdict(orders), seconds)
            return _parse(found)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TrialFailed(f"it wrote no result: {error!r}") from None


def result_of(
    words: list[str], orders: dict[str, Any], timeout_seconds: float, **more: str
) -> Any:
    """Runs this Python with `words` and `orders` as JSON; returns its JSON result."""
    with tempfile.TemporaryDirectory(prefix="tfdp-tune-") as folder:
        path = pathlib.Path(folder, "result.json")
        last = json.dumps({**orders, "result_path": str(path)})
        run_module([*words, last], timeout_seconds, **more)
        return parse_json(path.read_text("utf-8"))


def run_module(words: list[str], timeout_seconds: float, **more: str) -> None:
    """Runs this Python with the arguments `words`, and ends it and all its children.

    Args:
      words: arguments of the interpreter.
      timeout_seconds: its time limit.
      **more: environment variables.

    Raises:
      TrialFailed: it failed or took too long; with its last lines.
    """
    try:
        run_python(words, timeout_seconds, **more)
    except ProcessFailed as error:
        hint = ". Give a larger --timeout-seconds." if error.took_too_long else ""
        raise TrialFailed(f"{error}{hint}") from None


def _parse(found: Any) -> Measured:
    seconds = tuple(found["seconds"])
    if not seconds or not all(is_number(s) and s > 0 for s in seconds):
        raise ValueError(f"no seconds: {seconds!r}")
    gradients = tuple(Gradient(*each) for each in found["profile"]["gradients"])
    flops = found["profile"]["forward_flops_per_sample"]
    link = None
    if "link" in found:
        link = Link(**found["link"], compute_share=COMPUTE_SHARE)
    model = ModelProfile("target", gradients, flops)
    facts = TrialFacts(model, statistics.median(seconds), link)
    return Measured(seconds, str(found["engine"]), facts)
