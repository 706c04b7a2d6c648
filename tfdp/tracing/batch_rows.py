"""Does a tensor have one row for each row of the batch? Answered from its graph.

A replica's mean is weighted by its rows of the batch. Where a step masks rows out, or
splits tokens, replicas exchange what they divided by instead. All must decide the same,
or they deadlock: so this reads the graph, and never the shapes, which may differ.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdp._private.names import graphs_inside, in_compiled_function, is_loop_graph
from tfdp.errors import ConfigurationError
from tfdp.tracing.replica_invariance import key_of, outermost
from tfdp.tracing.run import ReplicaRun, trace_of

# A loss is a few operations away from its labels; give up beyond that.
MOST_OPS = 500

ELEMENTWISE = set(
    "Abs Acos Add AddN AddV2 Atan Cast CheckNumerics ClipByValue Cos Cosh Digamma Div "
    "DivNoNan Elu EnsureShape Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater "
    "GreaterEqual Identity IsFinite IsInf IsNan LeakyRelu Less LessEqual Lgamma Log "
    "Log1p LogicalAnd LogicalNot LogicalOr LogSoftmax Maximum Minimum Mul MulNoNan Neg "
    "NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Round Rsqrt "
    "Select SelectV2 Selu Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Square "
    "SquaredDifference StopGradient Sub Tan Tanh Xdivy Xlog1py Xlogy ZerosLike".split()
)
CROSSENTROPIES = {
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
}
REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}
FIRST_INPUT = {"BatchMatMulV2", "BiasAdd", "Cumsum"}
FIRST_INPUT_OF_MODELS = {
    *("AvgPool", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "FusedBatchNormV3"),
    "MaxPool",
}


def has_entry_per_row(run: ReplicaRun, rank: Any, values: tf.Tensor) -> bool:
    """Whether `values` has one entry per row of the batch, times a constant.

    All replicas return the same; if False, they exchange the numbers of values.

    Raises:
      ConfigurationError: when it is False and they cannot exchange them.
    """
    if not isinstance(rank, int) or in_compiled_function():
        return True  # one program of fixed shapes for all replicas
    eager = isinstance(values, tf.__internal__.EagerTensor)
    if not eager:
        batch = run.batches.get(trace_of(rank), [])
        if has_rows_of(values, batch) and values.shape[1:].is_fully_defined():
            return True
        # Not loops around the run: steps_per_execution makes one.
        run_graph = tf.distribute.get_strategy().extended.reducer.run_graph
        if any(map(is_loop_graph, graphs_inside(run_graph))):
            run.suspicions.add(
                "within a tf.while_loop a Keras loss was weighted by the rows of the "
                "batch, because there replicas cannot exchange the number of losses "
                "they took a mean of. Take such losses outside of the loop, or scale "
                "them to their share with tfdp.losses.local_sum"
            )
            return True
    if run.counts is None and run.has_tensors:
        return True  # every replica was given the same
    some_are_empty = any(isinstance(n, int) and n == 0 for n in run.counts or ())
    may_be_alone = some_are_empty or (eager and run.spans_hosts)
    if values.shape.rank == 1 and may_be_alone and not run.adds_dummy_rows:
        # Keras skips the loss of a replica without rows: an exchange would hang.
        if values.shape[0] == run.count_of(rank):
            return True
        raise ConfigurationError(
            f"A Keras loss took the mean of {values.shape[0]} losses on a replica that "
            f"has {run.count_of(rank)} rows, while another one may have none, so the "
            "replicas cannot agree on what to divide by. Compile with "
            "run_eagerly=False (call strategy.run within a tf.function), or give "
            "batches that leave no replica without a row."
        )
    return False


def has_rows_of(
    value: tf.Tensor, batch: Iterable[tf.Tensor], *, deeply: bool = False
) -> bool:
    """Whether the first axis of `value`, of rank 1 or more, is certainly that of a
    tensor of `batch`; `deeply` also follows ops of models, not only those of losses."""
    batch = list(batch)
    keys = {key_of(tensor) for tensor in batch}
    known = next((tensor.shape[0] for tensor in batch if tensor.shape.rank), None)
    todo, seen = collections.deque([value]), set[Any]()
    while todo and len(seen) < MOST_OPS:
        tensor = outermost(todo.popleft(), lambda found: key_of(found) in keys)
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if key_of(tensor) in keys:
            return True
        if tensor.shape.rank and key_of(tensor) not in seen:
            seen.add(key_of(tensor))
            todo.extend(_of_same_rows(tensor))
            if deeply:
                todo.extend(_of_same_rows_in_models(tensor, known))
    return False


def _of_same_rows(tensor: tf.Tensor) -> list[tf.Tensor]:
    op, inputs = tensor.op, list(tensor.op.inputs)
    if op.type in ELEMENTWISE:
        # Other inputs are broadcast to the rows. With a single row shapes say nothing;
        # then an input that is broadcast elsewhere does not reach the batch either.
        same = [one for one in inputs if one.shape.rank == tensor.shape.rank]
        return [one for one in same if tensor.shape[0] == 1 or one.shape[0] != 1]
    if op.type in CROSSENTROPIES:
        return inputs[::-1]  # labels first: they are nearer to the batch
    if op.type in FIRST_INPUT:
        return inputs[:1]
    rule = RULES.get(op.type)
    return rule(op, inputs) if rule is not None else []


def _of_same_rows_in_models(tensor: tf.Tensor, rows: int | None) -> list[tf.Tensor]:
    """The same for ops of models, given the static number of `rows` of the batch."""
    op, inputs = tensor.op, list(tensor.op.inputs)
    if op.type in FIRST_INPUT_OF_MODELS and tensor.value_index == 0:
        return inputs[:1]
    if op.type == "Reshape":  # rows flattened, or rows and tokens in one axis
        before, after = inputs[0].shape, tensor.shape
        if not before.rank or not after.rank:
            return []
        if before[0] is None or after[0] is None:
            return inputs[:1] if before[0] == after[0] else []
        return inputs[:1] if rows and after[0] % rows == 0 and after[0] else []
    if op.type == "ConcatV2":  # two views of each row, concatenated
        return inputs[:-1] if tf.get_static_value(inputs[-1]) == 0 else []
    if op.type == "Split":
        return inputs[1:]
    if op.type in ("Pad", "PadV2", "MirrorPad"):
        paddings = tf.get_static_value(inputs[1])
        return inputs[:1] if paddings is not None and not paddings[0].any() else []
    return []


def _reduction(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    reduced = reduced_axes(inputs)
    return [] if reduced is None or 0 in reduced else inputs[:1]


def reduced_axes(inputs: list[tf.Tensor]) -> set[int] | None:
    """The axes that an op with these inputs reduces; None: not static."""
    axes, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    if axes is None or rank is None:
        return None
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def _expand(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    axis, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    is_behind = axis is not None and rank and int(axis) % (rank + 1) != 0
    return inputs[:1] if is_behind else []


def _squeeze(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    axes, rank = op.get_attr("squeeze_dims"), inputs[0].shape.rank
    if not axes or rank is None or 0 in {axis % rank for axis in axes}:
        return []
    return inputs[:1]


def _transpose(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    order = tf.get_static_value(inputs[1])
    return inputs[:1] if order is not None and order[0] == 0 else []


def _concat(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    axis, rank = tf.get_static_value(inputs[-1]), inputs[0].shape.rank
    is_behind = axis is not None and rank and int(axis) % rank != 0
    return inputs[:-1] if is_behind else []


def _gather(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    axis = tf.get_static_value(inputs[2])
    if axis is None or op.get_attr("batch_dims"):
        return []
    return inputs[1:2] if int(axis) == 0 else inputs[:1] if int(axis) > 0 else []


def _slice(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Only `x[:, ...]` keeps the first axis."""
    strides = tf.get_static_value(inputs[3])
    masks = op.get_attr("begin_mask") & op.get_attr("end_mask")
    for name in ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask"):
        masks &= ~op.get_attr(name)
    is_whole = masks & 1 and strides is not None and strides[0] == 1
    return inputs[:1] if is_whole else []


def _reshape(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    shape = inputs[1]
    if shape.op.type == "Pack":  # (rows, ...)
        length = shape.op.inputs[0]
        if length.op.type != "StridedSlice" or length.shape.rank != 0:
            return []
        place = tf.get_static_value(length.op.inputs[1])
        if place is None or place.tolist() != [0]:
            return []
        shape = length.op.inputs[0]
    return [shape.op.inputs[0]] if shape.op.type == "Shape" else []


RULES: dict[str, Callable[[tf.Operation, list[tf.Tensor]], list[tf.Tensor]]] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    "ConcatV2": _concat,
    "ExpandDims": _expand,
    "GatherV2": _gather,
    "MatMul": lambda op, inputs: [] if op.get_attr("transpose_a") else inputs[:1],
    "OneHot": lambda op, inputs: inputs[:1] if op.get_attr("axis") != 0 else [],
    "Pack": lambda op, inputs: inputs if op.get_attr("axis") != 0 else [],
    "Reshape": _reshape,
    "ResourceGather": lambda op, inputs: inputs[1:],
    "Squeeze": _squeeze,
    "StridedSlice": _slice,
    "Transpose": _transpose,
}
