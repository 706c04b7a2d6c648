"""Checks that every host reads the same global batches, and the same number of them.

Hosts compare a checksum of the first batch, and the number of batches if known. Else a
host that reaches the end announces it, and a host that goes on aborts the collective in
which it would wait for rows that no host has. In a loop of `fit`, `evaluate` or
`predict` the checksums of all batches are kept until the loop ends.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.python_calls import counted

UNKNOWN = int(tf.data.UNKNOWN_CARDINALITY)
BUCKETS = 1 << 62
DIGEST_BYTES = 16
# The checksum of a later batch reads this many numbers of each part, evenly spaced: it
# takes less than a millisecond.
MOST_NUMBERS = 1 << 15
# Datasets are numbered in the order in which a process distributes them, iterators per
# dataset: equal on every host.
_dataset_numbers = itertools.count()
# By the class of Keras' data adapter: what makes each kind of input the same.
ADVICE = {
    "GeneratorDataAdapter": (
        "A Python generator draws on each worker for itself: draw its batches with one "
        "seed (np.random.default_rng(1)), or call keras.utils.set_random_seed(1) at "
        "the top of the script"
    ),
    "PyDatasetAdapter": (
        "A PyDataset is read on each worker: pass shuffle=False to fit, or call "
        "keras.utils.set_random_seed(1) at the top of the script, and draw in "
        "__getitem__ by the batch's number (np.random.default_rng(index))"
    ),
    "TFDatasetAdapter": (
        "Give every shuffle and list_files of the tf.data pipeline a seed "
        "(shuffle(n, seed=1)), or call keras.utils.set_random_seed(1) on all workers "
        "before it is made; batches that it makes from a generator need one seed there"
    ),
    "ArrayDataAdapter": (
        "The arrays themselves differ: make or shuffle them with one seed "
        "(np.random.default_rng(1)), and read files in sorted order"
    ),
    "TorchDataLoaderAdapter": (
        "Give the DataLoader a seed, generator=torch.Generator().manual_seed(1)"
    ),
}
GENERAL_ADVICE = (
    "Give every shuffle the same seed (keras.utils.set_random_seed(1) on all workers)"
)


def new_dataset_name() -> str:
    """The name of the next dataset to be distributed, the same on every host."""
    return f"dataset {next(_dataset_numbers)}"


def same_batches(
    dataset: tf.data.Dataset,
    link: HostLink,
    policies: str,
    name: str | None = None,
    record: BatchRecord | None = None,
    *,
    in_step: bool = True,
    adapter: str = "",
) -> tf.data.Dataset:
    """`dataset`; a `CollectiveError` on all hosts when it is read and the hosts differ.

    Args:
      dataset: global batches.
      link: to the other hosts.
      policies: the model's dtype policies; the same on all hosts.
      name: the dataset's name, the same on all hosts; None: the next one.
      record: collects the checksum of each batch; None: only first batches have one.
      in_step: whether hosts begin each pass together; else they compare later only.
      adapter: the class of Keras' adapter of the input, for the error's advice.

    Cost: one message to the other hosts per iterator; with `record`, or if a host has
    no known number of batches, a Python call per batch, and then a message at the end.
    """
    length = int(dataset.cardinality())
    comparison = _Comparison(
        link,
        length if length != UNKNOWN else None,
        policies,
        name or new_dataset_name(),
        record,
        in_step,
        adapter,
    )
    sees_all = length == UNKNOWN or record is not None
    spec = dataset.element_spec
    is_real = tf.data.Dataset.from_tensors(True).repeat()
    marked = tf.data.Dataset.zip((dataset, is_real))
    if length != tf.data.INFINITE_CARDINALITY:
        marked = marked.concatenate(
            tf.data.Dataset.from_tensors(0).map(
                lambda _: (tf.nest.map_structure(no_rows, spec), False)
            )
        )

    def look(state: Any, element: Any) -> Any:
        (iterator, count), (batch, is_batch) = state, element
        iterator = tf.cond(
            (iterator < 0) | tf.logical_not(is_batch) | sees_all,
            lambda: _query(comparison, iterator, count, is_batch, batch),
            lambda: iterator,
        )
        return (iterator, count + 1), element

    start = (tf.constant(-1, tf.int64), tf.constant(0, tf.int64))
    kept = marked.scan(start, look).take_while(lambda _, is_batch: is_batch)
    checked = kept.map(lambda batch, _: tf.nest.map_structure(_shaped, batch, spec))
    if length == UNKNOWN:
        return checked
    return checked.apply(tf.data.experimental.assert_cardinality(length))


def _query(
    comparison: _Comparison,
    iterator: tf.Tensor,
    count: tf.Tensor,
    is_batch: tf.Tensor,
    batch: Any,
) -> tf.Tensor:
    # Whole only for an iterator's first batch: passing a batch to Python is costly.
    checksum = tf.cond(
        iterator < 0,
        lambda: _fingerprint(batch, None),
        lambda: (
            tf.constant("")
            if comparison.record is None
            else _fingerprint(batch, MOST_NUMBERS)
        ),
    )
    answer = tf.numpy_function(
        counted(comparison.look),
        [iterator, count, is_batch, checksum],
        tf.int64,
        stateful=True,
    )
    return tf.ensure_shape(answer, [])


def _fingerprint(batch: Any, most_numbers: int | None) -> tf.Tensor:
    """A checksum over all parts of `batch`: `most_numbers` of each, or (None) all."""
    # The first part is not enough: a mask of ones is the same in every batch.
    parts = [
        _some_of(part, most_numbers)
        for part in tf.nest.flatten(batch, expand_composites=True)
        if part is not None and part.dtype.is_numpy_compatible
    ]
    if not parts:
        return tf.constant("nothing to compare")
    digest = tf.numpy_function(counted(_digest), parts, tf.string, stateful=False)
    return tf.ensure_shape(digest, [])


def _some_of(part: tf.Tensor, most_numbers: int | None) -> tf.Tensor:
    if part.dtype == tf.string:
        part = tf.strings.to_hash_bucket_fast(part, BUCKETS)
    if most_numbers is None:
        return part
    # An odd step reaches every column even if rows have a power of 2 of them.
    step = tf.maximum((tf.size(part) + most_numbers - 1) // most_numbers, 1) | 1
    return tf.cond(step > 1, lambda: tf.reshape(part, [-1])[::step], lambda: part)


def _digest(*parts: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(f"{part.dtype} {part.shape} ".encode())
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest().encode()


class _Comparison:
    """State of a dataset's iterators on this host and the others.

    `length` is the number of batches, -1 without an end, None if unknown.
    """

    def __init__(
        self,
        link: HostLink,
        length: int | None,
        policies: str,
        name: str,
        record: BatchRecord | None,
        in_step: bool,
        adapter: str,
    ):
        self._in_step, self._adapter = in_step, adapter
        self._link, self._length, self._policies = link, length, policies
        self._name, self.record = name, record
        self._iterators = itertools.count()
        self._lock = threading.Lock()
        #: By iterator: how many batches were read here, and whether those are all.
        self._read: dict[int, tuple[int, bool]] = {}
        #: By iterator: the final number of batches, by rank of other hosts.
        self._ends: dict[int, dict[int, int]] = {}
        self._error: Exception | None = None

    def look(
        self, iterator: np.ndarray, count: np.ndarray, is_batch: Any, checksum: bytes
    ) -> np.int64:
        """Compares first batches and ends, and every batch if the length is unknown.

        Takes and returns the iterator's number, negative for a new one. `count` batches
        came before; `checksum` may be "".
        """
        # A prefetching map calls again after an error, and would wait again.
        if self._error is not None:
            raise self._error
        try:
            return self._look(int(iterator), int(count), bool(is_batch), checksum)
        except Exception as error:
            self._error = error
            raise

    def _look(
        self, place: int, count: int, is_batch: bool, checksum: bytes
    ) -> np.int64:
        if place < 0:
            place = next(self._iterators)
            if self._in_step:
                first = checksum.decode() if is_batch else None
                self._compare_first(place, first)
        if is_batch and self.record is not None:
            self.record.note(place, checksum.decode())
        with self._lock:
            watched = place in self._read
            if watched:
                self._read[place] = (count + is_batch, not is_batch)
        if watched:
            if not is_batch:
                self._link.leave_note(self._end_of(place), str(count))
            difference = self._difference(place)
            if difference is not None:
                self._link.give_up(difference)
                raise _error(difference)
        return np.int64(place)

    def _end_of(self, place: int) -> str:
        return f"{self._name}, iterator {place}, end"

    def _compare_first(self, place: int, checksum: str | None) -> None:
        own = {
            "policies": self._policies,
            "batches": 0 if checksum is None else self._length,
            "first": checksum,
        }
        key = f"{self._name}, iterator {place}"
        notes = self._link.share_note(key, json.dumps(own))
        by_rank = {rank: json.loads(note) for rank, note in sorted(notes.items())}
        for rank, theirs in by_rank.items():
            _check_same(rank, theirs, by_rank[0], self._adapter)
        if all(theirs["batches"] is not None for theirs in by_rank.values()):
            return
        with self._lock:
            self._read[place] = (0, False)
        self._link.on_note(
            self._end_of(place), lambda notes: self._note_ends(place, notes)
        )

    def _note_ends(self, place: int, notes: Mapping[int, str]) -> None:
        """Compares the ends that hosts have reached; runs in the link's thread."""
        others = {r: int(note) for r, note in notes.items() if r != self._link.rank}
        with self._lock:
            self._ends[place] = others
        difference = self._difference(place)
        if difference is not None:
            # Aborts a collective in which this host may be waiting by now.
            self._link.give_up(difference)

    def _difference(self, place: int) -> str | None:
        with self._lock:
            read, is_all = self._read[place]
            ends = dict(self._ends.get(place, {}))
        for rank, end in ends.items():
            if self._length is not None and self._length != end:
                own = _count_text(self._length)
                return _other_number(rank, end, self._link.rank, own)
            if read > end or (is_all and read < end):
                has = f"{read}" if is_all else f"at least {read}"
                return _other_number(rank, end, self._link.rank, has)
        return None


def _check_same(
    rank: int, theirs: dict[str, Any], first: dict[str, Any], adapter: str
) -> None:
    if theirs["policies"] != first["policies"]:
        raise CollectiveError(
            f"The model computes in {theirs['policies']} on worker {rank} and in "
            f"{first['policies']} on worker 0. Set the same keras.config."
            "set_dtype_policy on all workers, before the model is made."
        )
    counts = (theirs["batches"], first["batches"])
    is_empty = [host["first"] is None for host in (theirs, first)]
    if (None not in counts and counts[0] != counts[1]) or is_empty[0] != is_empty[1]:
        mine, others = map(_count_text, counts)
        raise _error(_other_number(rank, mine, 0, others))
    if theirs["first"] != first["first"]:
        raise CollectiveError(
            f"Worker {rank} reads another first batch than worker 0, and each takes "
            f"its rows of the same global batches. {advice_for(adapter)}; or make each "
            "worker's own part with strategy.distribute_datasets_from_function."
        )


def advice_for(adapter: str) -> str:
    """The sentence on how batches become equal, by the class of Keras' adapter."""
    return ADVICE.get(adapter, GENERAL_ADVICE)


def _error(reason: str) -> CollectiveError:
    return CollectiveError(f"{reason[0].upper()}{reason[1:]}.")


def _other_number(rank: int, number: Any, other_rank: int, other: Any) -> str:
    by_rank = sorted({rank: number, other_rank: other}.items())
    has = " and ".join(f"{n} on worker {worker}" for worker, n in by_rank)
    return (
        f"the workers have different numbers of batches: {has}. Each worker takes its "
        "rows of the same global batches: give all of them the same data, or make each "
        "worker's own part, of any length, with "
        "strategy.distribute_datasets_from_function"
    )


def _count_text(batches: int | None) -> str:
    if batches is None:
        return "some"
    return "no end of them" if batches < 0 else str(batches)


def _shaped(part: Any, spec: Any) -> Any:
    # Concatenating the end marker, which has no rows, lost the static shape.
    return tf.ensure_shape(part, spec.shape) if isinstance(part, tf.Tensor) else part


def no_rows(spec: Any) -> Any:
    """An empty batch of `spec`."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        return tf.RaggedTensor.from_nested_row_splits(
            tf.zeros([0, *(size or 1 for size in inner)], spec.dtype),
            [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank,
        )
    if not hasattr(spec, "shape"):
        return None  # absent sample weights
    if spec.shape.rank is None:
        return tf.zeros([0], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 1 for size in spec.shape[1:])]
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape
        )
    return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)


# By iterator: the number of the first reported batch, and the checksums from there.
Reported = Mapping[int, tuple[int, list[str]]]


class BatchRecord:
    """Checksums of one dataset's batches on this host, until hosts have compared them.

    Hosts read ahead by different amounts, so the comparison is bounded by the batches
    that steps have taken, if known, and by what all hosts have read. Input threads
    write it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[int, int] = {}
        self._checksums: dict[int, list[str]] = {}

    def note(self, iterator: int, checksum: str) -> None:
        with self._lock:
            self._first.setdefault(iterator, 0)
            self._checksums.setdefault(iterator, []).append(checksum)

    def told(self, taken: Sequence[int] | None) -> dict[int, tuple[int, list[str]]]:
        """The uncompared checksums of the batches that steps have `taken`, by iterator.

        None: unknown, so batches read ahead are included.
        """
        with self._lock:
            reported = {}
            for iterator, checksums in self._checksums.items():
                first, end = self._first[iterator], len(checksums)
                if taken is not None:
                    used = taken[iterator] if iterator < len(taken) else 0
                    end = min(max(used - first, 0), end)
                if end:
                    reported[iterator] = (first, checksums[:end])
            return reported

    def forget(self, ends: Mapping[int, int]) -> None:
        """Drops compared checksums: of each iterator those before that number."""
        with self._lock:
            for iterator, end in ends.items():
                done = end - self._first[iterator]
                self._first[iterator] = end
                del self._checksums[iterator][:done]

    def keep(self, told: Reported, ends: Mapping[int, int]) -> None:
        """Restores forgotten checksums, a result of `told`, from `ends` on."""
        with self._lock:
            for iterator, (first, checksums) in told.items():
                start = max(ends.get(iterator, first), first)
                self._first[iterator] = start
                self._checksums[iterator][:0] = checksums[start - first :]


def first_differences(everybody: Sequence[Reported]) -> dict[int, tuple[int, int]]:
    """The iterator and number of each rank's first batch that differs from rank 0's."""
    found = {}
    for rank, theirs in enumerate(everybody):
        for iterator in sorted(set(theirs) & set(everybody[0])):
            first, own = everybody[0][iterator]
            other_first, others = theirs[iterator]
            start = max(first, other_first)
            pairs = zip(
                own[start - first :], others[start - other_first :], strict=False
            )
            number = next((n for n, (a, b) in enumerate(pairs, start) if a != b), None)
            if number is not None:
                found[rank] = (iterator, number)
                break
    return found


def common_ends(everybody: Sequence[Reported]) -> dict[int, int]:
    """The number up to which all hosts have reported their batches, by iterator."""
    iterators = set.intersection(*map(set, everybody))
    return {
        iterator: min(t[iterator][0] + len(t[iterator][1]) for t in everybody)
        for iterator in iterators
    }
