"""What a plan says of the memory of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# What a prediction may be short of: it "fits" only with this share to spare.
MARGIN = 0.10
# And with these, for what threads and libraries take beside the tensors: of the
# smallest models measured, more than a tenth.
MARGIN_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a step of one replica will need.

    Args:
      local_rows: of a replica's batch.
      replicas: how many train together, on all hosts.
      shard: "none", "optimizer", "gradients" or "parameters".
      remat: whether layers compute their forward pass twice, or the policy by which
        they do.
      parts: what lies in memory at the peak: name to bytes.
      memory_bytes: what a replica may take; None: that was not asked.
      flops: additions and multiplications of a replica in a step.
      trainable_bytes: of the trainable weights.
      sent_bytes: what a replica sends in a step, of tables the most rows that a batch
        can have.
      notes: what the prediction does not know, in words.
      is_known: whether nothing is missing that may be large, such as a loop's turns.
      hosts: of the replicas.
      host_parts: with `offload=` what a replica takes of its host's memory besides, as
        `parts`.
      larger_may_fit: of the largest batch that fits, whether no larger one was looked
        at.
    """

    local_rows: int
    replicas: int
    shard: str
    remat: bool | str
    parts: Mapping[str, int]
    memory_bytes: int | None
    flops: float
    trainable_bytes: int
    sent_bytes: int
    notes: tuple[str, ...] = ()
    is_known: bool = True
    hosts: int = 1
    host_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    larger_may_fit: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most that a replica has in memory at once."""
        return sum(self.parts.values())

    @property
    def host_bytes(self) -> int:
        """The most that a replica has in the memory of its host, with `offload=`."""
        return sum(self.host_parts.values())

    @property
    def needed_bytes(self) -> int:
        """The peak and the margin that a prediction needs: it fits in that much."""
        return needed_for(self.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether it fits, the margin included; None: no memory was given.

        What is not known does not fit.
        """
        return None if self.memory_bytes is None else self.fits_in(self.memory_bytes)

    def fits_in(self, memory_bytes: int) -> bool:
        """Whether it fits in that much, the margin included."""
        return self.is_known and self.needed_bytes <= memory_bytes

    def to_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            **dataclasses.asdict(self),
            "parts": dict(self.parts),
            "host_parts": dict(self.host_parts),
            "host_bytes": self.host_bytes,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
        }


def needed_for(peak_bytes: int) -> int:
    """What a peak needs with its margin.

    >>> needed_for(100 * 2**20) / 2**20
    126.0
    """
    return round(peak_bytes * (1 + MARGIN)) + MARGIN_BYTES


def most_peak_bytes(memory_bytes: int) -> int:
    """The largest peak that needs no more than that.

    >>> most_peak_bytes(126 * 2**20) / 2**20
    100.0
    """
    return max(0, round((memory_bytes - MARGIN_BYTES) / (1 + MARGIN)))


def sent_bytes(
    trainable_bytes: int,
    replicas: int,
    stage: int,
    remat: bool | str,
    tables: Sequence[tuple[int, int, bool]] = (),
) -> int:
    """What a replica sends in a step, for gradients as large as the weights.

        2 P (N - 1) / N,  and 3 P (N - 1) / N  at stage 3 with `remat`

    Of a table of which it has r bytes of rows it sends (N - 1) r in the place of that,
    to all others; where rows are added, the whole table if that is less. Shards have
    no rows: their tables are sent whole.

    Args:
      trainable_bytes: P.
      replicas: N.
      stage: of the shards.
      remat: whether layers compute their forward pass twice.
      tables: of each whose gradient is rows its bytes, r, and whether rows are added.

    >>> sent_bytes(100, replicas=4, stage=0, remat=False)
    150
    >>> sent_bytes(100, 4, 0, False, tables=[(80, 10, True)])  # 30 of 20, and 3 x 10
    60
    """
    ways = 3 if stage == 3 and remat else 2
    total = 0
    for size_bytes, row_bytes, adds_rows in tables if stage == 0 else ():
        trainable_bytes -= size_bytes
        whole = 2 * size_bytes * (replicas - 1) // replicas
        rows = (replicas - 1) * row_bytes
        total += min(whole, rows) if adds_rows else rows
    return total + ways * trainable_bytes * (replicas - 1) // replicas
