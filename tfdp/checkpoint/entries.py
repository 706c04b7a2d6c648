"""What a training is, by name: each value with how it is read, and given back.

Three kinds. What is alike on all replicas is in one part. Of what is sharded, each part
has its host's range. What each replica has of its own is a row for each; given back to
the same replicas each gets its own again, bit for bit, and to others by a rule:

    residuals, slots of compression    the sum over all rows, an equal part to each
    gradients of an accumulation       the same, also of one value that is the sum over
                                       replicas; moving statistics meanwhile: the mean
    sums of metrics                    the sum to the first replica, 0 to the others
    optimizers that train apart        the mean over all rows (counters: the first)
    what they accumulate, its weight   the sum over groups, an equal part to each
    weights that train apart           the outer weights, as after a meeting
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.names import SyncOnReadVariable
from tfdp.sharding.updates import ACCUMULATOR_NAME, shards_of
from tfdp.sharding.variables import ShardedVariable
from tfdp.step.compression import compression_entries
from tfdp.step.find_optimizers import optimizers_of
from tfdp.variables.global_seed import global_seed_states
from tfdp.variables.local_view import LocalView
from tfdp.variables.mirrored import is_seed_state
from tfdp.variables.own_values import OfRanks, OwnSums

# What the batches of an accumulation weigh: those of all replicas, on each of them.
WEIGHT_NAME = "accumulated_weight"


@dataclass(frozen=True)
class Rows:
    """What replicas had of their own.

    Args:
      all: [replicas, ...], of all hosts, by rank.
      own: [local replicas, ...], this process' rows where the same replicas train
        again; else None.
      first_rank: of this process' replicas.
      replicas: how many train now.
      group_size: how many of `all` stepped together, group by group; None: all.
    """

    all: np.ndarray
    own: np.ndarray | None
    first_rank: int
    replicas: int
    group_size: int | None = None


@dataclass(frozen=True)
class Entry:
    """One value of a training.

    Args:
      path: for people.
      kind: "whole", "shards" or "ranks"; see `manifest.KINDS`.
      shape: of the whole, or of one replica's.
      dtype: its name.
      read: the whole; this host's range of it, flat; or [local replicas, ...]. It may
        lie in the variable's own memory, which the next step writes into.
      give: takes the whole, or `Rows`.
      lengths: of "shards", the elements in each host's part.
      is_sum: whether rows of "ranks" add up to what is meant, and the other kinds hold
        their sum.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    give: Callable[[Any], None]
    lengths: tuple[int, ...] = ()
    is_sum: bool = False


def entries_of(model: keras.Model) -> dict[str, Entry]:
    """All that `model` and its training are, by name: by place, as names of layers
    change with what a process has made before.

    Args:
      model: built, and its optimizers as well.
    """
    entries: dict[str, Entry] = {}
    seen: set[int] = set()

    optimizers = optimizers_of(model)
    between = _may_differ(model, optimizers)

    def add(group: str, variables: Any) -> None:
        for place, variable in enumerate(variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                rule = between.get(id(variable))
                entries[f"{group}/{place}"] = _entry_of(variable, rule)

    add("model", model.variables)
    for number, optimizer in enumerate(optimizers):
        group = f"optimizer{number}"
        add(group, optimizer.variables)
        add_apart = getattr(optimizer, "local_values", None)
        local = add_apart(_layer_state(model, number)) if add_apart else None
        if local is not None:
            _add_local(entries, group, local)
        for name, of_ranks in compression_entries(optimizer).items():
            entries[f"{group}/compression/{name}"] = _of_ranks(name, of_ranks)
    add("metrics", model.metrics_variables)
    for name, state in global_seed_states(model.distribute_strategy).items():
        entries[f"seeds/{name}"] = _entry_of(state)
    return entries


def state_of(model: keras.Model) -> Callable[[], None]:
    """Puts back all as it is now, but for shards that lie on several hosts.

    Cost: a copy in the host's memory, until what is returned is forgotten.
    """
    kept = [
        (entry, np.array(entry.read()))
        for entry in entries_of(model).values()
        if entry.kind != "shards"
    ]

    def put_back() -> None:
        for entry, value in kept:
            if entry.read().tobytes() != value.tobytes():
                is_of_ranks = entry.kind == "ranks"
                entry.give(Rows(value, value, 0, len(value)) if is_of_ranks else value)

    return put_back


def _layer_state(model: keras.Model, number: int) -> list[Any]:
    """What layers store belongs to the model; one optimizer sees to it."""
    state = model.non_trainable_variables if number == 0 else ()
    return [variable.value for variable in state]


def _may_differ(model: keras.Model, optimizers: list[Any]) -> dict[int, str]:
    """Mirrored variables whose copies may differ between steps, and what others get.

    Between two updates of an accumulation each replica has gradients of its own, and
    moving statistics, which are brought together with them. From stage 2 on every
    batch's gradients are: what is too small for shards is the same sum on each ("all").
    What is no float, but for seeds, a layer may count on each replica.
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
    shape, dtype = tuple(value.shape), variable.dtype
    if isinstance(value, LocalView) and value.is_of_group:
        copies = [value.outer_copy(rank) for rank in range(len(value.values))]
        rule = "mean" if copies[0].dtype.is_floating else "first"
        give = _identical_or(copies, rule)
        if isinstance(value, OwnSums):
            give = _identical_or(copies, "sum")
        elif WEIGHT_NAME in path:
            give = _own_or(copies, _shares_of_groups(value.group_size, len(copies)))
        return Entry(path, "ranks", shape, dtype, _stacked(copies), give)
    if isinstance(value, SyncOnReadVariable):
        copies = list(value.values)
        aggregation = value.aggregation
        return Entry(
            path,
            "ranks",
            shape,
            dtype,
            _stacked(copies),
            _sum_to_first(copies, aggregation),
        )
    if rule not in (None, "all"):
        copies = list(getattr(value, "values", [value]))
        give = _identical_or(copies, rule)
        read = _stacked(copies)
        return Entry(path, "ranks", shape, dtype, read, give, is_sum=is_sum)
    return _whole(variable, shape, is_sum)


def _whole(variable: keras.Variable, shape: tuple[int, ...], is_sum: bool) -> Entry:
    return Entry(
        variable.path,
        "whole",
        shape,
        variable.dtype,
        lambda: _seen(variable),
        variable.assign,
        is_sum=is_sum,
    )


def _sharded(variable: keras.Variable, value: ShardedVariable, is_sum: bool) -> Entry:
    shards = value.distribute_strategy.extended.shards
    local = len(value.distribute_strategy.extended.worker_devices)
    parts = shards.reducer.shard_parts // local
    shape = tuple(value.layout.shape)
    if parts == 1:
        return _whole(variable, shape, is_sum)
    edges = [value.layout.bounds(part * local)[0] for part in range(parts)]
    lengths = tuple(np.diff([*edges, value.layout.elements]).tolist())
    return Entry(
        variable.path,
        "shards",
        shape,
        variable.dtype,
        lambda: np.asarray(shards.own_range(value)),
        variable.assign,
        lengths,
        is_sum,
    )


def _add_local(entries: dict[str, Entry], group: str, local: Any) -> None:
    """The weights of replicas that train apart, and the mark that says of what."""
    for place, (variable, copies) in enumerate(
        zip(local.variables, local.stored.local, strict=True)
    ):
        entries[f"{group}/local/{place}"] = Entry(
            variable.name,
            "ranks",
            tuple(variable.shape),
            variable.dtype.name,
            _stacked(copies),
            _own_or(copies),
        )
    for number, on_the_way in enumerate(getattr(local.stored, "on_the_way", ())):
        for place, kept in enumerate(on_the_way.kept):
            name = f"{group}/on the way/{number}/{place}"
            entries[name] = _of_ranks(name, kept)
    entries[f"{group}/local/mark"] = Entry(
        "mark of the local weights",
        "ranks",
        (),
        "int64",
        lambda: np.array(local.write_mark())[None],
        # Other replicas' weights do not fit these: they start from the outer ones.
        lambda rows: local.read_mark(None if rows.own is None else rows.own[0]),
    )


def _of_ranks(name: str, of_ranks: OfRanks) -> Entry:
    shape = tuple(of_ranks.copies[0].shape)
    return Entry(
        name,
        "ranks",
        shape,
        of_ranks.copies[0].dtype.name,
        lambda: of_ranks.rows().numpy(),
        lambda rows: _deal(of_ranks, rows),
    )


def _deal(of_ranks: OfRanks, rows: Rows) -> None:
    if rows.own is not None:
        of_ranks.assign_rows(rows.own)
    elif of_ranks.is_alike:
        of_ranks.assign_rows([rows.all[0]] * len(of_ranks.copies))
    else:
        # All of it is still to be sent, whoever sends it.
        part = rows.all.sum(axis=0) / np.asarray(rows.replicas, rows.all.dtype)
        of_ranks.assign_rows([part] * len(of_ranks.copies))


def _identical_or(copies: list[tf.Variable], rule: str) -> Callable[[Rows], None]:
    def values(rows: Rows) -> list[Any]:
        value = rows.all[0]
        if rule == "sum":
            value = (sum_of(rows.all) / rows.replicas).astype(rows.all.dtype)
        elif rule == "mean":
            are_alike = all(row.tobytes() == value.tobytes() for row in rows.all)
            if not are_alike:  # the mean of those that are may be rounded
                value = (sum_of(rows.all) / len(rows.all)).astype(rows.all.dtype)
        return [value] * len(copies)

    return _own_or(copies, values)


def _shares_of_groups(group_size: int, local: int) -> Callable[[Rows], list[Any]]:
    """All of a group have the same: the sum over groups, an equal part to each."""

    def values(rows: Rows) -> list[Any]:
        total = sum_of(rows.all) / (rows.group_size or group_size)
        part = total / (rows.replicas / group_size)
        return [part.astype(rows.all.dtype)] * local

    return values


def sum_of(rows: np.ndarray) -> np.ndarray:
    """The sum over replicas, as float64, which rounds none of their digits away."""
    return np.asarray(rows.astype("float64").sum(axis=0))


def _sum_to_first(
    copies: list[tf.Variable], aggregation: tf.VariableAggregation
) -> Callable[[Rows], None]:
    def values(rows: Rows) -> list[Any]:
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
    copies: list[tf.Variable], values: Callable[[Rows], list[Any]] | None = None
) -> Callable[[Rows], None]:
    """Gives each replica its own again, and others `values`; None: nothing."""

    def give(rows: Rows) -> None:
        if rows.own is not None:
            _assign_each(copies, rows.own)
        elif values is not None:
            _assign_each(copies, values(rows))

    return give


def _stacked(copies: Any) -> Callable[[], np.ndarray]:
    return lambda: np.stack([copy.numpy() for copy in copies])


def _assign_each(copies: Any, values: Any) -> None:
    for copy, value in zip(copies, values, strict=True):
        with tf.device(copy.device):
            copy.assign(value)


def _seen(variable: keras.Variable) -> np.ndarray:
    # No copy: `variable.numpy()` makes one, and `np.array` of it another.
    return np.asarray(tf.convert_to_tensor(variable.value))
