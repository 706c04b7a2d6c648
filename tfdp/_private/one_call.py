"""Operations of a graph in a function that is called once, and that nobody optimizes.

TensorFlow's graph optimizer looks at each operation of a step some twenty times. Where
it could only leave an operation as it is, that is time for nothing.

The call is a conditional one of whose branches is this function. A plain call of a
function (`PartitionedCall`) has a rendezvous of its own, in which `Send` and `Recv` of
two replicas' functions never meet: they wait for ever. A conditional's branches have
that of the step. And what it runs is not placed and cut into devices once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.function_protos import (
    NOT_INLINED,
    attr_value_pb2,
    name_of,
    never_taken,
)
from tfdp._private.names import stay_unclustered

__all__ = ["as_conditional", "call_instead", "in_one_call", "is_there"]


def in_one_call(
    body: Callable[..., list[tf.Tensor]],
    arguments: Sequence[tf.Tensor],
    token: tf.Variable,
) -> list[tf.Tensor]:
    """`body(*arguments)`, built into a function of its own, and called.

    It begins when all of `arguments` are there.

    Args:
      body: builds operations for one device, the current one, and uses `token`: else
        TensorFlow would order conditionals of several replicas one after the other.
      arguments: of any types and shapes.
      token: a variable of that device, which nothing else uses.
    """
    compiled = tf.function(body, autograph=False, experimental_attributes=NOT_INLINED)
    concrete = compiled.get_concrete_function(
        *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments)
    )
    function = concrete._inference_function
    inputs = [*arguments, *concrete.captured_inputs]
    outputs = [(tensor.dtype, tensor.shape) for tensor in concrete.graph.outputs]
    call = as_conditional(function, inputs, outputs, is_there(token.handle))
    return list(call.outputs)


def is_there(handle: tf.Tensor) -> tf.Tensor:
    """A condition that holds whenever the variable is there, and is no constant.

    Of a constant one the optimizer would make a plain call.
    """
    there = tf.raw_ops.VarIsInitializedOp(resource=handle)
    # What is called may exchange, and who makes clusters does not look into it.
    stay_unclustered(there.op)
    return there


def as_conditional(
    function: Any,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tuple[tf.DType, tf.TensorShape]],
    condition: tf.Tensor,
) -> tf.Operation:
    """A conditional that calls `function`.

    Args:
      function: TensorFlow's atomic one.
      inputs: all that it takes.
      outputs: of what types and shapes its results are.
      condition: one that always holds, and is no constant.
    """
    graph = tf.compat.v1.get_default_graph()
    # Not `function` once more: TensorFlow makes each branch for itself, several times.
    never = never_taken(function)
    for branch in (function, never):
        graph._add_function_recursive(branch)
    made = tf.raw_ops.If(
        cond=condition,
        input=list(inputs),
        Tout=[dtype for dtype, _ in outputs],
        then_branch=name_of(function),
        else_branch=name_of(never),
        output_shapes=[shape for _, shape in outputs],
    )
    call: tf.Operation = made[0].op if outputs else made
    for result, (_, shape) in zip(call.outputs, outputs, strict=True):
        result.set_shape(shape)
    return call


def call_instead(call: tf.Operation, function: Any) -> None:
    """Has a conditional call `function`, which takes and returns the same."""
    call.graph._add_function_recursive(function)
    branch = attr_value_pb2.AttrValue(func=name_of(function))
    call._set_attr("then_branch", branch)
