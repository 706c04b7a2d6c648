"""Which part of the input each host takes."""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.data.split import rows_between, rows_of_batch
from tfdp.errors import CollectiveError
from tfdp.hosts.host_link import HostLink

__all__ = ["own_part", "until_all_end"]


# Said by a host, behind the number of its elements, when no more of them will come.
OVER = "over"

# Datasets are numbered in the order in which a process distributes them, iterators by
# dataset: the same on every host.
_dataset_numbers = itertools.count()


def own_part(dataset: tf.data.Dataset, link: HostLink) -> tf.data.Dataset:
    """This host's rows of every global batch: a range, in the order of the hosts.

    Of n rows host h of H takes those from n h // H to n (h + 1) // H. Together the
    hosts take every row once, and they see the same global batches as one device
    would.

    Args:
      dataset: global batches, the same on every host and in the same order.
      link: tells the hosts from each other.

    Raises:
      CollectiveError: when the dataset is read and the hosts' first batches differ.
    """
    rank, hosts = link.rank, link.workers
    name = f"dataset {next(_dataset_numbers)}"
    iterators = itertools.count()

    def check_first(data: np.ndarray) -> np.int64:
        fingerprint = f"{data.shape} {zlib.crc32(data.tobytes())}"
        notes = link.share_note(f"{name}, iterator {next(iterators)}", fingerprint)
        for other, theirs in notes.items():
            if theirs != notes[0]:
                raise CollectiveError(
                    f"Worker {other} reads another first batch than worker 0. Each "
                    "worker takes its rows of the same global batches: give every "
                    "shuffle the same seed (tf.random.set_seed with one number on all "
                    "workers), or make each worker's own part with "
                    "strategy.distribute_datasets_from_function."
                )
        return np.int64(0)

    def checked(number: tf.Tensor, batch: Any) -> Any:
        flat = tf.nest.flatten(batch, expand_composites=True)
        numbers = [
            part for part in flat if part.dtype.is_floating or part.dtype.is_integer
        ]
        if not numbers:
            return batch
        zero = tf.cond(
            number == 0,
            lambda: tf.ensure_shape(
                tf.numpy_function(check_first, numbers[:1], tf.int64), []
            ),
            lambda: tf.constant(0, tf.int64),
        )
        with tf.control_dependencies([zero]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    def take(batch: Any) -> Any:
        rows = rows_of_batch(batch)
        start, stop = rows * rank // hosts, rows * (rank + 1) // hosts
        return tf.nest.map_structure(
            lambda part: _rows(part, start, stop, rank, hosts), batch
        )

    def own_rows(number: tf.Tensor, batch: Any) -> Any:
        return take(checked(number, batch))

    return dataset.enumerate().map(
        own_rows, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )


def _rows(part: Any, start: tf.Tensor, stop: tf.Tensor, rank: int, hosts: int) -> Any:
    taken = rows_between(part, start, stop)
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

    Cost: one word to the others per element, ahead of the training steps.
    """
    empty = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.nest.map_structure(
            _no_rows, dataset.element_spec, expand_composites=False
        )
    )
    marked = dataset.map(lambda *e: (e if len(e) > 1 else e[0], True))
    padding = empty.map(lambda *e: (e if len(e) > 1 else e[0], False)).repeat()

    name = f"dataset {next(_dataset_numbers)}"
    iterators = itertools.count()

    own_elements: collections.Counter[str] = collections.Counter()

    def is_element(number: np.ndarray, iterator: np.ndarray, mine: Any) -> np.ndarray:
        key = f"{name}, iterator {iterator}"
        if mine:
            # Never waits: this may be an element read ahead, in an iterator that is
            # about to be dropped, while another host waits for this one elsewhere.
            own_elements[key] += 1
            link.leave_note(key, str(own_elements[key]))
            return np.array(True)
        link.leave_note(key, f"{own_elements[key]} {OVER}")
        return np.array(_others_have(link, key, int(number)))

    def goes_on(number: tf.Tensor, element: tuple[Any, Any]) -> tf.Tensor:
        iterator, (_, is_real) = element
        answer = tf.numpy_function(
            is_element, [number, iterator, is_real], tf.bool, stateful=True
        )
        return tf.ensure_shape(answer, [])

    def number_of_iterator() -> Iterator[int]:
        """The same number again and again, for as long as somebody iterates."""
        number = next(iterators)
        try:
            yield from itertools.repeat(number)
        finally:
            # Others may wait to hear how far this iterator comes.
            key = f"{name}, iterator {number}"
            link.leave_note(key, f"{own_elements.pop(key, 0)} {OVER}")

    def numbered() -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            number_of_iterator, output_signature=tf.TensorSpec([], tf.int64)
        )

    joined = tf.data.Dataset.zip((numbered(), marked.concatenate(padding)))
    kept = joined.enumerate().take_while(goes_on)
    return kept.map(lambda number, element: element[1][0])


def _others_have(link: HostLink, key: str, number: int) -> bool:
    """Whether another host has element `number` of an iterator.

    Waits until one has come as far, or all have ended or dropped the iterator.
    """

    def reached(note: str) -> bool:
        return int(note.split()[0]) > number

    def is_known(notes: dict[int, str]) -> bool:
        others = [note for rank, note in notes.items() if rank != link.rank]
        all_over = sum(note.endswith(OVER) for note in others) == link.workers - 1
        return all_over or any(map(reached, others))

    notes = link.wait_for_notes(key, is_known)
    return any(reached(note) for rank, note in notes.items() if rank != link.rank)


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
