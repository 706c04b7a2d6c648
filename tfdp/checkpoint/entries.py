"""The state of a training, by name: how to read and restore each value.

Three kinds: "whole", replicated, stored in one part; "shards", each part has its host's
range; "ranks", one row per replica. On the same replicas, restored rows are
bit-identical; on others:

    compression residuals and slots   sum over all rows, an equal share to each
    accumulated gradients             the same; buffers meanwhile: the mean
    metric sums                       sum to the first replica, 0 to the others
    optimizers in local training      mean over all rows (counters: the first)
    their accumulated sums, weight    sum over groups, an equal share to each
    weights in local training         the outer weights, as after a synchronization
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.names import SyncOnReadVariable
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME, WEIGHT_NAME, shards_of
from tfdp._private.variable_hooks import assign_each
from tfdp.chain.compression import compression_entries
from tfdp.sharding.variables import ShardedVariable
from tfdp.step.find_optimizers import optimizers_of
from tfdp.variables.global_seed import global_seed_states
from tfdp.variables.local_view import LocalView
from tfdp.variables.mirrored import is_seed_state
from tfdp.variables.own_values import OfRanks, OwnSums


@dataclass(frozen=True)
class ReplicaValues:
    """One variable's values of all replicas."""

    all: np.ndarray  # [replicas, ...], of all hosts, by rank
    own: np.ndarray | None  # [local replicas, ...] if the replicas are the same
    first_rank: int  # of this process's replicas
    replicas: int  # the number of replicas now
    group_size: int | None = None  # replicas of `all` that stepped together; None: all


@dataclass(frozen=True)
class Entry:
    """One value of a training, as checkpoints read and restore it."""

    path: str  # for messages
    kind: str  # "whole", "shards" or "ranks"; see `manifest.KINDS`
    shape: tuple[int, ...]  # of the whole, or of one replica's value
    dtype: str
    # Returns the whole; this host's range, flat; or [local replicas, ...]. It may share
    # the variable's memory, which the next step overwrites.
    read: Callable[[], np.ndarray]
    restore: Callable[[Any], None]  # takes the whole, or `ReplicaValues`
    lengths: tuple[int, ...] = ()  # of "shards", the elements in each host's part
    # Whether it is the sum over the rows of "ranks"; other kinds store that sum.
    is_sum: bool = False
    variable: keras.Variable | None = None


def entries_of(model: keras.Model) -> dict[str, Entry]:
    """The state of `model`, built with its optimizers, by name.

    Names are by position: layer names depend on what the process built before.
    """
    entries: dict[str, Entry] = {}
    seen: set[int] = set()
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        if hasattr(optimizer, "make_equal"):
            optimizer.make_equal()
    rules = _rules_of_differing(model, optimizers)

    def add(group: str, variables: Any) -> None:
        for place, variable in enumerate(variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                rule = rules.get(id(variable))
                entry = _entry_of(variable, rule)
                entries[f"{group}/{place}"] = replace(entry, variable=variable)

    add("model", model.variables)
    for number, optimizer in enumerate(optimizers):
        group = f"optimizer{number}"
        add(group, optimizer.variables)
        local_values = getattr(optimizer, "local_values", None)
        # State that layers store belongs to the model; the first optimizer handles it.
        state = model.non_trainable_variables if number == 0 else ()
        local = local_values([v.value for v in state]) if local_values else None
        if local is not None:
            _add_local(entries, group, local)
        for name, of_ranks in compression_entries(optimizer).items():
            entries[f"{group}/compression/{name}"] = _of_ranks(name, of_ranks)
    add("metrics", model.metrics_variables)
    for name, seeds in global_seed_states(model.distribute_strategy).items():
        entries[f"seeds/{name}"] = _entry_of(seeds)
    return entries


def state_of(model: keras.Model) -> Callable[[], None]:
    """Returns a function that restores the current state, but for shards across hosts.

    Cost: a copy in host memory while the function exists.
    """
    kept = [
        (entry, np.array(entry.read()))
        for entry in entries_of(model).values()
        if entry.kind != "shards"
    ]

    def restore() -> None:
        for entry, value in kept:
            if entry.read().tobytes() != value.tobytes():
                is_whole = entry.kind == "whole"
                entry.restore(
                    value if is_whole else ReplicaValues(value, value, 0, len(value))
                )

    return restore


def _rules_of_differing(model: keras.Model, optimizers: list[Any]) -> dict[int, str]:
    """Id of a mirrored variable with differing copies -> rule for other replicas.

    Between two updates of an accumulation, replicas have different gradients and
    buffers. From shard stage 2 on, gradients are reduced in every batch: tensors too
    small for shards hold the same sum everywhere ("all"). Layers may count in non-float
    variables on each replica, except seeds.
    """
    rules, accumulates = {}, False
    for optimizer in optimizers:
        shards = shards_of(optimizer)
        of_gradients = "all" if shards is not None and shards.stage > 1 else "sum"
        for variable in optimizer.variables:
            if ACCUMULATOR_NAME in variable.path:
                rules[id(variable)], accumulates = of_gradients, True
            elif WEIGHT_NAME in variable.path:
                rules[id(variable)] = "mean"
    for variable in model.non_trainable_variables:
        is_float = tf.as_dtype(variable.dtype).is_floating
        if is_float and accumulates:
            rules[id(variable)] = "mean"
        elif not is_float and not is_seed_state(variable.value):
            rules[id(variable)] = "first"
    return rules


def _entry_of(variable: keras.Variable, rule: str | None = None) -> Entry:
    value, path = variable.value, variable.path
    is_sum = rule in ("sum", "all")
    if isinstance(value, ShardedVariable):
        return _sharded(variable, value, is_sum)
    if isinstance(value, LocalView) and value.is_of_group:
        copies = [value.outer_copy(rank) for rank in range(len(value.values))]
        rule = "mean" if copies[0].dtype.is_floating else "first"
        restore = _identical_or(copies, rule)
        if isinstance(value, OwnSums):
            restore = _identical_or(copies, "sum")
        elif WEIGHT_NAME in path:
            restore = _own_or(copies, _shares_of_groups(value.group_size, len(copies)))
        return _of_copies(path, copies, restore)
    if isinstance(value, SyncOnReadVariable):
        copies = list(value.values)
        return _of_copies(path, copies, _sum_to_first(copies, value.aggregation))
    if rule not in (None, "all"):
        copies = list(getattr(value, "values", [value]))
        return _of_copies(path, copies, _identical_or(copies, rule), is_sum)
    return _whole(variable, tuple(value.shape), is_sum)


def _of_copies(
    path: str, copies: Any, restore: Callable[[Any], None], is_sum: bool = False
) -> Entry:
    def read() -> np.ndarray:
        return np.stack([copy.numpy() for copy in copies])

    shape, dtype = tuple(copies[0].shape), copies[0].dtype.name
    return Entry(path, "ranks", shape, dtype, read, restore, is_sum=is_sum)


def _whole(variable: keras.Variable, shape: tuple[int, ...], is_sum: bool) -> Entry:
    def read() -> np.ndarray:
        # No copy, unlike `variable.numpy()`.
        return np.asarray(tf.convert_to_tensor(variable.value))

    path, dtype = variable.path, variable.dtype
    return Entry(path, "whole", shape, dtype, read, variable.assign, is_sum=is_sum)


def _sharded(variable: keras.Variable, value: ShardedVariable, is_sum: bool) -> Entry:
    shards = value.distribute_strategy.extended.shards
    local = len(value.distribute_strategy.extended.worker_devices)
    parts = shards.transport.parts // local
    shape = tuple(value.layout.shape)
    if parts == 1:
        return _whole(variable, shape, is_sum)
    edges = [value.layout.bounds(part * local)[0] for part in range(parts)]
    lengths = tuple(np.diff([*edges, value.layout.elements]).tolist())
    path, dtype = variable.path, variable.dtype

    def read() -> np.ndarray:
        return np.asarray(shards.own_range(value))

    return Entry(path, "shards", shape, dtype, read, variable.assign, lengths, is_sum)


def _add_local(entries: dict[str, Entry], group: str, local: Any) -> None:
    """The weights of local training, and the mark that identifies the outer weights."""
    for place, (variable, copies) in enumerate(
        zip(local.variables, local.stored.local, strict=True)
    ):
        name = f"{group}/local/{place}"
        entries[name] = _of_copies(variable.name, copies, _own_or(copies))
    for number, in_flight in enumerate(getattr(local.stored, "on_the_way", ())):
        for place, kept in enumerate(in_flight.kept):
            name = f"{group}/on the way/{number}/{place}"
            entries[name] = _of_ranks(name, kept)
    entries[f"{group}/local/mark"] = Entry(
        "mark of the local weights",
        "ranks",
        (),
        "int64",
        lambda: np.array(local.write_mark())[None],
        # Local weights of other replicas do not fit: start from the outer weights.
        lambda rows: local.read_mark(None if rows.own is None else rows.own[0]),
    )


def _of_ranks(name: str, of_ranks: OfRanks) -> Entry:
    def read() -> np.ndarray:
        return of_ranks.rows().numpy()

    def restore(rows: ReplicaValues) -> None:
        if rows.own is not None:
            of_ranks.assign_rows(rows.own)
            return
        value = rows.all[0]
        if not of_ranks.is_identical:
            # The total must still be sent, by any replicas.
            value = rows.all.sum(axis=0) / np.asarray(rows.replicas, rows.all.dtype)
        of_ranks.assign_rows([value] * len(of_ranks.copies))

    first = of_ranks.copies[0]
    return Entry(name, "ranks", tuple(first.shape), first.dtype.name, read, restore)


def _identical_or(
    copies: list[tf.Variable], rule: str
) -> Callable[[ReplicaValues], None]:
    def values(rows: ReplicaValues) -> list[Any]:
        value = rows.all[0]
        if rule == "sum":
            value = (sum_of(rows.all) / rows.replicas).astype(rows.all.dtype)
        elif rule == "mean":
            are_equal = all(row.tobytes() == value.tobytes() for row in rows.all)
            if not are_equal:  # the mean of equal rows may be rounded
                value = (sum_of(rows.all) / len(rows.all)).astype(rows.all.dtype)
        return [value] * len(copies)

    return _own_or(copies, values)


def _shares_of_groups(
    group_size: int, local: int
) -> Callable[[ReplicaValues], list[Any]]:
    """The replicas of a group have equal values: sum over groups, shared equally."""

    def values(rows: ReplicaValues) -> list[Any]:
        total = sum_of(rows.all) / (rows.group_size or group_size)
        part = total / (rows.replicas / group_size)
        return [part.astype(rows.all.dtype)] * local

    return values


def sum_of(rows: np.ndarray) -> np.ndarray:
    """The sum over replicas, in float64 so that no digits are rounded away."""
    return np.asarray(rows.astype("float64").sum(axis=0))


def _sum_to_first(
    copies: list[tf.Variable], aggregation: tf.VariableAggregation
) -> Callable[[ReplicaValues], None]:
    def values(rows: ReplicaValues) -> list[Any]:
        if aggregation == tf.VariableAggregation.SUM:
            total = rows.all.sum(axis=0, dtype=rows.all.dtype)
            nothing = np.zeros_like(total)
            ranks = range(rows.first_rank, rows.first_rank + len(copies))
            return [nothing if rank else total for rank in ranks]
        if aggregation == tf.VariableAggregation.MEAN:
            mean = rows.all.mean(axis=0).astype(rows.all.dtype)
            return [mean] * len(copies)
        return [rows.all[0]] * len(copies)

    return _own_or(copies, values)


def _own_or(
    copies: list[tf.Variable],
    values: Callable[[ReplicaValues], list[Any]] | None = None,
) -> Callable[[ReplicaValues], None]:
    """Restores each replica's own row, or `values` on other replicas; None: nothing."""

    def restore(rows: ReplicaValues) -> None:
        if rows.own is not None:
            assign_each(copies, rows.own)
        elif values is not None:
            assign_each(copies, values(rows))

    return restore
