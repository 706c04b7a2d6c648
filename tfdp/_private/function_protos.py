"""Functions of a graph that are written down, and not traced.

Private are here: the protos of functions, of their attributes and types, and what
stands for such a function in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction

from tfdp._private.names import eager_context

__all__ = [
    "NOT_INLINED",
    "OPTIMIZED_ALREADY",
    "AtomicFunction",
    "attr_value_pb2",
    "config_pb2",
    "function_pb2",
    "name_of",
    "never_taken",
    "only_calling",
]

CALLING, NEVER = "_called", "_never"
# TensorFlow then optimizes the body once for all who call, and does not put a copy of
# it into the place of each call.
NOT_INLINED = {"_noinline": True}

_config = config_pb2.ConfigProto()
_config.graph_options.rewrite_options.disable_meta_optimizer = True
OPTIMIZED_ALREADY = attr_value_pb2.AttrValue(s=_config.SerializeToString())


def name_of(function: AtomicFunction) -> attr_value_pb2.NameAttrList:
    """What an operation's attribute says of the function that it calls."""
    return attr_value_pb2.NameAttrList(name=function.name.decode())


def only_calling(
    function: AtomicFunction, config: attr_value_pb2.AttrValue, graph: Any
) -> AtomicFunction:
    """A function that calls `function`, and does nothing else.

    Args:
      function: with whose arguments it is called.
      config: what TensorFlow does to `function` before it runs.
      graph: what who asks for that of the new function gets.
    """
    inner = function.cached_definition.signature
    definition = function_pb2.FunctionDef()
    outer = definition.signature
    outer.name, outer.is_stateful = inner.name + CALLING, True
    call = definition.node_def.add(name="call", op="StatefulPartitionedCall")
    for place, argument in enumerate(inner.input_arg):
        name = f"argument_{place}"
        outer.input_arg.add(name=name, type=argument.type)
        call.input.append(name)
    for place, result in enumerate(inner.output_arg):
        name = f"result_{place}"
        outer.output_arg.add(name=name, type=result.type)
        definition.ret[name] = f"call:output:{place}"
    call.attr["Tin"].list.type.extend(a.type for a in inner.input_arg)
    call.attr["Tout"].list.type.extend(r.type for r in inner.output_arg)
    call.attr["f"].func.name = inner.name
    call.attr["config_proto"].CopyFrom(config)
    _runs(definition, "call")
    return _made(definition, [function], graph)


def never_taken(function: AtomicFunction) -> AtomicFunction:
    """What takes and returns the same types as `function`, and fails."""
    inner = function.cached_definition.signature
    definition = function_pb2.FunctionDef()
    outer = definition.signature
    outer.name, outer.is_stateful = inner.name + NEVER, True
    for place, argument in enumerate(inner.input_arg):
        outer.input_arg.add(name=f"argument_{place}", type=argument.type)
    holds = definition.node_def.add(name="holds", op="Const")
    holds.attr["dtype"].type = types_pb2.DT_BOOL
    holds.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(False))
    fails = definition.node_def.add(name="fails", op="Assert")
    fails.input.extend(["holds:output:0", "holds:output:0"])
    fails.attr["T"].list.type.append(types_pb2.DT_BOOL)
    _runs(definition, "fails")
    for place, result in enumerate(inner.output_arg):
        name = f"result_{place}"
        outer.output_arg.add(name=name, type=result.type)
        made = definition.node_def.add(name=name, op="Placeholder", input=["^fails"])
        made.attr["dtype"].type = result.type
        made.attr["shape"].shape.unknown_rank = True
        definition.ret[name] = f"{name}:output:0"
    return _made(definition)


def _runs(definition: function_pb2.FunctionDef, node: str) -> None:
    """Has `node` run though nobody may ask for what it returns."""
    definition.signature.control_output.append(node)
    definition.control_ret[node] = node


def _made(
    definition: function_pb2.FunctionDef,
    children: Sequence[AtomicFunction] = (),
    graph: Any = None,
) -> AtomicFunction:
    definition.attr["_noinline"].b = True
    name, context = definition.signature.name, eager_context.context()
    if not context.has_function(name):
        context.add_function_def(definition)
    return AtomicFunction(
        name, context, None, children=list(children), cached_graph=graph
    )
