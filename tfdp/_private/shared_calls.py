"""Calls of a shared function that the graph optimizer does not look into.

Its passes infer the shapes of a graph, and for that go into the function behind each
plain call, anew for each call and in each pass: with eight replicas through eight times
the operations of a step. They do not go into the branches of a conditional; what shapes
come out of it is written on it. So the call is a conditional, one of whose branches is
the function (`one_call`).

Private here are: which inputs a call only reads, and what a function returns put
together from its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tfdp._private.function_protos import (
    OPTIMIZED_ALREADY,
    AtomicFunction,
    as_always,
    attr_value_pb2,
    only_calling,
)
from tfdp._private.names import run_independently, stop_recording
from tfdp._private.one_call import as_conditional, call_instead, is_there
from tfdp._private.step_ops import IS_CALL

__all__ = ["SharedCall"]


class SharedCall:
    """What calls a function by a conditional.

    Args:
      concrete: the function, TensorFlow's concrete one.
    """

    def __init__(self, concrete: Any) -> None:
        self._type = concrete.function_type
        self._plain, self._graph = concrete._inference_function, concrete.graph
        reads = auto_control_deps_utils.get_read_only_resource_input_indices_graph(
            concrete.graph
        )
        # The first input of a conditional is its condition.
        places = attr_value_pb2.AttrValue.ListValue(i=[place + 1 for place in reads])
        self._reads = attr_value_pb2.AttrValue(list=places)

    def add(
        self, inputs: Sequence[tf.Tensor], token: tf.Tensor
    ) -> tuple[Any, tf.Operation]:
        """Adds a call to the graph, for `call_optimized`.

        Args:
          inputs: its arguments, and in the place of what it captured what the replica
            has.
          token: the handle of a variable of the replica.

        Returns:
          What the function returns, and the call.
        """
        condition = is_there(token)
        # TensorFlow believes that the question changes the variable.
        run_independently(condition.op)
        outputs = [(o.dtype, o.shape) for o in self._type.flat_outputs]
        # As TensorFlow's own call of a function does.
        with stop_recording():
            call = as_conditional(self._plain, inputs, outputs, condition)
        # So that who reads a variable need not wait for others who do.
        call._set_attr(
            auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, self._reads
        )
        call._set_attr(IS_CALL, attr_value_pb2.AttrValue(b=True))
        return self._type.pack_output(list(call.outputs)), call

    def call_optimized(
        self, call: tf.Operation, optimized: AtomicFunction | None
    ) -> None:
        """Has a call call what was made of the function.

        Args:
          optimized: what stands for it; None: TensorFlow optimizes it for each device.
        """
        # Through one more function: a branch is made for one device as it is. What
        # TensorFlow does to a function that it places would be lost (oneDNN's
        # convolutions are put in there), and its optimizer copies a branch for each.
        how = as_always() if optimized is None else OPTIMIZED_ALREADY
        called = only_calling(optimized or self._plain, how, self._graph)
        call_instead(call, called)
