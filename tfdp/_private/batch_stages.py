"""Inspects how a `tf.data` pipeline forms its batches, without reading any.

Checked against TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

BATCHES = {"BatchDataset", "ParallelBatchDataset"}
# Stages that leave each batch unchanged.
KEEP_BATCHES = {
    *("AssertCardinalityDataset", "CacheDataset", "FilterDataset", "ModelDataset"),
    *("OptionsDataset", "PrefetchDataset", "RepeatDataset", "ShuffleDataset"),
    *("SkipDataset", "TakeDataset"),
}
MAPS = {"MapDataset", "ParallelMapDataset"}
MOST_BELIEVED_ROWS = 1 << 16


def rows_of_batches(dataset: tf.data.Dataset) -> int | None:
    """The largest batch size of `dataset`, if its stages state it."""
    stage, _ = _upstream(dataset, KEEP_BATCHES)
    rows = _batch_size(stage)
    if rows is None:
        return None
    (source,) = stage._inputs()
    count = int(source.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        return int(rows)
    if count == tf.data.UNKNOWN_CARDINALITY:
        # A larger size may mean: all rows.
        return int(rows) if rows <= MOST_BELIEVED_ROWS else None
    return min(int(rows), count) or None


def holds_batches_of_rows(dataset: tf.data.Dataset) -> bool:
    """Whether elements are batches of rows that are not single numbers.

    A batch of numbers may be a sequence, such as the tokens of a text.
    """
    stage, _ = _upstream(dataset, KEEP_BATCHES | MAPS)
    if _kind(stage) not in BATCHES | {"PaddedBatchDataset"}:
        return False
    (source,) = stage._inputs()
    rows = tf.nest.flatten(source.element_spec)
    size = _batch_size(stage)
    return not (len(rows) == 1 and rows[0].shape.rank == 0) and all(
        leaf.shape.rank and leaf.shape[0] in (None, size)
        for leaf in tf.nest.flatten(dataset.element_spec)
        if isinstance(leaf, tf.TensorSpec)
    )


def is_zip_of_batches(dataset: tf.data.Dataset) -> bool:
    """Whether elements come from datasets that were batched separately.

    Then rows of one element need not belong to rows of another. If batches were mapped
    after that, static shapes must show that the number of rows is unchanged. If one has
    as many rows as several others together, it may hold labels of these.
    """
    sizes = _zipped_sizes(dataset)
    if not sizes or None in sizes:
        return False
    return not any(
        _is_sum_of_several(size, sizes[:place] + sizes[place + 1 :])
        for place, size in enumerate(sizes)
    )


def _is_sum_of_several(size: int, others: list[int]) -> bool:
    """Whether two or more of `others` add up to `size`; all are above 0.

    >>> _is_sum_of_several(16, [8, 3, 8]), _is_sum_of_several(16, [16, 8])
    (True, False)
    """
    single: set[int] = set()
    several: set[int] = set()
    for other in others:  # not all choices: there are 2 ** len(others)
        several |= {
            total + other for total in single | several if total + other <= size
        }
        single.add(other)
    return size in several


def _zipped_sizes(dataset: tf.data.Dataset) -> list[Any]:
    """The batch size of each zipped dataset; None: unknown."""
    stage, _ = _upstream(dataset, KEEP_BATCHES)
    if _kind(stage) != "ZipDataset":
        return []
    sizes = []
    for part in stage._inputs():
        sizes += _zipped_sizes(part) or [_size_of_batches(part)]
    return sizes


def _size_of_batches(dataset: tf.data.Dataset) -> int | None:
    stage, is_mapped = _upstream(dataset, KEEP_BATCHES | MAPS)
    size = _batch_size(stage)
    leaves = tf.nest.flatten(dataset.element_spec)
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]  # None has none
    lengths = [
        shape[0] if shape is not None and shape.rank else None for shape in shapes
    ]
    return size if not is_mapped or set(lengths) == {size} else None


def _upstream(
    dataset: tf.data.Dataset, kinds: set[str]
) -> tuple[tf.data.Dataset, bool]:
    """The nearest upstream stage of another kind; and whether a map came after it."""
    stage, is_mapped = dataset, False
    while _kind(stage) in kinds and len(stage._inputs()) == 1:
        is_mapped = is_mapped or _kind(stage) in MAPS
        (stage,) = stage._inputs()
    return stage, is_mapped


def _kind(stage: tf.data.Dataset) -> str:
    return type(stage).__name__.lstrip("_")


def _batch_size(stage: tf.data.Dataset) -> int | None:
    """The batch size of a batching stage; None: it does not batch, or is unknown."""
    if _kind(stage) not in BATCHES | {"PaddedBatchDataset"}:
        return None
    given = getattr(stage, "_batch_size", None)
    return None if given is None else tf.get_static_value(given)
