"""Collects the global batches of a parity check, so that every training can use them.

A batch is what a dataset yields to `fit`: nested tuples and dicts of tensors whose
first axis is the rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError

Batch = Any

ALLOWED = (
    "a tuple of arrays (x,), (x, y) or (x, y, sample_weight), a tf.data.Dataset of "
    "global batches, or an iterable of such tuples"
)


def collect_batches(data: Any, steps: int, batch_size: int) -> tuple[Batch, ...]:
    """`steps` global batches of `data`, repeated if there are fewer.

    Of arrays with more batches than steps it takes the first ones and the last one,
    which may be short: short batches are where replicas go wrong.

    Args:
      data: a tuple of arrays, a dataset of global batches, or an iterable of them.
      steps: number of batches, at least 1.
      batch_size: rows of a global batch, for arrays.

    Raises:
      ConfigurationError: there is no batch, or arrays differ in length.
    """
    if isinstance(data, tuple):
        whole = _as_batch(data)
        if len(whole) == 1 and not isinstance(whole[0], tuple):
            [whole] = whole  # as `fit(x)`: a step gets the array, not a tuple
        found = _split(whole, row_count(whole), steps, batch_size)
    elif isinstance(data, tf.data.Dataset):
        found = [_as_batch(batch) for batch in data.take(steps)]
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        found = [_as_batch(batch) for batch in itertools.islice(data, steps)]
    else:
        kind = type(data).__name__
        raise ConfigurationError(f"data must be {ALLOWED}. Received: {kind}.")
    found = [batch for batch in found if row_count(batch)]
    if not found:
        raise ConfigurationError("data has no rows: there is nothing to train on.")
    return tuple(itertools.islice(itertools.cycle(found), steps))


def row_count(batch: Batch) -> int:
    """The number of rows; raises ConfigurationError if tensors differ in it."""
    counts = {_rows(leaf) for leaf in tf.nest.flatten(batch)}
    count = next(iter(counts)) if len(counts) == 1 else None
    if count is None:
        raise ConfigurationError(
            "Every array of a batch needs the same number of rows on its first axis. "
            f"Received: {sorted(map(str, counts))} rows in one batch."
        )
    return count


def take_rows(batch: Batch, rows: Sequence[int] | np.ndarray) -> Batch:
    """The rows with these indices, in this order."""
    indices = np.asarray(rows, dtype=np.int64)
    return tf.nest.map_structure(lambda leaf: _take(leaf, indices), batch)


def period_of(batches: Sequence[Batch], replicas: int) -> int:
    """The largest number of rows of which every replica has a multiple, of each batch;
    1 if replicas have unequal parts."""
    counts = [row_count(batch) for batch in batches]
    shares = [count // replicas if count % replicas == 0 else 1 for count in counts]
    return math.gcd(*shares)


def permute_rows(batch: Batch, period: int, generator: np.random.Generator) -> Batch:
    """The rows in another order, in which row i moves by a multiple of `period`."""
    order = np.arange(row_count(batch))
    for first in range(min(period, len(order))):
        order[first::period] = generator.permutation(order[first::period])
    return take_rows(batch, order)


def trim_to_multiple(batches: Sequence[Batch], replicas: int) -> tuple[Batch, ...]:
    """Trims each batch to a multiple of `replicas` rows; drops empty ones."""
    even = []
    for batch in batches:
        rows = row_count(batch)
        if kept := rows - rows % replicas:
            even.append(batch if kept == rows else take_rows(batch, range(kept)))
    return tuple(even)


def repeat_first_share(batches: Sequence[Batch], replicas: int) -> tuple[Batch, ...]:
    """Batches in which every replica gets the first replica's rows."""
    repeated = []
    for batch in batches:
        share = max(row_count(batch) // replicas, 1)
        repeated.append(take_rows(batch, list(range(share)) * replicas))
    return tuple(repeated)


def as_dataset(batches: Sequence[Batch]) -> tf.data.Dataset:
    """A dataset of the batches with an unknown number of rows, as in `fit`."""
    specs = [tf.nest.map_structure(_open_spec, batch) for batch in batches]
    try:
        signature = tf.nest.map_structure(_common_spec, *specs)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "The batches of data differ in structure or type; fit needs equal ones. "
            f"{error}"
        ) from error
    from_generator = tf.data.Dataset.from_generator
    dataset = from_generator(lambda: iter(batches), output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _as_batch(value: Any) -> Batch:
    """`value` with tensors as leaves; lists become tuples, as in datasets."""
    if isinstance(value, dict):
        return {key: _as_batch(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = list(value)
        while items and items[-1] is None:
            items.pop()
        return tuple(_as_batch(item) for item in items)
    if tf.is_tensor(value):  # also ragged and sparse ones
        return value
    array = np.asarray(value)
    if array.dtype == np.float64:
        array = array.astype(np.float32)  # as fit does with arrays
    try:
        return tf.convert_to_tensor(array)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"A batch must consist of arrays. Received in it: {type(value).__name__}. "
            f"data must be {ALLOWED}."
        ) from error


def _split(whole: Batch, rows: int, steps: int, batch_size: int) -> list[Batch]:
    starts = list(range(0, rows, batch_size))
    if len(starts) > steps:
        starts = [*starts[: steps - 1], starts[-1]]
    return [
        take_rows(whole, range(start, min(start + batch_size, rows)))
        for start in starts
    ]


def _rows(leaf: Any) -> int | None:
    if isinstance(leaf, tf.RaggedTensor):
        return int(leaf.nrows())
    if isinstance(leaf, tf.SparseTensor):
        return int(leaf.dense_shape[0])
    return leaf.shape[0] if leaf.shape.rank else None


def _take(leaf: Any, rows: np.ndarray) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return tf.gather(leaf, rows)
    width = [1, *leaf.shape[1:]]
    rest = [0] * (leaf.shape.rank - 1)
    parts = [tf.sparse.slice(leaf, [row, *rest], width) for row in rows]
    return tf.sparse.concat(0, parts)


def _open_spec(leaf: Any) -> Any:
    spec = tf.type_spec_from_value(leaf)
    shape = tf.TensorShape([None, *spec.shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)


def _common_spec(*specs: Any) -> Any:
    common = specs[0].most_specific_common_supertype(specs[1:])
    if common is None:
        raise TypeError(f"Received: {', '.join(sorted(set(map(str, specs))))}.")
    return common
