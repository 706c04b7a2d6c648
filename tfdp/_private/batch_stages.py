"""How many rows a `tf.data` pipeline puts into a batch, without reading any.

Checked against TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["rows_of_batches"]

BATCHES = {"BatchDataset", "ParallelBatchDataset"}
# What leaves each batch as it is.
KEEP_BATCHES = {
    *("AssertCardinalityDataset", "CacheDataset", "FilterDataset", "ModelDataset"),
    *("OptionsDataset", "PrefetchDataset", "RepeatDataset", "ShuffleDataset"),
    *("SkipDataset", "TakeDataset"),
}


def rows_of_batches(dataset: tf.data.Dataset) -> int | None:
    """What `batch` was given, the last one of `dataset`; None: it is not seen."""
    stage = dataset
    while type(stage).__name__.lstrip("_") in KEEP_BATCHES:
        inputs = stage._inputs()
        if len(inputs) != 1:
            return None
        (stage,) = inputs
    if type(stage).__name__.lstrip("_") not in BATCHES:
        return None
    rows = getattr(stage, "_batch_size", None)
    found = None if rows is None else tf.get_static_value(rows)
    return None if found is None else int(found)
