"""Rows that are paired with rows of their batch, told from the graph.

Contrastive losses multiply each row by all others, or compare their labels. A replica
has its own rows only, so that each meets fewer others than on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private.step_ops import operations_within
from tfdp.tracing.batch_rows import has_rows_of
from tfdp.tracing.own_rows import batch_keys
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.row_means import of_values
from tfdp.tracing.run import ReplicaRun

__all__ = ["suspect_pairs"]

# What compares or joins one row with another where each stands along another axis.
BETWEEN = {
    *("AddV2", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"),
    *("Maximum", "Minimum", "Mul", "NotEqual", "SquaredDifference", "Sub"),
}
DIAGONALS = {"DiagPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"}
PASSED_ON = {"Cast", "EnsureShape", "Identity", "StopGradient"}


def suspect_pairs(run: ReplicaRun) -> None:
    """Notes that rows are paired with rows of the replica alone."""
    if run.group_size == 1 or not run.batches or tf.executing_eagerly():
        return
    # Of one replica: the others do the same, or are told of by something else.
    trace = min(run.batches)
    batch = run.batches[trace]
    if any(tensor.shape.rank and tensor.shape[0] == 1 for tensor in batch):
        return  # of one row nobody can tell along which axis it stands
    rows = of_values(batch_keys(run.batches, trace))
    graph = tf.compat.v1.get_default_graph()
    for op in operations_within(graph.get_operations()):
        pair = None if _is_of_each_alone(op) else _pair_of(op)
        if pair is None or not all(tensor in rows for tensor in pair):
            continue
        if all(has_rows_of(tensor, batch, deeply=True) for tensor in pair):
            run.suspicions.add(
                f"rows are paired with all rows of their batch (in {op.name!r}), as in "
                "contrastive losses, and a replica has its own rows only: each meets "
                "fewer others than on one device. Pair them with the rows of all "
                "replicas, tfdp.losses.all_rows(x), and bring the loss of all pairs "
                "to its share, tfdp.losses.local_mean(loss)"
            )
            return


def _is_of_each_alone(op: tf.Operation) -> bool:
    """Whether of a product of rows with rows only that of each with itself is used."""
    if op.type not in ("Einsum", "MatMul"):
        return False
    used = {consumer.type for consumer in op.outputs[0].consumers()}
    return bool(used & DIAGONALS) and used <= DIAGONALS | {"Shape", "ZerosLike"}


def _pair_of(op: tf.Operation) -> Sequence[tf.Tensor] | None:
    """What would be paired if both had rows in front; None: `op` pairs nothing."""
    if op.type == "MatMul":
        first, second = op.inputs
        if op.get_attr("transpose_a"):
            return None  # a sum over the rows of the first one
        if op.get_attr("transpose_b"):
            return first, second
        turned = _turned(second)
        return None if turned is None else (first, turned)
    if op.type == "Einsum" and len(op.inputs) == 2:
        given, made = op.get_attr("equation").decode().split("->")
        labels = [label[:1] for label in given.split(",")]
        is_pair = labels[0] != labels[1] and all(one in made for one in labels)
        return (
            tuple(op.inputs) if is_pair and all(labels) and "." not in labels else None
        )
    if op.type in BETWEEN:
        for one, other in (op.inputs, tuple(op.inputs)[::-1]):
            rank, other_rank = one.shape.rank, other.shape.rank
            if not rank or not other_rank or rank < 2 or one.shape[1] != 1:
                continue
            if other_rank == rank - 1:  # (n, 1, ...) with (n, ...)
                return one, other
            turned = _turned(other) if other.shape[0] == 1 else None
            if other_rank == rank and turned is not None:
                return one, turned
    return None


def _turned(tensor: tf.Tensor) -> tf.Tensor | None:
    """What has in front what `tensor` has along a later axis; None: nobody can tell."""
    found = outermost(tensor)
    while found is not None and not isinstance(found, tf.__internal__.EagerTensor):
        op = found.op
        if op.type in PASSED_ON:
            found = outermost(op.inputs[0])
            continue
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return op.inputs[0] if order is not None and order[0] != 0 else None
        if op.type == "Reshape":  # (n,) to (1, n)
            is_turned = op.inputs[0].shape.rank == 1 and found.shape[0] == 1
            return op.inputs[0] if is_turned else None
        if op.type == "ExpandDims":
            axis = tf.get_static_value(op.inputs[1])
            rank = op.inputs[0].shape.rank
            is_first = axis is not None and rank and int(axis) % (rank + 1) == 0
            return op.inputs[0] if is_first else None
        if op.type == "StridedSlice":
            return op.inputs[0] if op.get_attr("new_axis_mask") & 1 else None
        return None
    return None
