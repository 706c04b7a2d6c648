"""Resumable passes over a `grain` input, and what a checkpoint stores of them.

Keras wraps a grain iterator in a dataset, and TensorFlow reads ahead of the training.
So the iterator's state is saved after each batch and looked up by the number of batches
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

from tfdp._private.grain_inputs import (
    grain_input_of,
    keep_own_state,
    own_state_of,
    shards_of,
)
from tfdp._private.names import NoneTensorSpec
from tfdp.data.hosts import rows_of_place
from tfdp.data.same_batches import new_dataset_name
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.checked_json import is_count, parse_json
from tfdp.hosts.host_link import HostLink

#: The oldest saved state is dropped beyond these: more than is read ahead.
MOST_STATES = 10_000
MOST_CHARACTERS = 2**26


def with_own_state(dataset: tf.data.Dataset, adapter: Any) -> tf.data.Dataset:
    """`dataset`, which Keras built from a `grain` input, with resumable iterators.

    Unchanged if Keras' `adapter` (None outside a Keras loop) does not read grain, or
    batches have None or sparse elements, which Keras converts.
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
    """Passes over a grain loader or dataset, which makes an iterator for each pass."""

    def __init__(self, source: Any):
        self._source = source
        self._lock = threading.Lock()
        self._is_kept = False
        # By the number of batches before, as every pass is the same.
        self._states: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._characters = 0
        self._next: tuple[int, Any] | None = None

    def keep(self) -> None:
        self._is_kept = True

    def state_after(self, batches: int) -> str | None:
        """The iterator's state after that many batches, as text; None: unknown."""
        with self._lock:
            return self._states.get(batches)

    def begin_next_at(self, batches: int, state: str) -> None:
        """Starts the next pass after `batches` batches, from `state_after`'s result."""
        iterator = iter(self._source)
        try:
            content = parse_json(state)
            # A loader's iterator has bytes, a dataset's a dictionary.
            is_bytes = isinstance(iterator.get_state(), bytes)
            iterator.set_state(json.dumps(content).encode() if is_bytes else content)
        # Grain or the data source may raise anything.
        except Exception as error:
            raise DataError(
                "The grain input cannot go on where the checkpoint was written "
                f"({type(error).__name__}: {str(error)[:600]}). Give the data source, "
                "sampler, operations and number of workers that the training began "
                "with, or this training a directory of its own."
            ) from error
        self._next = batches, iterator

    def batches(self) -> Iterator[Any]:
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
            # Some have threads or processes; a loader ends its own on deletion.
            getattr(iterator, "close", int)()

    def _note(self, count: int, iterator: Any) -> None:
        try:
            state = iterator.get_state()
            text = state.decode() if isinstance(state, bytes) else json.dumps(state)
        except (NotImplementedError, TypeError, ValueError):
            # A custom iterator may have no state, or one that is not JSON.
            self._is_kept = False
            return
        with self._lock:
            self._characters += len(text) - len(self._states.pop(count, ""))
            self._states[count] = text
            while len(self._states) > MOST_STATES or self._characters > MOST_CHARACTERS:
                self._characters -= len(self._states.popitem(last=False)[1])


class KeptInput:
    """The state of a `grain` input of `fit`; other inputs have none."""

    def __init__(self, adapter: Any, hosts: Any):  # the `Hosts` of a checkpoint
        self._hosts = hosts
        source = grain_input_of(adapter)
        self._shards = 1 if source is None else shards_of(source)[1]
        self._own = None if source is None else own_state_of(adapter)
        if self._own is not None:
            self._own.keep()

    def kept(self, batches: int) -> dict[str, Any] | None:
        """The state after `batches` of the current pass, as JSON; a collective."""
        if self._own is None:
            return None
        state = (batches and self._own.state_after(batches)) or ""
        texts = [state]
        if self._shards > 1:
            texts = self._hosts.texts(state, "states of the input")
        return {"shards": self._shards, "states": texts}

    def put_back(self, kept: Any, batches: int) -> bool:
        """Makes the next pass begin after `batches`; false: the caller must skip them.

        Raises:
          ConfigurationError: the number of shards differs.
          DataError: `kept` is the state of another input.
        """
        shards, states = _checked(kept)
        if batches and shards != self._shards:
            raise ConfigurationError(
                f"The grain input has {self._shards} shards, and had {shards} when the "
                "checkpoint was written within a pass over it: each shard has its own "
                "samples and order. Resume with the same number of hosts, or read all "
                "of the input on every host (grain.sharding.NoSharding())."
            )
        if self._own is None or not batches or len(states) != max(shards, 1):
            return False
        state = states[self._hosts.rank if shards > 1 else 0]
        # All or none: hosts that read again would be late.
        if not all(states):
            return False
        self._own.begin_next_at(batches, state)
        return True


def _checked(kept: Any) -> tuple[int, list[str]]:
    """The number of shards, and the states; none if the input is invalid."""
    if not isinstance(kept, dict) or not is_count(kept.get("shards")):
        return 1, []
    states = kept.get("states")
    if not isinstance(states, list) or not all(isinstance(s, str) for s in states):
        states = []
    return kept["shards"], states


def has_own_shard(adapter: Any, link: HostLink) -> bool:
    """Whether each host's `grain.DataLoader` reads its own shard of the input.

    Else every host reads all of it, and worker 0 prints so; other shards are an error
    on all hosts. Cost: for a grain input, one message to each host.
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


def own_rows(
    dataset: tf.data.Dataset, adapter: Any, rank: int, hosts: int
) -> tf.data.Dataset:
    """A host's rows of every batch: all of them if a loader reads its shard only.

    Asks no other host.
    """
    source = grain_input_of(adapter)
    if source is not None and is_shard_of(*shards_of(source), rank, hosts):
        return dataset
    return rows_of_place(dataset, rank, hosts)


def is_shard_of(index: int, count: int, rank: int, hosts: int) -> bool:
    """Whether a host reads its own shard; false: it reads everything; else an error."""
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
