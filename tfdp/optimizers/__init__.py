"""Optimizers for large batches, `LARS` and `LAMB`, and for slow links: `OneBitAdam`."""

from tfdp.optimizers.lamb import LAMB
from tfdp.optimizers.lars import LARS
from tfdp.optimizers.one_bit_adam import OneBitAdam

__all__ = ["LAMB", "LARS", "OneBitAdam"]
