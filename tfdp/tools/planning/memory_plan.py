"""`MemoryPlan`: the predicted memory of a step, FLOPs and traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Error allowance of a prediction: it "fits" only with this share to spare.
MARGIN = 0.10
# Plus this for threads and libraries: more than a tenth of the smallest models.
MARGIN_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory, FLOPs and traffic of one replica's step.

    Args:
      local_rows: rows of a replica's batch.
      replicas: on all hosts.
      shard: "none", "optimizer", "gradients" or "parameters".
      remat: whether layers compute their forward pass twice, or the policy.
      parts: memory at the peak: name to bytes.
      memory_bytes: memory of a replica; None: not given.
      flops: additions and multiplications of a replica in a step.
      trainable_bytes: of the trainable weights.
      sent_bytes: by a replica in a step; for tables the most rows of a batch.
      notes: what the prediction leaves out.
      is_known: whether nothing large is left out, such as a loop's iterations.
      hosts: of the replicas.
      host_parts: with `offload=`, host memory of a replica; as `parts`.
      all_rows_bytes: outputs, targets and weights of other replicas that this one
        receives for losses and metrics (`tfdp.losses.on_all_rows`).
      larger_may_fit: for the largest batch that fits: no larger one was tried.
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
    all_rows_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a replica."""
        return sum(self.parts.values())

    @property
    def host_bytes(self) -> int:
        """Peak host memory of a replica, with `offload=`."""
        return sum(self.host_parts.values())

    @property
    def needed_bytes(self) -> int:
        """The peak plus the margin: memory in which it fits."""
        return needed_for(self.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether it fits with the margin; None: no memory given. Unknown: False."""
        return None if self.memory_bytes is None else self.fits_in(self.memory_bytes)

    def fits_in(self, memory_bytes: int) -> bool:
        """Whether it fits in `memory_bytes` with the margin."""
        return self.is_known and self.needed_bytes <= memory_bytes

    def to_json(self) -> dict[str, Any]:
        """All fields and properties as plain data."""
        return {
            **dataclasses.asdict(self),
            "host_bytes": self.host_bytes,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
        }


def needed_for(peak_bytes: int) -> int:
    """A peak plus its margin."""
    return round(peak_bytes * (1 + MARGIN)) + MARGIN_BYTES


def most_peak_bytes(memory_bytes: int) -> int:
    """The largest peak that fits with its margin: the inverse of `needed_for`."""
    return max(0, round((memory_bytes - MARGIN_BYTES) / (1 + MARGIN)))


def sent_bytes(
    trainable_bytes: int,
    replicas: int,
    stage: int,
    remat: bool | str,
    tables: Sequence[tuple[int, int, bool, int | None]] = (),
    moved_bytes: int = 0,
) -> int:
    """Bytes that a replica sends in a step, for gradients as large as the weights.

        2 P (N - 1) / N,  and 3 P (N - 1) / N  at stage 3 with `remat`

    with P trainable bytes and N replicas. Of each of `tables` (bytes, bytes of rows r,
    whether rows are summed, and bytes of rows l that it looks up in parts, or None) it
    sends (N - 1) r to all others instead, or the whole table where rows are summed and
    that is less. Shards send whole tables, but for those in parts, of which they send
    (l + r) (N - 1) / N. At stage 3 `moved_bytes` go to the owners of weights that are
    updated whole, and back.

    >>> sent_bytes(100, replicas=4, stage=0, remat=False)
    150
    >>> sent_bytes(100, 4, 0, False, tables=[(80, 10, True, None)])  # 30 of 20, 3 x 10
    60
    """
    ways = 3 if stage == 3 and remat else 2
    moved = 2 * moved_bytes if stage == 3 else 0
    total = 0
    for size_bytes, row_bytes, adds_rows, looked_up in tables:
        if looked_up is not None:
            sent = (looked_up + row_bytes) * (replicas - 1) // replicas
        elif stage == 0:
            sent = (replicas - 1) * row_bytes
            if adds_rows:
                sent = min(sent, 2 * size_bytes * (replicas - 1) // replicas)
        else:
            continue
        trainable_bytes -= size_bytes
        total += sent
    return total + (ways * trainable_bytes + moved) * (replicas - 1) // replicas
