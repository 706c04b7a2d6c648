"""Which part of the input each host takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.hosts.link import HostLink

__all__ = ["own_part", "until_all_end"]


def own_part(dataset: tf.data.Dataset, rank: int, hosts: int) -> tf.data.Dataset:
    """Host `rank`'s rows of every global batch: a range, in the order of the hosts.

    Of n rows host h takes those from n h // H to n (h + 1) // H. Together the hosts
    take every row once, and they see the same global batches as one device would.

    Args:
      dataset: global batches, the same on every host and in the same order.
      rank: this host.
      hosts: how many there are.
    """

    def take(*elements: Any) -> Any:
        batch = elements if len(elements) > 1 else elements[0]
        rows = _length(tf.nest.flatten(batch, expand_composites=False)[0])
        start, stop = rows * rank // hosts, rows * (rank + 1) // hosts
        return tf.nest.map_structure(
            lambda part: _rows(part, start, stop, rank, hosts), batch
        )

    return dataset.map(take, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _length(part: Any) -> tf.Tensor:
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int64)
    return tf.shape(part, out_type=tf.int64)[0]


def _rows(part: Any, start: tf.Tensor, stop: tf.Tensor, rank: int, hosts: int) -> Any:
    if isinstance(part, tf.SparseTensor):
        first = tf.concat([[start], tf.zeros_like(part.dense_shape[1:])], axis=0)
        size = tf.concat([[stop - start], part.dense_shape[1:]], axis=0)
        return tf.sparse.slice(part, first, size)
    taken = part[start:stop]
    if isinstance(part, tf.Tensor) and part.shape[0] is not None:
        rows = part.shape[0]
        own = rows * (rank + 1) // hosts - rows * rank // hosts
        taken.set_shape([own, *part.shape[1:]])
    return taken


def until_all_end(dataset: tf.data.Dataset, link: HostLink) -> tf.data.Dataset:
    """`dataset`, then elements without rows until every other host has ended, too.

    Args:
      dataset: this host's elements; the hosts may have different numbers of them.
      link: tells the hosts from each other.

    Cost: one exchange of a number per element, ahead of the training steps.
    """
    empty = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.nest.map_structure(
            _no_rows, dataset.element_spec, expand_composites=False
        )
    )
    marked = dataset.map(lambda *e: (e if len(e) > 1 else e[0], True))
    padding = empty.map(lambda *e: (e if len(e) > 1 else e[0], False)).repeat()

    def anybody_has_more(mine: np.ndarray) -> np.ndarray:
        (having,) = link.sum([np.array(int(mine))], "input", "input")
        return np.array(having > 0)

    def goes_on(_: Any, is_real: tf.Tensor) -> tf.Tensor:
        answer = tf.numpy_function(anybody_has_more, [is_real], tf.bool, stateful=True)
        return tf.ensure_shape(answer, [])

    joined = marked.concatenate(padding).take_while(goes_on)
    return joined.map(lambda element, _: element)


def _no_rows(spec: Any) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_row_splits(
            tf.zeros([0], spec.dtype), tf.zeros([1], spec.row_splits_dtype)
        )
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 1 for size in spec.shape[1:])]
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape
        )
    return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)
