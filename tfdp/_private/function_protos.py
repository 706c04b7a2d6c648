"""Functions of a graph that are written down, and not traced.

Private are here: the protos of functions, of their attributes and types, and what
stands for such a function in Python.
"""

from __future__ import annotations

import functools
import hashlib
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
    "as_always",
    "attr_value_pb2",
    "config_pb2",
    "function_pb2",
    "name_of",
    "never_taken",
    "only_calling",
]

CALLING, NEVER = "_called", "__tfdp_never_"
# TensorFlow then optimizes the body once for all who call, and does not put a copy of
# it into the place of each call.
NOT_INLINED = {"_noinline": True}

_config = config_pb2.ConfigProto()
_config.graph_options.rewrite_options.disable_meta_optimizer = True
OPTIMIZED_ALREADY = attr_value_pb2.AttrValue(s=_config.SerializeToString())


def name_of(function: AtomicFunction) -> attr_value_pb2.NameAttrList:
    """What an operation's attribute says of the function that it calls."""
    return attr_value_pb2.NameAttrList(name=function.name.decode())


def as_always() -> attr_value_pb2.AttrValue:
    """What TensorFlow does to functions that are called, in this process."""
    options = eager_context.context().function_call_options
    return attr_value_pb2.AttrValue(s=options.config_proto_serialized)


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
    signature = function.cached_definition.signature
    arguments = tuple(argument.type for argument in signature.input_arg)
    results = tuple(result.type for result in signature.output_arg)
    return _failing(eager_context.context(), arguments, results)


# One for all functions of these types: each is made, and looked at, for itself. It is
# kept: what nobody holds TensorFlow forgets.
@functools.cache
def _failing(
    context: Any, arguments: tuple[int, ...], results: tuple[int, ...]
) -> AtomicFunction:
    definition = function_pb2.FunctionDef()
    outer = definition.signature
    types = repr((arguments, results)).encode()
    outer.name = NEVER + hashlib.sha256(types).hexdigest()
    outer.is_stateful = True
    for place, kind in enumerate(arguments):
        outer.input_arg.add(name=f"argument_{place}", type=kind)
    holds = definition.node_def.add(name="holds", op="Const")
    holds.attr["dtype"].type = types_pb2.DT_BOOL
    holds.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(False))
    fails = definition.node_def.add(name="fails", op="Assert")
    fails.input.extend(["holds:output:0", "holds:output:0"])
    fails.attr["T"].list.type.append(types_pb2.DT_BOOL)
    _runs(definition, "fails")
    for place, kind in enumerate(results):
        name = f"result_{place}"
        outer.output_arg.add(name=name, type=kind)
        made = definition.node_def.add(name=name, op="Placeholder", input=["^fails"])
        made.attr["dtype"].type = kind
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
