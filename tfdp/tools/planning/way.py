"""`Way`: what makes a batch fit that does not, and what it costs."""

from __future__ import annotations

import dataclasses

__all__ = ["Way"]


@dataclasses.dataclass(frozen=True)
class Way:
    """A setting, what it needs, and what it costs.

    Args:
      name: what to write in the program.
      peak_bytes: per replica.
      fits: whether that is within the memory, margin included.
      more_flops: as a part of those of a step as it was asked about.
      sent_bytes: by a replica in a step.
    """

    name: str
    peak_bytes: int
    fits: bool
    more_flops: float
    sent_bytes: int
