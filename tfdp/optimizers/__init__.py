"""Layer-wise adaptive optimizers for large batches: `LARS` and `LAMB`."""

from tfdp.optimizers.lamb import LAMB
from tfdp.optimizers.lars import LARS

__all__ = ["LAMB", "LARS"]
