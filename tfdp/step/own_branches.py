"""Conditionals that each replica would take by its own data, and all have to alike.

A replica that takes a branch with an exchange waits in it for those that take the other
one, for ever; one that updates its shards in it would do so alone. So a step is refused
where what decides is seen to be a replica's own: made of its rows, of numbers that it
drew, or of its part of a metric, without an exchange in between.
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
# How many rows there are is mostly alike on all replicas, and what it decides on too.
SHAPES = {"Rank", "Shape", "ShapeN", "Size"}


def refuse_own_branches(
    run: ReplicaRun, branches: Sequence[tuple[int, tf.Graph]]
) -> None:
    """Refuses a step in which replicas would wait for each other, or part.

    Args:
      run: whose replicas have been traced.
      branches: that were noted; see `Reducer.branches`.

    Raises:
      CollectiveError: when a replica's own data decides whether it takes one.
    """
    if run.replicas == 1:
        return
    told: dict[int, list[Any]] = {}
    for rank, branch in dict.fromkeys(branches):
        condition = _condition_of(branch)
        if condition is None:
            continue
        why = what_is_own(run, rank, condition)
        if why is not None:
            raise CollectiveError(_message(why))
        told.setdefault(rank, []).append(_differs_by_replica(rank, condition))
    if len(set(map(tuple, told.values()))) > 1:
        raise CollectiveError(_message("by its rank, or by a number that it draws"))


def _message(why: str) -> str:
    return (
        "An update of weights, or another exchange between replicas (all_reduce, "
        "synchronized batch normalization), was built in a conditional that a replica "
        f"takes {why}: those that take the branch would wait for ever for those that "
        "do not, or update their shards alone. Decide over all replicas first: "
        "tf.distribute.get_replica_context().all_reduce('sum', tf.cast(condition, "
        "tf.int32)) tells how many of them say yes. To skip batches whose loss is not "
        "finite there is tfdp.callbacks.NaNGuard."
    )


def _condition_of(branch: tf.Graph) -> tf.Tensor | None:
    """What decides whether `branch` is taken; None: it is no conditional's."""
    for op in branch.outer_graph.get_operations():
        if op.type in CONDITIONALS and branch.name in names_called(op):
            return op.inputs[0]
    return None


def what_is_own(run: ReplicaRun, rank: int, value: tf.Tensor) -> str | None:
    """By what of its own a replica makes a value, in words; None: nothing is seen."""
    owners = {key_of(part): r for r in run.batches for part in _rows_of(run, r)}
    found = set()
    for tensor in _made_here(value, owners):
        found.add(owners.get(key_of(tensor)))
        variable = _variable_of(tensor)
        if isinstance(variable, SyncOnReadVariable):
            return "by its own part of a metric"
        is_drawn = isinstance(variable, SeedVariable)
        if is_drawn or tensor.op.type == "RngReadAndSkip":
            return "by a number that it draws itself"
    # With the rows of the others it is a sum, or was gathered, outside of replicas.
    is_of_all = len(run.batches) > 1 and found >= set(run.batches)
    return "by its own rows" if rank in found and not is_of_all else None


def _rows_of(run: ReplicaRun, trace: int) -> list[tf.Tensor]:
    """The tensors of the replica's batch, of all that it was given."""
    given = run.batches[trace]
    if len(run.batches) > 1:
        return given
    # A replica that is alone on its host is given its rows as tensors, beside numbers
    # that are alike on all.
    rows = [part for part in given if part.shape[:1] == given[0].shape[:1]]
    return [part for part in rows if not _is_constant(part)]


def _is_constant(tensor: tf.Tensor) -> bool:
    is_eager = isinstance(tensor, tf.__internal__.EagerTensor)
    return is_eager or tensor.op.type == "Const"


def _differs_by_replica(rank: int, condition: tf.Tensor) -> tuple[Any, ...]:
    """What is another on replicas that decide otherwise: constants, seeds of draws."""
    told: list[Any] = []
    for tensor in _made_here(condition, ()):
        op = tensor.op
        if op.type == "Const" and tensor.shape.rank == 0:
            told.append(repr(tf.get_static_value(tensor)))
        elif op.type.startswith("Random") and op.op_def.is_stateful:
            seeds = op.get_attr("seed"), op.get_attr("seed2")
            told.append(seeds if any(seeds) else rank)  # no seed: by chance
    return tuple(told)


def _made_here(value: tf.Tensor, batch: Collection[Any]) -> Iterator[tf.Tensor]:
    """What `value` is made of, but for what lies behind exchanges and shapes."""

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
    """Whether `tensor` is what a function is given that calls of it may be seen of."""
    if tensor.op.type != "Placeholder" or not hasattr(tensor.graph, "captures"):
        return False
    return all(inner is not tensor for _, inner in tensor.graph.captures)


def _given_as(argument: tf.Tensor) -> list[tf.Tensor]:
    """What the calls of a function within the step give for its `argument`."""
    graph = argument.graph
    places = [i for i, own in enumerate(graph.inputs) if own is argument]
    return [
        op.inputs[place]
        for op in graph.outer_graph.get_operations()
        if op.type in CALLS and called_graph(op, "f") is graph
        for place in places
    ]


def _variable_of(tensor: tf.Tensor) -> Any:
    """The distributed variable whose copy is captured as `tensor`; None: of none."""
    if tensor.op.type != "Placeholder" or tensor.dtype != tf.resource:
        return None
    return whole_of(outermost(tensor))
