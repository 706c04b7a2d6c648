"""Which part of the input each host takes."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.data.same_batches import BatchRecord, new_dataset_name, no_rows, same_batches
from tfdp.data.split import has_rows, length_of, rows_between
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.python_calls import counted

# Said by a host, behind the number of its elements, when no more of them will come.
OVER = "over"


def own_part(
    dataset: tf.data.Dataset,
    link: HostLink,
    policies: str = "",
    name: str | None = None,
    record: BatchRecord | None = None,
) -> tf.data.Dataset:
    """This host's rows of every global batch: a range, in the order of the hosts.

    Of n rows host h of H takes those from n h // H to n (h + 1) // H. Together the
    hosts take every row once, and they see the same global batches as one device
    would.

    Args:
      dataset: global batches, the same on every host and in the same order.
      link: tells the hosts from each other.
      policies: the dtype policies of the model that reads it.
      name, record: see `same_batches`.

    Raises:
      CollectiveError: when the dataset is read and the hosts' first batches, numbers
        of batches or policies differ; see `same_batches`.
    """
    alike = same_batches(dataset, link, policies, name, record)
    return rows_of_place(alike, link.rank, link.workers)


def rows_of_place(dataset: tf.data.Dataset, rank: int, hosts: int) -> tf.data.Dataset:
    """The rows of one of so many hosts of every batch; see `own_part`."""

    def take(batch: Any) -> Any:
        return tf.nest.map_structure(
            lambda part: _rows(part, rank, hosts) if has_rows(part) else part, batch
        )

    # A map hands the parts of a tuple over one by one.
    is_tuple = isinstance(dataset.element_spec, tuple)
    return dataset.map(
        lambda *parts: take(parts if is_tuple else parts[0]),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def _rows(part: Any, rank: int, hosts: int) -> Any:
    rows = length_of(part)
    taken = rows_between(part, rows * rank // hosts, rows * (rank + 1) // hosts)
    if isinstance(part, tf.Tensor) and part.shape[0] is not None:
        rows = part.shape[0]
        own = rows * (rank + 1) // hosts - rows * rank // hosts
        taken.set_shape([own, *part.shape[1:]])
    return taken


def until_all_end(
    dataset: tf.data.Dataset, link: HostLink, name: str | None = None
) -> tf.data.Dataset:
    """`dataset`, then elements without rows until every other host has ended, too.

    Args:
      dataset: this host's elements; the hosts may have different numbers of them.
      link: tells the hosts from each other.
      name: of the dataset, the same on all hosts; None: the next one.

    Cost: one word to the others per element, ahead of the training steps.
    """
    empty = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.nest.map_structure(
            no_rows, dataset.element_spec, expand_composites=False
        )
    )
    marked = dataset.map(lambda *e: (e if len(e) > 1 else e[0], True))
    padding = empty.map(lambda *e: (e if len(e) > 1 else e[0], False)).repeat()

    name = name or new_dataset_name()
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
            counted(is_element), [number, iterator, is_real], tf.bool, stateful=True
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


# The seed that hosts agree on where the program has set none.
#
# Without a global seed TensorFlow orders `shuffle(seed=7)` by that 7 alone, and draws a
# seed for `shuffle()`. Hosts need one draw for all of them, so the strategy sets a
# global seed. That one goes into every other order as well, and differs from job to
# job: readers that promise an order by their own seed leave it out.


# What `agree_on_seed` has set; None: nothing.
_agreed: int | None = None


def program_seed() -> int | None:
    """What the program gave `tf.random.set_seed`, 0 included; None: nothing."""
    seed = names.global_seed()
    return None if seed == _agreed else seed


def seed_to_share() -> np.ndarray:
    """Whether the program has set a seed, and that seed or a drawn one: int64 [2]."""
    seed = program_seed()
    if seed is None:
        drawn = np.random.default_rng().integers(2**31)
        return np.array([0, drawn if _agreed is None else _agreed])
    return np.array([1, seed])


def agree_on_seed(shared: np.ndarray) -> None:
    """Sets what the first host shares, on a host whose program has set none.

    Args:
      shared: the first host's `seed_to_share`.
    """
    global _agreed
    if program_seed() is not None:
        return
    is_programs, seed = map(int, shared)
    if names.global_seed() != seed:
        # It begins all draws anew: not for a second strategy.
        tf.random.set_seed(seed)
    # The first host's program has set it, so it counts as set here as well.
    _agreed = None if is_programs else seed


@contextlib.contextmanager
def seeds_of_program() -> Iterator[None]:
    """While it is open, TensorFlow has the global seed of the program, or none.

    Only for what has a seed of its own: whatever else is made meanwhile, by other
    threads too, would draw on each host for itself.
    """
    seed = names.global_seed()
    if seed is None or seed != _agreed:
        yield
        return
    names.put_global_seed(None)
    try:
        yield
    finally:
        names.put_global_seed(seed)
