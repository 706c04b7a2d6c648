"""Global batches of which every host must read the same, and as many.

Hosts compare a checksum of the first batch, and how many there are where they know it.
Otherwise a host that comes to the end says so, and a host that goes on ends the
exchange in which it would wait for rows that no host has. Of a loop of `fit`,
`evaluate` or `predict` the checksums of all batches are kept until the loop ends
(`tfdp.data.same_batches`).
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
from tfdp.hosts.messages import sentence
from tfdp.hosts.python_calls import counted

# Datasets are numbered in the order in which a process distributes them, iterators by
# dataset: the same on every host.
_dataset_numbers = itertools.count()


def new_dataset_name() -> str:
    """The name of the dataset that is distributed next, alike on every host."""
    return f"dataset {next(_dataset_numbers)}"


def same_batches(
    dataset: tf.data.Dataset,
    link: HostLink,
    policies: str,
    name: str | None = None,
    record: BatchRecord | None = None,
) -> tf.data.Dataset:
    """`dataset`, as long as the other hosts read the same.

    Args:
      dataset: global batches.
      link: tells the hosts from each other.
      policies: what the model computes in; the same on all hosts.
      name: of the dataset, the same on all hosts; None: the next one.
      record: gets the checksum of each batch; None: only first batches have one.

    Raises:
      CollectiveError: on all hosts, when the dataset is read and first batches,
        numbers of batches or policies differ.

    Cost: one word to the others per iterator; with `record`, or where a host does not
    know the number of its batches, a call of Python per batch; in the latter case one
    more word at the end.
    """
    length = int(dataset.cardinality())
    comparison = _Comparison(
        link,
        length if length != UNKNOWN else None,
        policies,
        name or new_dataset_name(),
        record,
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
    alike = kept.map(lambda batch, _: tf.nest.map_structure(_shaped, batch, spec))
    if length == UNKNOWN:
        return alike
    return alike.apply(tf.data.experimental.assert_cardinality(length))


UNKNOWN = int(tf.data.UNKNOWN_CARDINALITY)
BUCKETS = 1 << 62
DIGEST_BYTES = 16
# Of a larger part of a batch that is not the first one, a checksum reads so many
# numbers, spread evenly: a batch takes less than a millisecond.
MOST_NUMBERS = 1 << 15


def _query(
    comparison: _Comparison,
    iterator: tf.Tensor,
    count: tf.Tensor,
    is_batch: tf.Tensor,
    batch: Any,
) -> tf.Tensor:
    # The whole of a new iterator's first one alone: a batch is much to hand to Python.
    told = tf.cond(
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
        [iterator, count, is_batch, told],
        tf.int64,
        stateful=True,
    )
    return tf.ensure_shape(answer, [])


def _fingerprint(batch: Any, most_numbers: int | None) -> tf.Tensor:
    """A text that tells `batch` from others, whichever of its parts differs.

    Args:
      batch: with rows.
      most_numbers: how many numbers of each part it reads; None: all.
    """
    # The first part alone would not do: a mask of ones is the same in every batch.
    parts = [
        _some_of(
            tf.strings.to_hash_bucket_fast(part, BUCKETS)
            if part.dtype == tf.string
            else part,
            most_numbers,
        )
        for part in tf.nest.flatten(batch, expand_composites=True)
        if part is not None and part.dtype.is_numpy_compatible
    ]
    if not parts:
        return tf.constant("nothing to compare")
    told = tf.numpy_function(counted(_digest), parts, tf.string, stateful=False)
    return tf.ensure_shape(told, [])


def _some_of(part: tf.Tensor, most_numbers: int | None) -> tf.Tensor:
    if most_numbers is None:
        return part
    # An odd step comes to every column in time, where rows have a power of 2 of them.
    step = tf.maximum((tf.size(part) + most_numbers - 1) // most_numbers, 1) | 1
    return tf.cond(step > 1, lambda: tf.reshape(part, [-1])[::step], lambda: part)


def _digest(*parts: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(f"{part.dtype} {part.shape} ".encode())
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest().encode()


class _Comparison:
    """What this host knows of a dataset's iterators here and on the other hosts.

    Args:
      link: to the others.
      length: the number of batches, -1 without an end; None: not known before the end.
      policies, name, record: see `same_batches`.
    """

    def __init__(
        self,
        link: HostLink,
        length: int | None,
        policies: str,
        name: str,
        record: BatchRecord | None,
    ):
        self._link = link
        self._length = length
        self._policies = policies
        self._name = name
        self.record = record
        self._iterators = itertools.count()
        self._lock = threading.Lock()
        #: By iterator: how many batches were read here, and whether that was all.
        self._read: dict[int, tuple[int, bool]] = {}
        #: By iterator: how many batches other hosts had when they came to the end.
        self._ends: dict[int, dict[int, int]] = {}
        self._error: Exception | None = None

    def look(
        self, iterator: np.ndarray, count: np.ndarray, is_batch: Any, told: bytes
    ) -> np.int64:
        """Called at first batches and ends, and at all where the length is unknown.

        Args:
          iterator: its number; negative: a new one.
          count: how many batches came before.
          is_batch: whether there is one more.
          told: its fingerprint, where the iterator is new.

        Returns:
          The iterator's number.
        """
        # A map that reads ahead asks again behind an error, and would wait again.
        if self._error is not None:
            raise self._error
        try:
            return self._look(int(iterator), int(count), bool(is_batch), told)
        except Exception as error:
            self._error = error
            raise

    def _look(self, place: int, count: int, is_batch: bool, told: bytes) -> np.int64:
        if place < 0:
            place = next(self._iterators)
            self._compare_first(place, told.decode() if is_batch else None)
        if is_batch and self.record is not None:
            self.record.note(place, told.decode())
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
                raise CollectiveError(sentence(difference))
        return np.int64(place)

    def _end_of(self, place: int) -> str:
        return f"{self._name}, iterator {place}, end"

    def _compare_first(self, place: int, told: str | None) -> None:
        said = {
            "policies": self._policies,
            "batches": 0 if told is None else self._length,
            "first": told,
        }
        notes = self._link.share_note(
            f"{self._name}, iterator {place}", json.dumps(said)
        )
        everybody = {rank: json.loads(note) for rank, note in sorted(notes.items())}
        for rank, theirs in everybody.items():
            _refuse_others(rank, theirs, everybody[0])
        if all(theirs["batches"] is not None for theirs in everybody.values()):
            return
        with self._lock:
            self._read[place] = (0, False)
        self._link.on_note(
            self._end_of(place), lambda notes: self._hear_of_ends(place, notes)
        )

    def _hear_of_ends(self, place: int, notes: Mapping[int, str]) -> None:
        """Called from the link's thread whenever a host comes to its end."""
        others = {r: int(note) for r, note in notes.items() if r != self._link.rank}
        with self._lock:
            self._ends[place] = others
        difference = self._difference(place)
        if difference is not None:
            # This host may wait in an exchange by now, which nothing else would end.
            self._link.give_up(difference)

    def _difference(self, place: int) -> str | None:
        with self._lock:
            read, is_all = self._read[place]
            ends = dict(self._ends.get(place, {}))
        for rank, end in ends.items():
            if self._length is not None and self._length != end:
                return _other_number(
                    rank, end, self._link.rank, _in_words(self._length)
                )
            if read > end or (is_all and read < end):
                has = f"{read}" if is_all else f"at least {read}"
                return _other_number(rank, end, self._link.rank, has)
        return None


def _refuse_others(rank: int, theirs: dict[str, Any], first: dict[str, Any]) -> None:
    if theirs["policies"] != first["policies"]:
        raise CollectiveError(
            f"The model computes in {theirs['policies']} on worker {rank} and in "
            f"{first['policies']} on worker 0. Set the same keras.config."
            "set_dtype_policy on all workers, before the model is made."
        )
    counts = (theirs["batches"], first["batches"])
    is_empty = [said["first"] is None for said in (theirs, first)]
    if (None not in counts and counts[0] != counts[1]) or is_empty[0] != is_empty[1]:
        mine, others = map(_in_words, counts)
        raise CollectiveError(sentence(_other_number(rank, mine, 0, others)))
    if theirs["first"] != first["first"]:
        raise CollectiveError(
            f"Worker {rank} reads another first batch than worker 0. Each "
            "worker takes its rows of the same global batches: give every "
            "shuffle the same seed (tf.random.set_seed with one number on all "
            "workers), or make each worker's own part with "
            "strategy.distribute_datasets_from_function."
        )


def _other_number(rank: int, number: Any, other_rank: int, other: Any) -> str:
    by_rank = sorted({rank: number, other_rank: other}.items())
    has = " and ".join(f"{n} on worker {worker}" for worker, n in by_rank)
    return (
        f"the workers have different numbers of batches: {has}. Each worker takes its "
        "rows of the same global batches: give all of them the same data, or make each "
        "worker's own part, of any length, with "
        "strategy.distribute_datasets_from_function"
    )


def _in_words(batches: int | None) -> str:
    if batches is None:
        return "some"
    return "no end of them" if batches < 0 else str(batches)


def _shaped(part: Any, spec: Any) -> Any:
    # The end that was put behind them has no rows, so the batches lost theirs.
    return tf.ensure_shape(part, spec.shape) if isinstance(part, tf.Tensor) else part


def no_rows(spec: Any) -> Any:
    """A batch of no rows of what `spec` describes."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        return tf.RaggedTensor.from_nested_row_splits(
            tf.zeros([0, *(size or 1 for size in inner)], spec.dtype),
            [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank,
        )
    if not hasattr(spec, "shape"):
        return None  # the place of sample weights that are not there
    if spec.shape.rank is None:
        return tf.zeros([0], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 1 for size in spec.shape[1:])]
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape
        )
    return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)


# Checksums of the batches that a host has read, until the hosts have compared them.
#
# Input is read ahead: at the end of an epoch hosts may have read different numbers of
# batches, and have trained on the same ones. So what is compared is bounded by what the
# steps have taken, where that is known, and by what all hosts have read.


# By iterator: the number of the first batch that is told, and the checksums from there.
Told = Mapping[int, tuple[int, list[str]]]


class BatchRecord:
    """Of one dataset on this host, by iterator. Threads of input pipelines write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[int, int] = {}
        self._checksums: dict[int, list[str]] = {}

    def note(self, iterator: int, checksum: str) -> None:
        """Keeps the checksum of the next batch of `iterator`."""
        with self._lock:
            self._first.setdefault(iterator, 0)
            self._checksums.setdefault(iterator, []).append(checksum)

    def told(self, taken: Sequence[int] | None) -> dict[int, tuple[int, list[str]]]:
        """What was not compared yet.

        Args:
          taken: how many batches steps have taken from each iterator; None: unknown,
            and what was read ahead is told as well.
        """
        with self._lock:
            told = {}
            for iterator, checksums in self._checksums.items():
                first, end = self._first[iterator], len(checksums)
                if taken is not None:
                    known = taken[iterator] if iterator < len(taken) else 0
                    end = min(max(known - first, 0), end)
                if end:
                    told[iterator] = (first, checksums[:end])
            return told

    def forget(self, ends: Mapping[int, int]) -> None:
        """Drops what was compared: of each iterator the batches before that number."""
        with self._lock:
            for iterator, end in ends.items():
                done = end - self._first[iterator]
                self._first[iterator] = end
                del self._checksums[iterator][:done]

    def keep(self, told: Told, ends: Mapping[int, int]) -> None:
        """Takes back what was forgotten, from those numbers on, as not compared yet.

        Args:
          told: what `told` gave, and was forgotten.
          ends: by iterator, up to which number it was compared; else not at all.
        """
        with self._lock:
            for iterator, (first, checksums) in told.items():
                start = max(ends.get(iterator, first), first)
                self._first[iterator] = start
                self._checksums[iterator][:0] = checksums[start - first :]


def first_differences(everybody: Sequence[Told]) -> dict[int, tuple[int, int]]:
    """By rank, where a host first read another batch than host 0: iterator and number.

    Args:
      everybody: what each host tells, by rank.
    """
    found = {}
    for rank, theirs in enumerate(everybody):
        for iterator in sorted(set(theirs) & set(everybody[0])):
            (first, own), (other_first, others) = (
                everybody[0][iterator],
                theirs[iterator],
            )
            start = max(first, other_first)
            pairs = zip(
                own[start - first :], others[start - other_first :], strict=False
            )
            number = next((n for n, (a, b) in enumerate(pairs, start) if a != b), None)
            if number is not None:
                found[rank] = (iterator, number)
                break
    return found


def common_ends(everybody: Sequence[Told]) -> dict[int, int]:
    """By iterator, up to which number all hosts have told their batches."""
    iterators = set.intersection(*map(set, everybody))
    return {
        iterator: min(
            first + len(told) for first, told in (t[iterator] for t in everybody)
        )
        for iterator in iterators
    }
