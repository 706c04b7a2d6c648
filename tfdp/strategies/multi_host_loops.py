"""The loops of Keras that all hosts run together: led, named, and compared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private import frames
from tfdp._private.keras_loops import noticing_loops, wrap_loop
from tfdp._private.keras_models import initial_epoch, set_initial_epoch
from tfdp._private.optimizer_hooks import rate_of
from tfdp.callbacks.gather_from_hosts import first_rank_of, gather_from_hosts
from tfdp.cluster.scratch import scratch_folder
from tfdp.data.grain import has_own_shard
from tfdp.data.hosts import own_part, until_all_end
from tfdp.data.same_batches import (
    BatchRecord,
    common_ends,
    first_differences,
    new_dataset_name,
)
from tfdp.errors import CollectiveError, ReplicaDriftError
from tfdp.hosts.host_link import NOTHING_TO_COMPARE, Compared, HostLink
from tfdp.sharding.variables import ShardedVariable, noted_assignments
from tfdp.step.find_optimizers import innermost_optimizers, optimizers_of
from tfdp.step.replicated_state import replicated_state_of
from tfdp.strategies.worker_settings import policies_of
from tfdp.variables.bit_hash import bit_hash

InWords = Callable[[], str]
Taken = Callable[[], list[int] | None]


def override_callbacks(strategy: Any, fit: tuple[Any, Any] | None) -> None:
    """Lets only worker 0 write files in a `fit`.

    Args:
      strategy: of several hosts.
      fit: its model and its callbacks; None: there is no `fit`.
    """
    if fit is None:
        return
    let_only_the_chief_write(
        fit[1],
        strategy.is_chief,
        lambda model, restored: share_state(
            model, restored, strategy.is_chief, strategy.from_chief
        ),
        all_must_read=strategy.shards_over_hosts,
    )


class LedLoops:
    """The loops of `fit`, `evaluate` and `predict` over the datasets of a strategy.

    Args:
      strategy: of several hosts.
      link: to the other hosts.
      compares: whether hosts compare what must be the same on all of them.
    """

    def __init__(self, strategy: Any, link: HostLink, compares: bool):
        self._strategy = strategy
        self._link = link
        self._compares = compares

    def part_of_host(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """What this host reads of `dataset`, in the loop that is about to begin."""
        fit, loop = frames.fit_of_caller(), frames.loop_of_caller()
        override_callbacks(self._strategy, fit)
        link, name = self._link, new_dataset_name()
        if has_own_shard(frames.adapter_of_caller(), link):
            self._lead(loop, name)
            return until_all_end(dataset, link, name)
        # Without a loop there is no moment at which hosts could compare.
        record = BatchRecord() if self._compares and loop is not None else None
        self._lead(loop, name, record)
        policies = policies_of(fit[0]) if fit is not None else ""
        return own_part(dataset, link, policies, name, record)

    def part_of_function(self, dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
        """This host's own `dataset`, for as long as another host has batches."""
        return until_all_end(dataset, self._link, name)

    def noticed(self, distributed: Any, name: str) -> Any:
        """`distributed`, a distributed dataset, whose later loops are led as well."""

        def lead(loop: Any) -> None:
            override_callbacks(self._strategy, frames.fit_of_caller())
            self._lead(loop, name)

        return noticing_loops(distributed, lead)

    def _lead(self, loop: Any, dataset: str, record: BatchRecord | None = None) -> None:
        """Lets all hosts start `loop`, and run it together; None: there is none.

        Args:
          loop: what leads through its epochs.
          dataset: the name of what it reads, the same on all hosts.
          record: of the batches that all hosts read; None: each host reads its own.
        """
        if loop is None:
            return
        # Before anything is built or reset, which takes exchanges: a worker that is
        # elsewhere, as in the next step of the loop around this one, would not come.
        is_fit = frames.training_input_of_caller() is not None
        call = f"{frames.loop_around()[0]} ({dataset})"
        self._link.start(call, only_within_a_loop=not is_fit)

        def around(
            made: InWords, planned: InWords, taken: Taken
        ) -> contextlib.AbstractContextManager[None]:
            kind, held = frames.loop_around()
            which = f"epoch {held['epoch'] + 1} of fit" if kind == "fit" else kind
            name = f"{which or 'a loop'} ({dataset})"
            compared = NOTHING_TO_COMPARE
            if self._compares:
                fit = held if kind == "fit" else None
                compared = ComparedHosts(self._strategy, name, fit, record, taken)
            return self._link.loop_of_steps(made, planned, name, compared)

        wrap_loop(loop, around)


# On several hosts only worker 0 writes: what the callbacks of a `fit` do elsewhere.
#
# The callbacks themselves stay in their list. On the other workers those that write
# files get methods of their own instance that do nothing; a `BackupAndRestore` there
# takes the weights and the epoch over from worker 0 instead of reading its files.
#
# Where the hosts share the shards of a model, nobody can read it alone. Then all
# workers run all callbacks, and the others write into a folder that is thrown away.


# Callbacks that write, and their attributes that are paths: the first is the one that
# was given, the others lie in it.
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
# Called in the order of the callbacks; a model is set before training begins.
EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]

# What worker 0 restored, by id of the variable's value.
Restored = Mapping[int, np.ndarray]
ShareState = Callable[[Any, Restored], None]


def let_only_the_chief_write(
    callbacks: Any, is_chief: bool, share: ShareState, *, all_must_read: bool
) -> None:
    """Leads the callbacks of a `fit`, once each.

    Args:
      callbacks: as `fit` was given them: None, one, or nested lists.
      is_chief: whether this is worker 0.
      share: brings a model's variables and first epoch to those of worker 0;
        called on every worker at the same time.
      all_must_read: whether no worker can read the model's variables alone.
    """
    for callback in tf.nest.flatten(callbacks):
        kind = next((k for k in WRITERS if isinstance(callback, k)), None)
        if kind is None or "_tfdp_led" in vars(callback):
            continue
        own = vars(callback)
        own["_tfdp_led"] = True
        if not is_chief and all_must_read:
            _write_elsewhere(callback, WRITERS[kind])
        elif not is_chief:
            own.update(dict.fromkeys(EVENTS, _do_nothing))
            if isinstance(callback, keras.callbacks.TensorBoard):
                own["set_model"] = callback.set_model = _do_nothing
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            own["on_train_begin"] = _Restore(callback, is_chief, share)


def _write_elsewhere(callback: Any, attributes: tuple[str, ...]) -> None:
    # The folder goes when the callback does.
    callback.tfdp_folder = folder = scratch_folder()
    given, *inside = attributes
    root = os.path.join(folder.name, os.path.basename(getattr(callback, given)))
    for attribute in inside:
        name = os.path.basename(getattr(callback, attribute))
        setattr(callback, attribute, os.path.join(root, name))
    setattr(callback, given, root)


def share_state(
    model: keras.Model,
    restored: Restored,
    is_chief: bool,
    first_host_value: Callable[[np.ndarray, str], np.ndarray],
) -> None:
    """Brings a model's first epoch and variables to those of worker 0.

    Args:
      model: compiled, alike on all workers.
      restored: what worker 0 assigned to variables of which it stores a part.
      is_chief: whether this is worker 0.
      first_host_value: hands worker 0's array to every worker.
    """
    epoch = np.array(initial_epoch(model), np.int64)
    set_initial_epoch(model, int(first_host_value(epoch, "first epoch")))
    if initial_epoch(model) and not model.optimizer.built:
        # Worker 0 has built it, to restore its slots.
        model.optimizer.build(model.trainable_variables)
    for variable in [*model.weights, *model.optimizer.variables]:
        if not isinstance(variable.value, ShardedVariable):
            mine = variable.numpy()
        elif not _was_restored(variable, restored, first_host_value):
            continue
        elif is_chief:
            mine = restored[id(variable.value)]
        else:
            mine = np.zeros(variable.shape, variable.value.dtype.as_numpy_dtype)
        variable.assign(first_host_value(mine, variable.path))


def _was_restored(
    variable: keras.Variable,
    restored: Restored,
    first_host_value: Callable[[np.ndarray, str], np.ndarray],
) -> bool:
    mine = np.array(id(variable.value) in restored)
    return bool(first_host_value(mine, f"whether {variable.path} was restored"))


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of a method that writes."""


class _Restore:
    """`on_train_begin` of a `BackupAndRestore`: worker 0 reads, all others follow."""

    def __init__(self, callback: Any, is_chief: bool, share: ShareState):
        self._callback = callback
        self._is_chief = is_chief
        self._share = share

    def __call__(self, logs: Any = None) -> None:
        with noted_assignments() as restored:
            if self._is_chief:
                type(self._callback).on_train_begin(self._callback, logs)
        self._share(self._callback.model, restored)


# Notices that hosts have drifted apart, where a loop of `fit` starts or ends.
#
# Hosts begin with the same weights and get the same sums of gradients, so that they
# stay alike while their programs do the same. A shuffle without a seed, weights that
# one host alone sets, or a learning rate that each host draws would go unseen: the loss
# still falls. At moments when the hosts wait for each other anyway, they compare a
# checksum of what must be the same on all of them; only where it differs they exchange
# the checksums of all variables and batches, and find what differs.


DIGEST_BYTES = 16
MOST_NAMED = 5
RATE = "the learning rate"
OFF = "Communication(compare_hosts=False) turns this comparison off."


class ComparedHosts(Compared):
    """What all hosts must have in common in one loop of `fit`, `evaluate`, `predict`.

    Args:
      strategy: of several hosts.
      loop: its name, for errors.
      fit: what Keras' `fit` holds, if the loop is an epoch of one; else None.
      record: of the batches that all hosts read; None: each host reads its own.
      taken: how many batches the steps have taken from each iterator; None: unknown.
    """

    def __init__(
        self,
        strategy: Any,
        loop: str,
        fit: Mapping[str, Any] | None,
        record: BatchRecord | None,
        taken: Callable[[], Sequence[int] | None],
    ):
        self._strategy = strategy
        self._loop = loop
        self._model = None if fit is None else fit["self"]
        self._is_last = fit is not None and fit["epoch"] + 1 >= fit["epochs"]
        self._record = record
        self._taken = taken
        self._told: dict[str, Any] = {}
        self._names: list[str] = []

    def digest(self, *, is_end: bool) -> str:
        """See `Compared.digest`."""
        self._told = {}
        # What happens between epochs is seen when the next one starts.
        is_last = self._is_last or getattr(self._model, "stop_training", False)
        if self._model is not None and (is_last or not is_end):
            state = state_of_host(self._model)
            # Keras numbers names by what a process has made before: hosts may differ.
            self._names = [name for name, _ in state]
            self._told["state"] = [value for _, value in state]
        if self._record is not None and is_end:
            batches = self._record.told(self._taken())
            self._record.forget({i: n + len(told) for i, (n, told) in batches.items()})
            self._told["batches"] = batches
        if not self._told:
            return ""
        told = json.dumps(self._told, sort_keys=True).encode()
        return hashlib.blake2b(told, digest_size=DIGEST_BYTES).hexdigest()

    def explain(self, *, is_end: bool) -> None:
        """See `Compared.explain`.

        Raises:
          CollectiveError: the hosts have read different batches.
          ReplicaDriftError: they have other weights, optimizer state or learning rate.
        """
        what = f"what hosts have in common in {self._loop}"
        everybody = gather_from_hosts(self._strategy, self._told, what)
        batches = [_batches_of(told) for told in everybody]
        for rank, (iterator, number) in first_differences(batches).items():
            raise CollectiveError(_other_batches(self._loop, rank, iterator, number))
        when = f"{'end' if is_end else 'start'} of {self._loop}"
        clauses = _state_in_words(
            self._names, [told.get("state", []) for told in everybody]
        )
        if clauses:
            raise ReplicaDriftError(_drifted(when, clauses))
        # Hosts read ahead by different numbers of batches: the rest is still to come.
        if self._record is not None and is_end:
            self._record.keep(_batches_of(self._told), common_ends(batches))


def state_of_host(model: keras.Model) -> list[tuple[str, str]]:
    """What every host must have, in one order on all: names, and values in words.

    The values are checksums of variables, and learning rates.
    """
    hashes = []
    for kept in replicated_state_of(model, first_rank_of(model.distribute_strategy)):
        if kept.spans_hosts:
            # Replicas of one host are compared by `ReplicaCheck`.
            copies = dict(zip(kept.kept_with, kept.copies, strict=True))
            hashes += [(kept.name, bit_hash(copy)) for copy in copies.values()]
    # Only now: on a GPU all of them run before one is waited for.
    state = [(name, f"{int(value):08x}") for name, value in hashes]
    for owner in optimizers_of(model):
        for optimizer in innermost_optimizers(owner):
            rate = rate_of(optimizer)
            if rate is not None:
                state.append((f"{RATE} of {optimizer.name}", repr(rate)))
    return state


def _state_in_words(names: Sequence[str], everybody: Sequence[Any]) -> list[str]:
    """For each host that differs from host 0, in what."""
    clauses = []
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        if len(theirs) != len(first):
            continue  # another model, which the first step will not pass
        places = [at for at, value in enumerate(theirs) if value != first[at]]
        rates = [at for at in places if names[at].startswith(RATE)]
        # The learning rate is a variable, too.
        is_rate = [bool(rates) and n.endswith("learning_rate") for n in names]
        others = [names[at] for at in places if at not in rates and not is_rate[at]]
        told = [f"{names[at]} ({theirs[at]} and {first[at]})" for at in rates]
        told += others[:MOST_NAMED]
        if len(others) > MOST_NAMED:
            told.append(f"{len(others) - MOST_NAMED} more variables")
        if told:
            clauses.append(f"worker {rank} differs from worker 0 in {', '.join(told)}")
    return clauses


def _drifted(when: str, clauses: Sequence[str]) -> str:
    return (
        f"The workers have drifted apart by the {when}: {'; '.join(clauses)}. Each "
        "worker would train a model of its own. Likely causes: a change that one "
        "worker alone made (model.set_weights, a file that was loaded or a learning "
        "rate that was set under `if strategy.is_chief`); a callback that draws random "
        "numbers without a seed. Make every change on all workers, with the same "
        "values; strategy.from_chief(array) gives worker 0's array to all. Processors "
        f"of different kinds may round differently. {OFF}"
    )


def _other_batches(loop: str, rank: int, iterator: int, number: int) -> str:
    return (
        f"The workers read different batches in {loop}: worker {rank} differs from "
        f"worker 0 from batch {number + 1} of pass {iterator + 1} over the data on. "
        "Each worker takes its rows of the same global batches, so that some rows were "
        "read several times, and others not at all. Likely causes: a shuffle or a "
        "generator without a seed, deterministic=False in map or interleave, random "
        "operations in a map with num_parallel_calls, an order of files that depends "
        "on the machine. Give every shuffle and generator the same seed on all "
        "workers, or make each worker's own part with "
        f"strategy.distribute_datasets_from_function. {OFF}"
    )


def _batches_of(told: Mapping[str, Any]) -> dict[int, tuple[int, list[str]]]:
    return {
        int(iterator): (first, checksums)
        for iterator, (first, checksums) in told.get("batches", {}).items()
    }
