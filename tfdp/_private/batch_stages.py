"""What a `tf.data` pipeline makes its batches of, without reading any.

Checked against TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["is_zip_of_batches", "rows_of_batches"]

BATCHES = {"BatchDataset", "ParallelBatchDataset"}
# What leaves each batch as it is.
KEEP_BATCHES = {
    *("AssertCardinalityDataset", "CacheDataset", "FilterDataset", "ModelDataset"),
    *("OptionsDataset", "PrefetchDataset", "RepeatDataset", "ShuffleDataset"),
    *("SkipDataset", "TakeDataset"),
}
MAPS = {"MapDataset", "ParallelMapDataset"}
MOST_BELIEVED_ROWS = 1 << 16


def rows_of_batches(dataset: tf.data.Dataset) -> int | None:
    """The largest batch of `dataset`, by what it says itself; None: nothing."""
    stage, _ = _behind(dataset, KEEP_BATCHES)
    rows = _batch_size(stage)
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


def is_zip_of_batches(dataset: tf.data.Dataset) -> bool:
    """Whether elements of a batch come from datasets that were batched each by itself.

    So no row of one element has to do with a certain row of another. Where batches were
    mapped after that, shapes must tell that there are as many rows as before: a map may
    put rows behind each other that belong together.
    """
    stage, _ = _behind(dataset, KEEP_BATCHES)
    return _kind(stage) == "ZipDataset" and all(map(_is_of_batches, stage._inputs()))


def _is_of_batches(dataset: tf.data.Dataset) -> bool:
    if is_zip_of_batches(dataset):
        return True
    stage, is_mapped = _behind(dataset, KEEP_BATCHES | MAPS)
    if _kind(stage) not in BATCHES:
        return False
    leaves = tf.nest.flatten(dataset.element_spec)
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]  # None has none
    lengths = [
        shape[0] if shape is not None and shape.rank else None for shape in shapes
    ]
    return not is_mapped or {_batch_size(stage)} == set(lengths) != {None}


def _behind(dataset: tf.data.Dataset, kinds: set[str]) -> tuple[tf.data.Dataset, bool]:
    """The first stage of another kind on the way back; and whether a map was on it."""
    stage, is_mapped = dataset, False
    while _kind(stage) in kinds and len(stage._inputs()) == 1:
        is_mapped = is_mapped or _kind(stage) in MAPS
        (stage,) = stage._inputs()
    return stage, is_mapped


def _kind(stage: tf.data.Dataset) -> str:
    return type(stage).__name__.lstrip("_")


def _batch_size(stage: tf.data.Dataset) -> int | None:
    """What a stage that batches rows was given; None: it does not, or not known."""
    if _kind(stage) not in BATCHES:
        return None
    given = getattr(stage, "_batch_size", None)
    return None if given is None else tf.get_static_value(given)
