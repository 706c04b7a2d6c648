"""The ops of a function's graph, and the graphs of the functions that they call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_write_resource_inputs,
)

__all__ = [
    "ADDS",
    "ASSIGNS",
    "CALLS",
    "DRAWS",
    "MAY_CALL",
    "PYTHON",
    "reads_only_shapes",
    "called_graph",
    "delay",
    "given_to",
    "graphs_called",
    "has_effects",
    "is_compiled_by_xla",
    "is_ordered_here",
    "is_resource",
    "names_called",
    "only_called",
    "operations_within",
    "run_behind",
    "touched_by",
    "unordered",
]


T = TypeVar("T")

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# By the type of an operation: the attributes that name the functions it may call.
CALLED_BY = {
    **dict.fromkeys(CALLS, ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}
#: The types of those that hold graphs of their own.
MAY_CALL = frozenset(CALLED_BY)
#: The types of those that call Python.
PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))


def called_graph(op: tf.Operation, attribute: str) -> Any:
    """The graph of the function that an op's `attribute` names; None: it has none."""
    return _graph_named(op.get_attr(attribute).name, op.graph)


def names_called(op: tf.Operation) -> Iterator[str]:
    """The names of all functions that `op` may call."""
    for attribute in CALLED_BY.get(op.type, ()):
        value = op.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            yield function.name


def graphs_called(op: tf.Operation) -> Iterator[Any]:
    """The graphs of all functions that `op` may call, as far as they are known."""
    graphs = (_graph_named(name, op.graph) for name in names_called(op))
    return (graph for graph in graphs if graph is not None)


def operations_within(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Those, and those of all functions that they may call, however deep; each once."""
    todo, seen = [operations], set()
    while todo:
        for op in todo.pop():
            yield op
            for graph in graphs_called(op):
                if id(graph) not in seen:
                    seen.add(id(graph))
                    todo.append(graph.get_operations())


def _graph_named(name: str, graph: Any) -> Any:
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            # One that was not traced, such as those of TensorFlow's CTC loss, has none.
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


def only_called(op: tf.Operation) -> Any:
    """The graph of the function of which `op` is but a call; None: it is another op."""
    return called_graph(op, "f") if op.type in CALLS else None


def given_to(inner: Any, inputs: Sequence[T]) -> Sequence[T]:
    """Those of `inputs`, one for each of a call's, that the function of `inner` gets.

    Of a conditional the first one is its condition.
    """
    return inputs[len(inputs) - len(inner.inputs) :]


def is_compiled_by_xla(op: tf.Operation) -> bool:
    """Whether the function that `op` calls is `tf.function(jit_compile=True)`."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def is_resource(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a handle of something that lies elsewhere."""
    return tensor.dtype in (tf.resource, tf.variant)


# TensorFlow's operations by what they do, as the names of their types.


#: They change a variable by what they are given.
ADDS = frozenset(
    "AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd ResourceScatterSub "
    "ResourceScatterUpdate".split()
)
#: They change a variable.
ASSIGNS = ADDS | {"AssignVariableOp"}
#: They draw other numbers each time they run.
DRAWS = frozenset(
    "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 "
    "RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform "
    "StatefulUniformInt TruncatedNormal".split()
)


# Operations that ask of a tensor its shape alone.


ASK_SHAPES = frozenset("Rank Shape ShapeN Size".split())


def reads_only_shapes(
    originals: Sequence[tf.Tensor],
    copies: Sequence[tf.Tensor],
    operations: Iterable[tf.Operation],
) -> None:
    """Has `operations` that want a copy's shape ask the original, which is there first.

    A copy that waits keeps the memory of its original until it is made.

    Args:
      originals: tensors of a graph.
      copies: of each of them one, made in the same graph.
      operations: those that may be changed; the others keep their inputs.
    """
    original_of = {id(c): o for c, o in zip(copies, originals, strict=True)}
    for operation in operations:
        if operation.type not in ASK_SHAPES:
            continue
        for place, tensor in enumerate(operation.inputs):
            original = original_of.get(id(tensor))
            if original is not None and original.graph is operation.graph:
                operation._update_input(place, original)


# The order that TensorFlow gives to operations with side effects in a graph.
#
# What touches one resource, and what has effects but touches none, runs in the order in
# which it was built. TensorFlow adds the edges for it when a function has been traced.


def is_ordered_here() -> bool:
    """Whether TensorFlow will order effects of the graph that is being built."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "experimental_acd_manager", None) is not None


def unordered() -> set[tf.Operation]:
    """The operations of the graph being built that TensorFlow will not order."""
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    return set(manager._independent_ops)


def has_effects(op: tf.Operation) -> bool:
    """Whether TensorFlow orders `op` though it may touch no resource."""
    return bool(op_is_stateful(op))


def touched_by(op: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The handles of resources that `op` only reads, and that it may change."""
    reads, writes = get_read_write_resource_inputs(op)
    return list(reads), list(writes)


def run_behind(op: tf.Operation, before: Iterable[tf.Operation]) -> None:
    """Has `op` wait for all of `before`."""
    op._add_control_inputs(list(before))


# Tensors that are computed later than they could be: memory is free by then.


# Gradients of layers whose weights are large beside their activations are one of these.
# Before a convolution's the activations would have to wait, which are larger; and its
# last bit was found to change when it waits: the graph optimizer then fuses less.
DELAYED = frozenset("BatchMatMulV2 MatMul UnsortedSegmentSum".split())

# What makes of a tensor another one of its size.
SAME_SIZE = frozenset("Cast EnsureShape Identity Mul RealDiv Reshape".split())


def delay(tensor: tf.Tensor, until: Sequence[tf.Tensor]) -> bool:
    """Has `tensor` computed only when all of `until` are there.

    Nothing may use `tensor` yet, so nothing waits with it, and no two can wait for each
    other. The operation that takes the memory is delayed: not one that casts or scales
    its result.

    Args:
      tensor: of the graph that is being built.
      until: of the same graph; they must not be made from `tensor`.

    Returns:
      Whether it was done: only for a product of matrices, or the sum of an embedding's
      rows, that is not used yet.
    """
    operation = tensor.op
    if _uses(operation):
        return False
    while operation.type in SAME_SIZE:
        largest = max(operation.inputs, key=lambda t: t.shape.num_elements() or 0)
        if _uses(largest.op) != 1:
            break
        operation = largest.op
    if operation.type not in DELAYED:
        return False
    operation._add_control_inputs([other.op for other in until])
    return True


def _uses(operation: tf.Operation) -> int:
    consumers = sum(len(output.consumers()) for output in operation.outputs)
    return consumers + len(operation._control_outputs)
