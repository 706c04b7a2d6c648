"""Optimizers for large batches, `LARS` and `LAMB`, and others for slow links."""

from tfdp.optimizers.fused import fused
from tfdp.optimizers.lamb import LAMB
from tfdp.optimizers.lars import LARS
from tfdp.optimizers.one_bit_adam import OneBitAdam
from tfdp.optimizers.one_bit_lamb import OneBitLAMB

__all__ = ["LAMB", "LARS", "OneBitAdam", "OneBitLAMB", "fused"]


def __dir__() -> list[str]:
    return [*__all__]
