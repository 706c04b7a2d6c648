"""A claim: what one launcher's variables say about the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdp.errors import ClusterError

__all__ = ["Claim", "integer", "present", "shortened"]

# Ids of jobs are larger than any number of workers.
LARGEST = 2**63 - 1
# A message quotes as much of a variable.
QUOTED_CHARACTERS = 300


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one source says; None where it is silent.

    Args:
      source: who says it, as in `Cluster.source`.
      found: the variables that were read, for messages.
      workers, rank, coordinator: as in `Cluster`.
      missing: what a complete claim would hold besides, for messages.
      one_task_per_node: True for a Slurm step that may be an MPI launcher's daemons.
      needs_coordinator: False for MPI, which brings its processes together itself.
      job: as in `Cluster`.
    """

    source: str
    found: Mapping[str, str]
    workers: int | None = None
    rank: int | None = None
    coordinator: str | None = None
    missing: Sequence[str] = ()
    one_task_per_node: bool = False
    needs_coordinator: bool = True
    job: str = ""

    @property
    def variables(self) -> str:
        """`NAME=value, NAME=value`, for messages."""
        pairs = self.found.items()
        return ", ".join(f"{name}={shortened(value)}" for name, value in pairs)

    def contradicts(self, other: Claim) -> bool:
        """Whether both state a rank or a number of workers, and not the same one."""
        pairs = ((self.rank, other.rank), (self.workers, other.workers))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def present(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Those of the variables that are set to something, in the order asked for."""
    return {name: environment[name] for name in names if environment.get(name)}


def integer(found: Mapping[str, str], name: str, least: int) -> int | None:
    """The variable as an integer of at least `least`; None when it is not set.

    Raises:
      ClusterError: when it is none, or larger than 63 bits hold.
    """
    text = found.get(name)
    if text is None:
        return None
    digits = text.strip()
    # The length first: Python refuses to read a number of thousands of digits.
    is_number = digits.isdecimal() and len(digits) <= len(str(LARGEST))
    if not is_number or not least <= int(digits) <= LARGEST:
        raise ClusterError(
            f"{name} must be an integer of at least {least} (and at most {LARGEST}). "
            f"Received: {shortened(text)!r}."
        )
    return int(digits)


def shortened(text: str) -> str:
    """`text`, or its start and its length where it is too long for a message."""
    if len(text) <= QUOTED_CHARACTERS:
        return text
    return f"{text[:QUOTED_CHARACTERS]}... ({len(text)} characters)"
