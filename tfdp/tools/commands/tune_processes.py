"""Starts the processes of a trial, and ends them: also those that hang."""

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
from tfdp.tools.tune.proposal import TrialFacts
from tfdp.tools.tune.space import Setting

# What the cores do while a sum crosses a link of this machine; see `tfdp measure`.
COMPUTE_SHARE = 0.5


class TrialFailed(TfdpError, RuntimeError):
    """A trial came to no figure."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a trial found.

    Args:
      seconds: of each step of the whole batch.
      engine: that carried the sums.
      facts: for the simulator.
    """

    seconds: tuple[float, ...]
    engine: str
    facts: TrialFacts

    def speed(self, rows: int) -> float:
        """Samples per second, of the median step."""
        return rows / statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Trials:
    """Trials of one model in one place.

    Args:
      target: as `tfdp check` takes it.
      rows: of the global batch.
      processes, replicas: how many, and of each.
      steps: that are timed in each.
      timeout_seconds: the most that one may take.
    """

    target: str
    rows: int
    processes: int
    replicas: int
    steps: int
    timeout_seconds: float

    def measure(self, setting: Setting, asks_facts: bool = False) -> Measured:
        """The steps of one setting, in fresh processes.

        Raises:
          TrialFailed: it came to no figure; with its last lines.
        """
        with tempfile.TemporaryDirectory(prefix="tfdp-tune-") as folder:
            path = pathlib.Path(folder, "result.json")
            orders = TrialOrders(
                self.target,
                self.rows,
                self.processes,
                self.replicas,
                setting.as_json(),
                self.steps,
                self.timeout_seconds,
                asks_facts,
                str(path),
            )
            launched = []
            if self.processes > 1:
                launched = ["-m", "tfdp", "launch", "--workers", str(self.processes)]
                launched += ["--devices-per-worker", str(self.replicas)]
            words = [*launched, "-m", "tfdp.tools.commands.tune_trial"]
            run_module(
                [*words, json.dumps(dataclasses.asdict(orders))], self.timeout_seconds
            )
            return _read(path)


def run_module(words: list[str], timeout_seconds: float, **more: str) -> None:
    """Runs this Python with `words`, and ends it and all that it has started.

    Args:
      words: after the interpreter.
      timeout_seconds: the most that it may take.
      **more: variables of its environment.

    Raises:
      TrialFailed: it failed or took too long; with its last lines.
    """
    try:
        run_python(words, timeout_seconds, **more)
    except ProcessFailed as error:
        what_to_do = ". Give --timeout-seconds." if error.took_too_long else ""
        raise TrialFailed(f"{error}{what_to_do}") from None


def _read(path: pathlib.Path) -> Measured:
    try:
        said: Any = parse_json(path.read_text("utf-8"))
        seconds = tuple(said["seconds"])
        if not seconds or not all(is_number(s) and s > 0 for s in seconds):
            raise ValueError(f"no seconds: {seconds!r}")
        profile = said["profile"]
        model = ModelProfile(
            "target",
            tuple(Gradient(*each) for each in profile["gradients"]),
            profile["forward_flops_per_sample"],
        )
        link = None
        if "link" in said:
            link = Link(**said["link"], compute_share=COMPUTE_SHARE)
        facts = TrialFacts(model, statistics.median(seconds), link)
        return Measured(seconds, str(said["engine"]), facts)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrialFailed(f"it wrote no result: {error!r}") from None
