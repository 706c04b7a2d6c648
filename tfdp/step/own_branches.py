"""Refuses conditionals that replicas would take by their own data.

Replicas that take a branch with an exchange would wait forever for those that do not.
So conditions must not visibly depend on a replica's rows, random numbers or part of a
metric, without an exchange in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import SyncOnReadVariable, whole_of
from tfdp._private.step_ops import CALLS, called_graph, names_called
from tfdp.errors import CollectiveError
from tfdp.tracing.loss_shares import ancestors, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.mirrored import SeedVariable

CONDITIONALS = {"If", "StatelessIf", "Case", "StatelessCase"}
# The number of rows is mostly equal on all replicas, and so are decisions by it.
SHAPES = {"Rank", "Shape", "ShapeN", "Size"}


def refuse_own_branches(
    run: ReplicaRun, branches: Sequence[tuple[int, tf.Graph]]
) -> None:
    """Refuses branches with exchanges on which a replica's own data decides."""
    if run.replicas == 1:
        return
    decided_by: dict[int, list[Any]] = {}
    for rank, branch in dict.fromkeys(branches):
        condition = _condition_of(branch)
        if condition is None:
            continue
        why = own_source_of(run, rank, condition)
        if why is not None:
            raise CollectiveError(_message(why))
        decided_by.setdefault(rank, []).append(_differs_by_replica(rank, condition))
    if len(set(map(tuple, decided_by.values()))) > 1:
        raise CollectiveError(_message("by its rank, or by a number that it draws"))


def _message(why: str) -> str:
    return (
        "An update of weights, or another exchange between replicas (all_reduce, "
        "synchronized batch normalization), was built in a conditional that a replica "
        f"takes {why}: those that take the branch would wait forever for those that "
        "do not, or update their shards alone. Decide over all replicas first: "
        "tf.distribute.get_replica_context().all_reduce('sum', tf.cast(condition, "
        "tf.int32)) is the number of replicas with True. To skip batches with a loss "
        "that is not finite, use tfdp.callbacks.NaNGuard."
    )


def _condition_of(branch: tf.Graph) -> tf.Tensor | None:
    """The condition of `branch`; None: it belongs to no conditional."""
    for op in branch.outer_graph.get_operations():
        if op.type in CONDITIONALS and branch.name in names_called(op):
            return op.inputs[0]
    return None


def own_source_of(run: ReplicaRun, rank: int, value: tf.Tensor) -> str | None:
    """Which data of its own a replica computes a value from; None: no such data."""
    owners = {key_of(part): r for r in run.batches for part in _rows_of(run, r)}
    found = set()
    for tensor in _local_ancestors(value, owners):
        found.add(owners.get(key_of(tensor)))
        is_handle = tensor.op.type == "Placeholder" and tensor.dtype == tf.resource
        variable = whole_of(outermost(tensor)) if is_handle else None
        if isinstance(variable, SyncOnReadVariable):
            return "by its own part of a metric"
        is_drawn = isinstance(variable, SeedVariable)
        if is_drawn or tensor.op.type == "RngReadAndSkip":
            return "by a number that it draws itself"
    # With other replicas' rows it is a sum, or was gathered, outside of replicas.
    is_of_all = len(run.batches) > 1 and found >= set(run.batches)
    return "by its own rows" if rank in found and not is_of_all else None


def _rows_of(run: ReplicaRun, trace: int) -> list[tf.Tensor]:
    given = run.batches[trace]
    if len(run.batches) > 1:
        return given
    # A single replica on its host gets rows as plain tensors, among other arguments
    # that are equal on all.
    rows = [part for part in given if part.shape[:1] == given[0].shape[:1]]
    return [
        part
        for part in rows
        if not isinstance(part, tf.__internal__.EagerTensor) and part.op.type != "Const"
    ]


def _differs_by_replica(rank: int, condition: tf.Tensor) -> tuple[Any, ...]:
    """The constants and seeds in a condition: they differ if decisions may differ."""
    found: list[Any] = []
    for tensor in _local_ancestors(condition, ()):
        op = tensor.op
        if op.type == "Const" and tensor.shape.rank == 0:
            found.append(repr(tf.get_static_value(tensor)))
        elif op.type.startswith("Random") and op.op_def.is_stateful:
            seeds = op.get_attr("seed"), op.get_attr("seed2")
            found.append(seeds if any(seeds) else rank)  # without a seed it is random
    return tuple(found)


def _local_ancestors(value: tf.Tensor, batch: Collection[Any]) -> Iterator[tf.Tensor]:
    """The ancestors of `value`, but for those behind exchanges and shapes."""

    def is_found(tensor: tf.Tensor) -> bool:
        is_known = key_of(tensor) in batch or tensor.dtype == tf.resource
        return is_known or _is_argument(tensor)

    def is_behind(tensor: tf.Tensor) -> bool:
        return is_exchanged(tensor) or tensor.op.type in SHAPES

    todo = [value]
    while todo:
        made_of = ancestors(todo.pop(), is_found=is_found, is_behind=is_behind)
        for tensor in made_of:
            yield tensor
            if key_of(tensor) not in batch and _is_argument(tensor):
                todo += _given_as(tensor)


def _is_argument(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is an argument of a function with calls that may be visible."""
    if tensor.op.type != "Placeholder" or not hasattr(tensor.graph, "captures"):
        return False
    return all(inner is not tensor for _, inner in tensor.graph.captures)


def _given_as(argument: tf.Tensor) -> list[tf.Tensor]:
    """The values for `argument` in the calls of its function within the step."""
    graph = argument.graph
    places = [i for i, own in enumerate(graph.inputs) if own is argument]
    return [
        op.inputs[place]
        for op in graph.outer_graph.get_operations()
        if op.type in CALLS and called_graph(op, "f") is graph
        for place in places
    ]
