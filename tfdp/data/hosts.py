"""The part of the input that each host takes, and the seed that hosts share."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.data.same_batches import BatchRecord, new_dataset_name, no_rows, same_batches
from tfdp.data.split import bounds_of_host, has_rows, length_of
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.python_calls import counted
from tfdp.tracing.rows import rows_between

OVER = "over"  # a host adds this to its number of elements when it has no more


def own_part(
    dataset: tf.data.Dataset,
    link: HostLink,
    policies: str = "",
    name: str | None = None,
    record: BatchRecord | None = None,
    *,
    in_step: bool = True,
    adapter: str = "",
) -> tf.data.Dataset:
    """This host's rows of every global batch: rows n h // H to n (h + 1) // H of n.

    All hosts have the same `dataset` of global batches; see `same_batches`.
    """
    checked = same_batches(
        dataset, link, policies, name, record, in_step=in_step, adapter=adapter
    )
    return rows_of_place(checked, link.rank, link.workers)


def with_any_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, whose batches have any number of rows, as the type of a step says."""
    return _mapped(
        dataset, lambda part: _of_any_length(part) if has_rows(part) else part
    )


def _of_any_length(part: Any) -> Any:
    # The only op that forgets a static shape. A slice copies nothing.
    rows = tf.raw_ops.PlaceholderWithDefault(input=length_of(part), shape=[])
    return rows_between(part, 0, rows)


def rows_of_place(dataset: tf.data.Dataset, rank: int, hosts: int) -> tf.data.Dataset:
    """Host `rank`'s rows of every batch; see `own_part`."""
    return _mapped(dataset, functools.partial(_rows, rank=rank, hosts=hosts))


def _mapped(
    dataset: tf.data.Dataset, function: Callable[[Any], Any]
) -> tf.data.Dataset:
    """`dataset`, with `function` of each part of its elements."""
    # `map` passes the parts of a tuple as separate arguments.
    is_tuple = isinstance(dataset.element_spec, tuple)
    return dataset.map(
        lambda *parts: tf.nest.map_structure(function, parts if is_tuple else parts[0]),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def _rows(part: Any, rank: int, hosts: int) -> Any:
    if not has_rows(part):
        return part
    taken = rows_between(part, *bounds_of_host(length_of(part), rank, hosts))
    if isinstance(part, tf.Tensor) and part.shape[0] is not None:
        begin, end = bounds_of_host(part.shape[0], rank, hosts)
        taken.set_shape([end - begin, *part.shape[1:]])
    return taken


def until_all_end(
    dataset: tf.data.Dataset,
    link: HostLink,
    name: str | None = None,
    is_in_step: Callable[[], bool] = lambda: True,
) -> tf.data.Dataset:
    """`dataset`, then elements without rows until every other host has ended, too.

    `is_in_step`: asked at the end; without such elements where hosts are not in step.
    The hosts' datasets may differ in length. Cost: one message to the other hosts per
    element, ahead of the training steps.
    """
    spec = dataset.element_spec
    empty = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.nest.map_structure(no_rows, spec)
    )
    marked = dataset.map(lambda *e: (e if len(e) > 1 else e[0], True))
    padding = empty.map(lambda *e: (e if len(e) > 1 else e[0], False)).repeat()

    name = name or new_dataset_name()
    iterators = itertools.count()
    own_elements: collections.Counter[str] = collections.Counter()

    def is_element(number: np.ndarray, iterator: np.ndarray, mine: Any) -> np.ndarray:
        key = f"{name}, iterator {iterator}"
        if mine:
            # Never wait here: this element may be read ahead by an iterator that is
            # about to be dropped, while another host waits for this one elsewhere.
            own_elements[key] += 1
            link.leave_note(key, str(own_elements[key]))
            return np.array(True)
        link.leave_note(key, f"{own_elements[key]} {OVER}")
        if not is_in_step():
            return np.array(False)
        return np.array(_others_have(link, key, int(number)))

    def goes_on(number: tf.Tensor, element: tuple[Any, Any]) -> tf.Tensor:
        iterator, (_, is_real) = element
        answer = tf.numpy_function(
            counted(is_element), [number, iterator, is_real], tf.bool, stateful=True
        )
        return tf.ensure_shape(answer, [])

    def number_of_iterator() -> Iterator[int]:
        """Yields the iterator's number until the iterator is dropped."""
        number = next(iterators)
        try:
            yield from itertools.repeat(number)
        finally:
            # Other hosts may wait for this iterator's final count.
            key = f"{name}, iterator {number}"
            link.leave_note(key, f"{own_elements.pop(key, 0)} {OVER}")

    numbered = tf.data.Dataset.from_generator(
        number_of_iterator, output_signature=tf.TensorSpec([], tf.int64)
    )
    joined = tf.data.Dataset.zip((numbered, marked.concatenate(padding)))
    kept = joined.enumerate().take_while(goes_on)
    return kept.map(lambda number, element: element[1][0])


def _others_have(link: HostLink, key: str, number: int) -> bool:
    """Waits until a host has element `number` or all have ended; whether one has."""

    def reached(note: str) -> bool:
        return int(note.split()[0]) > number

    def is_decided(notes: dict[int, str]) -> bool:
        others = [note for rank, note in notes.items() if rank != link.rank]
        all_over = sum(note.endswith(OVER) for note in others) == link.workers - 1
        return all_over or any(map(reached, others))

    notes = link.wait_for_notes(key, is_decided)
    return any(reached(note) for rank, note in notes.items() if rank != link.rank)


# The shared seed, for programs that set none: TensorFlow draws one for `shuffle()`,
# which must be one draw for all hosts. A global seed changes every other order as well,
# and differs from job to job: readers with an order by their own seed leave it out.

_agreed: int | None = None  # the seed set by `agree_on_seed`; None: none


def program_seed() -> int | None:
    """The program's `tf.random.set_seed` value, 0 included; None: none."""
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
    """Sets rank 0's `seed_to_share` on a host whose program has set none."""
    global _agreed
    if program_seed() is not None:
        return
    is_programs, seed = map(int, shared)
    if names.global_seed() != seed:
        # Restarts all random streams, so not for a second strategy.
        tf.random.set_seed(seed)
    # Rank 0's program set it, so it counts as set by the program here as well.
    _agreed = None if is_programs else seed


@contextlib.contextmanager
def seeds_of_program() -> Iterator[None]:
    """Hides the shared global seed, if the program set none.

    Only for what has a seed of its own: anything else created meanwhile, in any thread,
    would draw differently on each host.
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
