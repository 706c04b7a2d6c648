"""Keras' loops on several hosts: run in step, compare state, write on worker 0."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private import frames, keras_calls
from tfdp._private.keras_calls import call_for_loops
from tfdp._private.keras_loops import wrap_loop
from tfdp._private.keras_models import initial_epoch, set_initial_epoch
from tfdp._private.optimizer_hooks import rate_of
from tfdp.cluster.scratch import scratch_folder
from tfdp.data.grain import has_own_shard
from tfdp.data.hosts import own_part, until_all_end, with_any_length
from tfdp.data.same_batches import (
    BatchRecord,
    common_ends,
    first_differences,
    new_dataset_name,
    same_batches,
)
from tfdp.errors import CollectiveError, ConfigurationError, ReplicaDriftError
from tfdp.hosts.host_link import Compared, HostLink
from tfdp.seams.replace import is_replaced, note_on, replace
from tfdp.sharding.variables import ShardedVariable, noted_assignments
from tfdp.step.find_optimizers import innermost_optimizers, optimizers_of
from tfdp.step.replicated_state import replicated_state_of
from tfdp.strategies.gather_from_hosts import first_rank_of, gather_from_hosts
from tfdp.strategies.worker_settings import policies_of
from tfdp.variables.bit_hash import bit_hash


class HostLoops:
    """The loops of `fit`, `evaluate` and `predict` over the datasets of a strategy."""

    def __init__(self, strategy: Any, link: HostLink, compares: bool):
        self._strategy = strategy
        self._link = link
        self._compares = compares
        self._takes_whole = strategy.balance is not None
        #: Whether hosts read, in the loop that is about to begin, in step.
        self._in_step = True

    def part_of_host(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This host's part of `dataset`, in the loop that is about to begin."""
        fit, loop = frames.fit_of_caller(), keras_calls.loop_of_caller()
        override_callbacks(self._strategy, fit)
        link, name = self._link, new_dataset_name()
        self._in_step = not self._trains_at_own_pace()
        given = keras_calls.adapter_of_caller()
        adapter = type(given).__name__
        if has_own_shard(given, link):
            if self._takes_whole:
                raise ConfigurationError(
                    "balance='speed' splits batches that all hosts read, and this "
                    "grain.DataLoader reads a shard on each host. Leave balance or "
                    "shard_options out."
                )
            self._join(loop, name)
            return until_all_end(dataset, link, name, lambda: self._in_step)
        # Without a loop there is no moment at which hosts can compare.
        record = BatchRecord() if self._compares and loop is not None else None
        self._join(loop, name, record)
        policies = policies_of(fit["self"]) if fit is not None else ""
        if self._takes_whole:
            checked = same_batches(
                dataset, link, policies, name, record, adapter=adapter
            )
            return with_any_length(checked)
        return own_part(
            dataset,
            link,
            policies,
            name,
            record,
            in_step=self._in_step,
            adapter=adapter,
        )

    def part_of_function(self, dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
        """This host's own `dataset`, continued while another host has batches."""
        return until_all_end(dataset, self._link, name, lambda: self._in_step)

    def watched(self, distributed: Any, name: str) -> Any:
        """`distributed`, a distributed dataset, with its later loops in step too."""

        def join(loop: Any) -> None:
            override_callbacks(self._strategy, frames.fit_of_caller())
            self._in_step = not self._trains_at_own_pace()
            self._join(loop, name)

        return call_for_loops(distributed, join)

    def _trains_at_own_pace(self) -> bool:
        fit = frames.training_input_of_caller()
        return fit is not None and _has_own_pace(fit["self"])

    def _join(self, loop: Any, dataset: str, record: BatchRecord | None = None) -> None:
        """Makes all hosts start `loop`, if any, over `dataset`, and run it in step.

        `record`: of batches that all hosts read; None: each host reads its own.
        """
        if loop is None:
            return
        # Before the loop builds or resets anything, which takes exchanges: a worker in
        # another place, as in the next step of an outer loop, would not join them.
        is_fit = frames.training_input_of_caller() is not None
        of_keras = frames.loop_around()
        call = f"{of_keras.kind if of_keras is not None else ''} ({dataset})"
        self._link.start(call, only_within_a_loop=not is_fit)

        def around(
            made: Callable[[], str],
            planned: Callable[[], str],
            taken: Callable[[], list[int] | None],
        ) -> contextlib.AbstractContextManager[None]:
            found = frames.loop_around()
            fit = found if found is not None and found.kind == "fit" else None
            which = "a loop" if found is None else found.kind
            if fit is not None:
                which = f"epoch {fit['epoch'] + 1} of fit"
            name = f"{which} ({dataset})"
            compared = Compared()
            if self._compares:
                compared = ComparedHosts(self._strategy, name, fit, record, taken)
            compared.counts_steps = fit is None or not _has_own_pace(fit["self"])
            return self._link.loop_of_steps(made, planned, name, compared)

        wrap_loop(loop, around)


def _has_own_pace(model: Any) -> bool:
    """Whether hosts may make different numbers of steps in an epoch of `model`."""
    syncs = [getattr(optimizer, "sync", None) for optimizer in optimizers_of(model)]
    return any(getattr(sync, "has_own_pace", False) for sync in syncs)


# Callbacks that write, and their path attributes: the first is the argument, the others
# are in it.
WRITERS = {
    keras.callbacks.CSVLogger: ("filename",),
    keras.callbacks.ModelCheckpoint: ("filepath",),
    keras.callbacks.TensorBoard: ("log_dir",),
    keras.callbacks.BackupAndRestore: (
        "backup_dir",
        "_weights_path",
        "_training_metadata_path",
        "_prev_weights_path",
        "_prev_training_metadata_path",
    ),
}
# In the order of calls; a model is set before training begins.
RESTRICTED = "_tfdp_restricted"
EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def override_callbacks(strategy: Any, fit: frames.KerasLoop | None) -> None:
    """Lets only worker 0 write files in `fit`.

    On the other workers, callbacks that write get instance methods that do nothing, and
    a `BackupAndRestore` receives weights and epoch from worker 0. Where the hosts share
    a model's shards, no host can read it by itself: all run all callbacks, and the
    others write into a temporary folder.
    """
    is_chief = strategy.is_chief
    for callback in tf.nest.flatten(fit.callbacks) if fit is not None else []:
        kind = next((k for k in WRITERS if isinstance(callback, k)), None)
        if kind is None or is_replaced(callback, RESTRICTED):
            continue
        note_on(callback, RESTRICTED, True)
        if not is_chief and strategy.shards_over_hosts:
            _write_elsewhere(callback, WRITERS[kind])
        elif not is_chief:
            for event in EVENTS:
                replace(callback, event, _do_nothing)
            if isinstance(callback, keras.callbacks.TensorBoard):
                replace(callback, "set_model", _do_nothing)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            restored = functools.partial(_restore, strategy, callback)
            replace(callback, "on_train_begin", restored)


def _write_elsewhere(callback: Any, attributes: tuple[str, ...]) -> None:
    # The folder is deleted with the callback.
    callback.tfdp_folder = folder = scratch_folder()
    given, *inside = attributes
    root = os.path.join(folder.name, os.path.basename(getattr(callback, given)))
    for attribute in inside:
        name = os.path.basename(getattr(callback, attribute))
        setattr(callback, attribute, os.path.join(root, name))
    setattr(callback, given, root)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Overrides a method that writes."""


def _restore(strategy: Any, callback: Any, logs: Any = None) -> None:
    """`on_train_begin` of a `BackupAndRestore`: worker 0 reads and shares its state."""
    with noted_assignments() as restored:
        if strategy.is_chief:
            type(callback).on_train_begin(callback, logs)
    _share_state(strategy, callback.model, restored)


def _share_state(
    strategy: Any, model: keras.Model, restored: Mapping[int, np.ndarray]
) -> None:
    """Gives a model worker 0's first epoch and variables, on all workers.

    `restored`: what worker 0 assigned to sharded variables, by the id of their values.
    """
    epoch = np.array(initial_epoch(model), np.int64)
    set_initial_epoch(model, int(strategy.from_chief(epoch, "first epoch")))
    if initial_epoch(model) and not model.optimizer.built:
        # Worker 0 has built it, to restore its slots.
        model.optimizer.build(model.trainable_variables)
    for variable in [*model.weights, *model.optimizer.variables]:
        if isinstance(variable.value, ShardedVariable):
            is_restored = np.array(id(variable.value) in restored)
            label = f"whether {variable.path} was restored"
            if not strategy.from_chief(is_restored, label):
                continue
            if strategy.is_chief:
                mine = restored[id(variable.value)]
            else:
                mine = np.zeros(variable.shape, variable.value.dtype.as_numpy_dtype)
        else:
            mine = variable.numpy()
        variable.assign(strategy.from_chief(mine, variable.path))


# Detects, when a loop starts or ends, that hosts have drifted apart. They start from
# the same weights and get the same gradients, so they stay identical while their
# programs are. An unseeded shuffle, or weights set on one host, would go unnoticed: the
# loss still falls. When the hosts wait for each other anyway, they compare a checksum;
# only if it differs they exchange the checksums of all variables and batches.


DIGEST_BYTES = 16
MOST_NAMED = 5
RATE = "the learning rate"
OFF = "Communication(compare_hosts=False) turns this comparison off."


class ComparedHosts(Compared):
    """The state that all hosts must share in one loop of `fit`, `evaluate`, `predict`.

    Args:
      fit: Keras' `fit`, if the loop is one of its epochs.
      record: of batches that all hosts read; None: each host reads its own.
      taken: how many batches the steps took from each iterator; None: unknown.
    """

    def __init__(
        self,
        strategy: Any,
        loop: str,
        fit: frames.KerasLoop | None,
        record: BatchRecord | None,
        taken: Callable[[], Sequence[int] | None],
    ):
        self._strategy = strategy
        self._loop = loop
        self._model = None if fit is None else fit["self"]
        self._is_last = fit is not None and fit["epoch"] + 1 >= fit["epochs"]
        self._record = record
        self._taken = taken
        self._values: dict[str, Any] = {}
        self._names: list[str] = []

    def digest(self, *, is_end: bool) -> str:
        self._values = {}
        # Changes between epochs are detected when the next one starts.
        is_last = self._is_last or getattr(self._model, "stop_training", False)
        if self._model is not None and (is_last or not is_end):
            state = state_of_host(self._model)
            state += self._strategy.shared_state()
            # Keras numbers names by objects created before, so hosts may differ.
            self._names = [name for name, _ in state]
            self._values["state"] = [value for _, value in state]
        if self._record is not None and is_end:
            batches = self._record.told(self._taken())
            self._record.forget({i: n + len(sums) for i, (n, sums) in batches.items()})
            self._values["batches"] = batches
        if not self._values:
            return ""
        blob = json.dumps(self._values, sort_keys=True).encode()
        return hashlib.blake2b(blob, digest_size=DIGEST_BYTES).hexdigest()

    def explain(self, *, is_end: bool) -> None:
        """See `Compared.explain`: raises for different batches, or state."""
        what = f"what hosts have in common in {self._loop}"
        by_rank = gather_from_hosts(self._strategy, self._values, what)
        batches = [_batches_of(values) for values in by_rank]
        for rank, (iterator, number) in first_differences(batches).items():
            raise CollectiveError(_other_batches(self._loop, rank, iterator, number))
        when = f"{'end' if is_end else 'start'} of {self._loop}"
        states = [values.get("state", []) for values in by_rank]
        clauses = _differences(self._names, states)
        if clauses:
            raise ReplicaDriftError(_drifted(when, clauses))
        # Hosts prefetch by different numbers of batches: the rest is compared later.
        if self._record is not None and is_end:
            self._record.keep(_batches_of(self._values), common_ends(batches))


def state_of_host(model: keras.Model) -> list[tuple[str, str]]:
    """Names and values (checksums, learning rates) of a host's state, in one order."""
    hashes = []
    for kept in replicated_state_of(model, first_rank_of(model.distribute_strategy)):
        if kept.spans_hosts:
            # `ReplicaCheck` compares replicas of one host.
            copies = dict(zip(kept.kept_with, kept.copies, strict=True))
            hashes += [(kept.name, bit_hash(copy)) for copy in copies.values()]
    # Only now: on a GPU all of them are launched before one is waited for.
    state = [(name, f"{int(value):08x}") for name, value in hashes]
    for owner in optimizers_of(model):
        for optimizer in innermost_optimizers(owner):
            rate = rate_of(optimizer)
            if rate is not None:
                state.append((f"{RATE} of {optimizer.name}", repr(rate)))
    return state


def _differences(names: Sequence[str], by_rank: Sequence[Any]) -> list[str]:
    """One clause for each host that differs from host 0."""
    clauses = []
    first = by_rank[0]
    for rank, theirs in enumerate(by_rank):
        if len(theirs) != len(first):
            continue  # another model, which the first step will detect
        places = [at for at, value in enumerate(theirs) if value != first[at]]
        rates = [at for at in places if names[at].startswith(RATE)]
        # The learning rate is a variable, too.
        is_rate = [bool(rates) and n.endswith("learning_rate") for n in names]
        others = [names[at] for at in places if at not in rates and not is_rate[at]]
        words = [f"{names[at]} ({theirs[at]} and {first[at]})" for at in rates]
        words += others[:MOST_NAMED]
        if len(others) > MOST_NAMED:
            words.append(f"{len(others) - MOST_NAMED} more variables")
        if words:
            clauses.append(f"worker {rank} differs from worker 0 in {', '.join(words)}")
    return clauses


def _drifted(when: str, clauses: Sequence[str]) -> str:
    return (
        f"The workers have drifted apart by the {when}: {'; '.join(clauses)}. Likely "
        "causes: a change that only one worker made (model.set_weights, a loaded file "
        "or a learning rate under `if strategy.is_chief`); a callback with unseeded "
        "random numbers. Make every change on all workers, with the same values; "
        "strategy.from_chief(array) gives worker 0's array to all. Processors of "
        f"different kinds may round differently. {OFF}"
    )


def _other_batches(loop: str, rank: int, iterator: int, number: int) -> str:
    return (
        f"The workers read different batches in {loop}: worker {rank} differs from "
        f"worker 0 from batch {number + 1} of pass {iterator + 1} over the data on. "
        "Some rows were read several times, and others not at all. Likely causes: a "
        "shuffle or a generator without a seed, deterministic=False in map or "
        "interleave, random operations in a map with num_parallel_calls, an order of "
        "files that depends on the machine. Use the same seeds on all workers, or make "
        "each worker's own part with strategy.distribute_datasets_from_function. "
        f"{OFF}"
    )


def _batches_of(values: Mapping[str, Any]) -> dict[int, tuple[int, list[str]]]:
    return {
        int(iterator): (first, checksums)
        for iterator, (first, checksums) in values.get("batches", {}).items()
    }
