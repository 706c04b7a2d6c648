"""`GrainPasses`: passes over a `grain` input that can begin where one was.

Keras makes a dataset of it that calls `next` on an iterator of grain's, and TensorFlow
reads ahead, so that the iterator is further than the training. Here the iterator's
state is noted behind each batch, and found again by the number of batches that were
trained on.
"""

from __future__ import annotations

import collections
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.grain_inputs import grain_input_of, keep_own_state, shards_of
from tfdp._private.names import NoneTensorSpec
from tfdp.data.same_batches import new_dataset_name
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.checked_json import parse_json
from tfdp.hosts.host_link import HostLink

#: Of states that wait to be asked for, the oldest goes: more than is read ahead.
MOST_STATES = 10_000
MOST_CHARACTERS = 2**26


def with_own_state(dataset: tf.data.Dataset, adapter: Any) -> tf.data.Dataset:
    """`dataset`, which Keras made of a `grain` input, read so that states are known.

    Args:
      dataset: Keras' own.
      adapter: Keras' data adapter; None: it is not a Keras loop that reads.

    Returns:
      The same batches. `dataset` as it is where it is not grain's, or where batches
      have None or sparse elements, of which Keras makes something else.
    """
    source = grain_input_of(adapter)
    leaves = tf.nest.flatten(dataset.element_spec)
    special = (tf.SparseTensorSpec, tf.OptionalSpec, NoneTensorSpec)
    if source is None or any(isinstance(leaf, special) for leaf in leaves):
        return dataset
    passes = GrainPasses(source)
    keep_own_state(adapter, passes)
    return tf.data.Dataset.from_generator(
        passes.batches, output_signature=dataset.element_spec
    )


class GrainPasses:
    """The passes over a loader or a dataset of grain's.

    Args:
      source: makes an iterator with `get_state` and `set_state` for each pass.
    """

    def __init__(self, source: Any):
        self._source = source
        self._lock = threading.Lock()
        self._is_kept = False
        # By how many batches of a pass came before: passes are alike.
        self._states: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._characters = 0
        self._next: tuple[int, Any] | None = None

    def keep(self) -> None:
        """Notes states from now on."""
        self._is_kept = True

    def state_after(self, batches: int) -> str | None:
        """The iterator's state behind so many batches, as text; None: not known."""
        with self._lock:
            return self._states.get(batches)

    def begin_next_at(self, batches: int, state: str) -> None:
        """Lets the next pass begin behind so many batches.

        Args:
          batches: how many came before.
          state: what `state_after` returned for it.

        Raises:
          DataError: it is a state of other data, or none.
        """
        iterator = iter(self._source)
        try:
            known = parse_json(state)
            # A loader's iterator has bytes, a dataset's a dictionary.
            is_bytes = isinstance(iterator.get_state(), bytes)
            iterator.set_state(json.dumps(known).encode() if is_bytes else known)
        # Whatever grain, or the data source, may raise.
        except Exception as error:
            raise DataError(
                "The grain input cannot go on where the checkpoint was written "
                f"({type(error).__name__}: {str(error)[:600]}). Give the data source, "
                "sampler, operations and number of workers that the training began "
                "with, or this training a directory of its own."
            ) from error
        self._next = batches, iterator

    def batches(self) -> Iterator[Any]:
        """One pass."""
        with self._lock:
            count, iterator = self._next or (0, None)
            self._next = None
        if iterator is None:
            iterator = iter(self._source)
        try:
            for batch in iterator:
                count += 1
                if self._is_kept:
                    self._note(count, iterator)
                yield keras.tree.lists_to_tuples(batch)
        finally:
            # Some have threads or processes; a loader's ends them when it is deleted.
            getattr(iterator, "close", int)()

    def _note(self, count: int, iterator: Any) -> None:
        try:
            state = iterator.get_state()
            text = state.decode() if isinstance(state, bytes) else json.dumps(state)
        except (NotImplementedError, TypeError, ValueError):
            # An iterator of somebody's own need not tell its state, or not as JSON.
            self._is_kept = False
            return
        with self._lock:
            self._characters += len(text) - len(self._states.pop(count, ""))
            self._states[count] = text
            while len(self._states) > MOST_STATES or self._characters > MOST_CHARACTERS:
                self._characters -= len(self._states.popitem(last=False)[1])


# Whether each host's `grain.DataLoader` reads a shard of its own.


def has_own_shard(adapter: Any, link: HostLink) -> bool:
    """Whether the hosts' batches are the parts of global ones, not these themselves.

    Says, on worker 0, when every host reads everything.

    Args:
      adapter: Keras' data adapter of what is read; None: no Keras loop reads it.
      link: tells the hosts from each other.

    Raises:
      ConfigurationError: on all hosts, when a loader has shards that are not those of
        these hosts.

    Cost: of a grain input, one word to the others.
    """
    source = grain_input_of(adapter)
    if source is None:
        return False
    index, count = shards_of(source)
    key = f"{new_dataset_name()}, shards of grain"
    notes = link.share_note(key, f"{index} of {count}")
    found = {rank: note.split(" of ") for rank, note in sorted(notes.items())}
    own = [
        is_shard_of(int(shard), int(shards), rank, link.workers)
        for rank, (shard, shards) in found.items()
    ]
    if any(one != own[0] for one in own):
        raise ConfigurationError(_refusal(notes, link.workers))
    if not own[0] and link.rank == 0:
        own_shard = f"grain.sharding.ShardOptions(rank, {link.workers})"
        print(
            f"tfdp: each of {link.workers} hosts reads all of the grain input and "
            "takes its rows of every batch. A grain.DataLoader reads a shard on each "
            f"host with shard_options={own_shard}, and then batches of its own rows",
            file=sys.stderr,
        )
    return own[0]


def is_own_shard(adapter: Any, rank: int, hosts: int) -> bool:
    """As `has_own_shard`, by what this host knows alone.

    Raises:
      ConfigurationError: the loader has shards that are not those of these hosts.
    """
    source = grain_input_of(adapter)
    return source is not None and is_shard_of(*shards_of(source), rank, hosts)


def is_shard_of(index: int, count: int, rank: int, hosts: int) -> bool:
    """Whether a host reads its shard; false: it reads everything.

    Raises:
      ConfigurationError: it does neither.

    >>> is_shard_of(1, 2, rank=1, hosts=2), is_shard_of(0, 1, rank=1, hosts=2)
    (True, False)
    """
    if (index, count) not in ((rank, hosts), (0, 1)):
        raise ConfigurationError(_refusal({rank: f"{index} of {count}"}, hosts))
    return count > 1


def _refusal(notes: Mapping[int, str], hosts: int) -> str:
    found = ", ".join(f"{note} on worker {r}" for r, note in sorted(notes.items()))
    return (
        f"The grain.DataLoader reads shard {found}. Allowed is all of it on all "
        "workers, shard_options=grain.sharding.NoSharding(), or on the worker of each "
        f"rank shard_options=grain.sharding.ShardOptions(rank, {hosts})."
    )
