"""A claim: what one launcher's variables say about the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdp.errors import ClusterError

__all__ = ["Claim", "integer", "present"]


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
        return ", ".join(f"{name}={value}" for name, value in self.found.items())

    def contradicts(self, other: Claim) -> bool:
        """Whether both state a rank or a number of workers, and not the same one."""
        pairs = ((self.rank, other.rank), (self.workers, other.workers))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def present(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Those of the variables that are set to something, in the order asked for."""
    return {name: environment[name] for name in names if environment.get(name)}


def integer(found: Mapping[str, str], name: str, least: int) -> int | None:
    """The variable as an integer of at least `least`; None when it is not set."""
    text = found.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise ClusterError(
            f"{name} must be an integer of at least {least}. Received: {text!r}."
        )
    return int(text)
