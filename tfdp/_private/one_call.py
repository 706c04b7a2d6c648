"""Operations of a graph in a function that is called once, and that nobody optimizes.

TensorFlow's graph optimizer looks at each operation of a step some twenty times. Where
it could only leave an operation as it is, that is time for nothing.

The call is a conditional whose branches are both this function. A plain call of a
function (`PartitionedCall`) has a rendezvous of its own, in which `Send` and `Recv` of
two replicas' functions never meet: they wait for ever. A conditional's branches have
that of the step. And what it runs is not placed and cut into devices once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp._private.optimized_once import NOT_INLINED, name_of

__all__ = ["in_one_call"]


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
    tf.compat.v1.get_default_graph()._add_function_recursive(function)
    called = name_of(function)
    inner = concrete.graph.outputs
    # Not a constant: the optimizer would make a plain call of it.
    is_there = tf.raw_ops.VarIsInitializedOp(resource=token.handle)
    results = tf.raw_ops.If(
        cond=is_there,
        input=[*arguments, *concrete.captured_inputs],
        Tout=[tensor.dtype for tensor in inner],
        then_branch=called,
        else_branch=called,
        output_shapes=[tensor.shape for tensor in inner],
    )
    for result, tensor in zip(results, inner, strict=True):
        result.set_shape(tensor.shape)
    return list(results)
