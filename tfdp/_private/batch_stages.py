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
MOST_BELIEVED_ROWS = 1 << 16


def rows_of_batches(dataset: tf.data.Dataset) -> int | None:
    """The largest batch of `dataset`, by what it says itself; None: nothing."""
    stage = dataset
    while type(stage).__name__.lstrip("_") in KEEP_BATCHES:
        inputs = stage._inputs()
        if len(inputs) != 1:
            return None
        (stage,) = inputs
    if type(stage).__name__.lstrip("_") not in BATCHES:
        return None
    given = getattr(stage, "_batch_size", None)
    rows = None if given is None else tf.get_static_value(given)
    if rows is None:
        return None
    (source,) = stage._inputs()
    there_are = int(source.cardinality())
    if there_are == tf.data.INFINITE_CARDINALITY:
        return int(rows)
    if there_are == tf.data.UNKNOWN_CARDINALITY:
        # Who writes more may mean: whatever there is.
        return int(rows) if rows <= MOST_BELIEVED_ROWS else None
    return min(int(rows), there_are) or None
