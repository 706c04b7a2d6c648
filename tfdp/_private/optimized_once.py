"""A function of the graph that TensorFlow's graph optimizer sees once for all calls.

TensorFlow optimizes a function that is not inlined when it is instantiated, once more
for each device that a call of it is placed on, and not with the graph around it. Here
its graph optimizer is asked before, as the converter to TFLite asks it; calls of what
comes back are told not to ask again. It lets Python run meanwhile, so that the step is
traced on.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

from tfdp._private.function_protos import (
    OPTIMIZED_ALREADY,
    AtomicFunction,
    attr_value_pb2,
    config_pb2,
    function_pb2,
    name_of,
)
from tfdp._private.names import eager_context

__all__ = [
    "begin_optimizing",
    "call_optimized",
    "optimized_once",
    "tell_shape",
]

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
SUFFIX = "_optimized_once"
# One function after the other, as before it worked beside Python.
_one_at_a_time = threading.Lock()

#: What the graph optimizer makes of a function and of those that it calls.
Library = list[function_pb2.FunctionDef]


def begin_optimizing(concrete: Any) -> concurrent.futures.Future[Library]:
    """Lets TensorFlow's graph optimizer work at `concrete`, a function for CPUs."""
    found: concurrent.futures.Future[Library] = concurrent.futures.Future()
    config = eager_context.context().config

    def optimize() -> None:
        try:
            with _one_at_a_time:
                graph = concrete.graph.as_graph_def()
                found.set_result(_optimized(concrete.function_def, graph, config))
        except BaseException as error:
            found.set_exception(error)

    # Not a daemon: at Python's end one that comes back from C++ would end the process.
    threading.Thread(target=optimize, name="tfdp-optimizer").start()
    return found


def optimized_once(
    concrete: Any, found: concurrent.futures.Future[Library]
) -> AtomicFunction | None:
    """`concrete`, as TensorFlow's graph optimizer leaves it.

    Args:
      found: what `begin_optimizing` said of it; waits for that.

    Returns:
      What `call_optimized` puts in its place; None: what came back is called otherwise.
    """
    definition = concrete.function_def
    try:
        library = found.result()
    except Exception as error:
        # It is faster with it, and as right without it.
        logging.getLogger("tfdp").debug("not optimized once for all: %r", error)
        return None
    known = {function.signature.name: function for function in library}
    name = next((n for n in known if n.startswith(definition.signature.name)), None)
    if name is None or not _is_called_alike(known[name], definition):
        return None
    context = eager_context.context()
    made = {}
    for function in library:
        made[function.signature.name] = _renamed(function, set(known))
    for function in made.values():
        if not context.has_function(function.signature.name):
            context.add_function_def(function)
    plain = concrete._inference_function
    children = [
        AtomicFunction(function.signature.name, context, None)
        for inner, function in made.items()
        if inner != name
    ]
    return AtomicFunction(
        made[name].signature.name,
        context,
        plain.function_type,
        children=children,
        call_options=plain.call_options,
        cached_graph=concrete.graph,
    )


def call_optimized(operation: tf.Operation, optimized: AtomicFunction) -> None:
    """Has a call of a function call what was `optimized` of it."""
    operation.graph._add_function_recursive(optimized)
    operation._set_attr("f", attr_value_pb2.AttrValue(func=name_of(optimized)))
    operation._set_attr("config_proto", OPTIMIZED_ALREADY)


def tell_shape(handle: tf.Tensor, variable: Any) -> None:
    """Has TensorFlow know within a function what shape the `handle` is of.

    Where it knows a shape it orders products otherwise, which is another last bit.
    """
    if handle.dtype != tf.resource or variable is None:
        return
    shapes = attr_value_pb2.AttrValue.ListValue(shape=[variable.shape.as_proto()])
    types = attr_value_pb2.AttrValue.ListValue(type=[variable.dtype.as_datatype_enum])
    handle.op._set_attr("_handle_shapes", attr_value_pb2.AttrValue(list=shapes))
    handle.op._set_attr("_handle_dtypes", attr_value_pb2.AttrValue(list=types))


def _optimized(
    definition: function_pb2.FunctionDef,
    graph: graph_pb2.GraphDef,
    context_config: config_pb2.ConfigProto,
) -> Library:
    """The function, and those that it calls, from a graph that only calls it."""
    caller = graph_pb2.GraphDef(versions=graph.versions)
    caller.library.CopyFrom(graph.library)
    function = caller.library.function.add()
    function.CopyFrom(definition)
    for node in function.node_def:
        # What is fused depends on the device.
        node.device = node.device or CPU
    signature = definition.signature
    arguments = []
    for place, argument in enumerate(signature.input_arg):
        node = caller.node.add(name=f"argument_{place}", op="FakeParam")
        node.attr["dtype"].type = argument.type
        node.attr["shape"].shape.unknown_rank = True
        arguments.append(node.name)
    call = caller.node.add(name="call", op="StatefulPartitionedCall", input=arguments)
    call.attr["Tin"].list.type.extend(a.type for a in signature.input_arg)
    call.attr["Tout"].list.type.extend(a.type for a in signature.output_arg)
    call.attr["f"].func.name = signature.name
    meta = meta_graph_pb2.MetaGraphDef(graph_def=caller)
    meta.collection_def["train_op"].node_list.value.append("call")
    config = config_pb2.ConfigProto()
    config.CopyFrom(context_config)
    config.graph_options.rewrite_options.min_graph_nodes = -1  # the caller is small
    device = device_properties_pb2.NamedDevice(name=CPU)
    device.properties.type = "CPU"
    cluster = grappler_cluster.Cluster(devices=[device])
    try:
        result = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster)
    finally:
        cluster.Shutdown()
    for function in result.library.function:
        for node in function.node_def:
            if node.device == CPU:
                node.device = ""
    return list(result.library.function)


def _is_called_alike(
    optimized: function_pb2.FunctionDef, plain: function_pb2.FunctionDef
) -> bool:
    for arguments in ("input_arg", "output_arg"):
        there = [a.type for a in getattr(optimized.signature, arguments)]
        if there != [a.type for a in getattr(plain.signature, arguments)]:
            return False
    return True


def _renamed(
    function: function_pb2.FunctionDef, known: set[str]
) -> function_pb2.FunctionDef:
    """`function` under a name of its own, and with calls of others under theirs."""
    made = function_pb2.FunctionDef()
    made.CopyFrom(function)
    made.signature.name += SUFFIX
    for node in made.node_def:
        for value in node.attr.values():
            called = [value.func] if value.HasField("func") else value.list.func
            for other in called:
                if other.name in known:
                    other.name += SUFFIX
    return made
