"""Layers with results that depend on the samples of all replicas."""

from tfdp.layers.all_rows import AllRows
from tfdp.layers.convert import convert_batch_normalization
from tfdp.layers.sync_batch_normalization import SyncBatchNormalization

__all__ = ["AllRows", "SyncBatchNormalization", "convert_batch_normalization"]


def __dir__() -> list[str]:
    return [*__all__]
