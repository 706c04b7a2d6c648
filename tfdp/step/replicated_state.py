"""The state that replicas keep equal, for checks that they do.

Weights, state of optimizers, averages, moving statistics, the scale of the loss and
outer weights and momenta are equal on all replicas, local weights within a group
(`sync=`); shards are held once, with shard_group="host" once on each host.

Metrics (variables that are read as a sum), accumulators of gradients, states of random
generators, integers that a layer assigns on each replica and compression residuals
differ on purpose, and so do buffers between two updates of an accumulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import MirroredVariable, SyncOnReadVariable
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME, is_between_updates
from tfdp.chain.compression import STATE
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.local_step import groups_across
from tfdp.variables.in_shards import parts_on_each_host
from tfdp.variables.mirrored import is_seed_state


@dataclasses.dataclass(frozen=True)
class ReplicatedState:
    """A variable of which several replicas have equal copies: those with equal numbers
    in `kept_with`; with `spans_hosts` every host has the same ones."""

    name: str
    copies: tuple[tf.Variable, ...]
    kept_with: tuple[int, ...]
    spans_hosts: bool = True


def replicated_state_of(
    model: keras.Model, first_rank: int
) -> Iterator[ReplicatedState]:
    """The state of `model` that replicas keep equal; `first_rank` is this process's."""
    strategy = model.distribute_strategy
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        if hasattr(optimizer, "make_equal"):
            optimizer.make_equal()
    alone = [0] * len(strategy.extended.worker_devices)
    syncs = [getattr(optimizer, "sync", None) for optimizer in optimizers]
    sync = next((sync for sync in syncs if sync is not None), None)
    everything = (tuple(range(len(alone))),)
    for group in everything if sync is None else groups_across(strategy, sync):
        for rank in group:
            alone[rank] = first_rank + group[0]
    is_waiting = any(map(is_between_updates, optimizers))
    stored = set(map(id, model.non_trainable_variables)) if is_waiting else set()
    seen: set[int] = set()
    for owner in (model, *optimizers):
        for variable in owner.variables:
            value = variable.value
            if id(value) in seen or id(variable) in stored:
                continue
            seen.add(id(value))
            yield from _rows_of(_name_of(variable, owner), value, alone)
    for optimizer in optimizers:
        state = getattr(optimizer, STATE, None)
        if state is not None:
            copies = tuple(state.steps.copies)
            name = f"{optimizer.name}/compression_steps"
            yield ReplicatedState(name, copies, (0,) * len(copies))


def _name_of(variable: keras.Variable, owner: Any) -> str:
    path = str(variable.path)
    is_model = isinstance(owner, keras.Model)
    return path if is_model or owner.name in path else f"{owner.name}/{path}"


def _rows_of(name: str, value: Any, alone: list[int]) -> Iterator[ReplicatedState]:
    parts = parts_on_each_host(value)
    if parts is not None:
        if parts and ACCUMULATOR_NAME not in name:
            yield ReplicatedState(f"{name} (shards)", tuple(value.values), parts)
        return
    if not isinstance(value, MirroredVariable) or _is_own(name, value):
        return
    copies = tuple(value.values)
    is_of_group = getattr(value, "is_of_group", False)
    kept_with = tuple(alone) if is_of_group else (0,) * len(copies)
    yield ReplicatedState(name, copies, kept_with, not is_of_group)
    if getattr(value, "has_local", False):
        ranks = range(len(copies))
        local = tuple(value.local_copy(rank) for rank in ranks)
        yield ReplicatedState(f"{name} (local)", local, tuple(alone), False)


def _is_own(name: str, value: Any) -> bool:
    return (
        isinstance(value, SyncOnReadVariable)
        or is_seed_state(value)
        or ACCUMULATOR_NAME in name
        or getattr(value, "is_of_replica", False)
    )
