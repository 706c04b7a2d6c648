"""Whether what a run's directory holds is of one training."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tfdp.tools.runs.read import Run

__all__ = ["what_is_mixed"]

# What a clock, and the time between a line and its writing, may be off.
LEAST_OVERLAP_SECONDS = 2.0


def what_is_mixed(run: Run) -> Iterator[str]:
    """Notes where numbers that are added up are of several trainings, in sentences."""
    starts = [session.first.start for session in run.sessions]
    weights = {_weights_of(start.settings.get("model", "")) for start in starts}
    if len(weights - {""}) > 1:
        models = " and ".join(sorted(weights - {""}))
        yield (
            f"its starts trained models of {models}: what is said of all of it is a "
            "mixture. Give each training a directory of its own."
        )
    for before, after in itertools.pairwise(run.sessions):
        first, second = before.first.start, after.first.start
        ended_seconds = first.began_seconds + before.first.last_seconds
        overlap_seconds = ended_seconds - second.began_seconds
        if first.host == second.host and overlap_seconds > LEAST_OVERLAP_SECONDS:
            yield (
                f"a training began in this directory {overlap_seconds:.0f} s before "
                "another one ended: what is said of all of it is a mixture. Give "
                "each training a directory of its own."
            )
            return


def _weights_of(model: str) -> str:
    """How many, in words; nothing where that was not known."""
    found = re.search(r"[\d,]+ weights", model)
    return found[0] if found else ""
