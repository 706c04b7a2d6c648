"""The ops of a function's graph, and the graphs of the functions that they call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_write_resource_inputs,
)

T = TypeVar("T")

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Op type -> attributes that name the functions it may call.
CALLED_BY = {
    **dict.fromkeys(CALLS, ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}
#: Op types with inner graphs.
MAY_CALL = frozenset(CALLED_BY)
#: Op types that call Python.
PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))


def called_graph(op: tf.Operation, attribute: str) -> Any:
    """The graph of the function in an op's `attribute`, or None."""
    return _graph_named(op.get_attr(attribute).name, op.graph)


def names_called(op: tf.Operation) -> Iterator[str]:
    """The names of all functions that `op` may call."""
    for attribute in CALLED_BY.get(op.type, ()):
        value = op.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            yield function.name


def graphs_called(op: tf.Operation) -> Iterator[Any]:
    """The available graphs of all functions that `op` may call."""
    graphs = (_graph_named(name, op.graph) for name in names_called(op))
    return (graph for graph in graphs if graph is not None)


def operations_within(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """`operations` and those of all functions they call, recursively, each once."""
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
            # An untraced function has none, such as those of TensorFlow's CTC loss.
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


def only_called(op: tf.Operation) -> Any:
    """The graph of the function if `op` is a plain function call; else None."""
    return called_graph(op, "f") if op.type in CALLS else None


def given_to(inner: Any, inputs: Sequence[T]) -> Sequence[T]:
    """The part of a call's `inputs` that the function of `inner` receives.

    The first input of a conditional is its condition.
    """
    return inputs[len(inputs) - len(inner.inputs) :]


def is_compiled_by_xla(op: tf.Operation) -> bool:
    """Whether `op` calls a `tf.function(jit_compile=True)`."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def is_resource(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a handle."""
    return tensor.dtype in (tf.resource, tf.variant)


#: Op types that change a variable by a value.
ADDS = frozenset(
    "AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd ResourceScatterSub "
    "ResourceScatterUpdate".split()
)
#: Op types that change a variable.
ASSIGNS = ADDS | {"AssignVariableOp"}
#: Op types that read only the shape of a tensor.
READ_SHAPES = frozenset("Rank Shape ShapeN Size".split())
#: Op types that draw new random numbers in each run.
DRAWS = frozenset(
    "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 "
    "RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform "
    "StatefulUniformInt TruncatedNormal".split()
)


def reads_only_shapes(
    originals: Sequence[tf.Tensor],
    copies: Sequence[tf.Tensor],
    operations: Iterable[tf.Operation],
) -> None:
    """Makes `operations` that read a copy's shape read the original's.

    A pending copy keeps the memory of its original. All are in one graph.
    """
    original_of = {id(c): o for c, o in zip(copies, originals, strict=True)}
    for operation in operations:
        if operation.type not in READ_SHAPES:
            continue
        for place, tensor in enumerate(operation.inputs):
            original = original_of.get(id(tensor))
            if original is not None and original.graph is operation.graph:
                operation._update_input(place, original)


def is_ordered_here() -> bool:
    """Whether TensorFlow will order side effects of the current graph."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "experimental_acd_manager", None) is not None


def unordered() -> set[tf.Operation]:
    """The ops of the current graph that TensorFlow will not order."""
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    return set(manager._independent_ops)


def has_effects(op: tf.Operation) -> bool:
    """Whether TensorFlow orders `op` even if it touches no resource."""
    return bool(op_is_stateful(op))


def touched_by(op: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The resource handles that `op` reads only, and those it may write."""
    reads, writes = get_read_write_resource_inputs(op)
    return list(reads), list(writes)


def run_behind(op: tf.Operation, before: Iterable[tf.Operation]) -> None:
    """Makes `op` wait for all of `before`."""
    op._add_control_inputs(list(before))


# Gradients of layers with weights larger than their activations come from these. Not
# convolutions: their larger activations would stay in memory, and their last bit was
# found to change, as the graph optimizer then fuses less.
DELAYED = frozenset("BatchMatMulV2 MatMul UnsortedSegmentSum".split())

# Op types with a result of the size of an input.
SAME_SIZE = frozenset("Cast EnsureShape Identity Mul RealDiv Reshape".split())


def delay(tensor: tf.Tensor, until: Sequence[tf.Tensor]) -> bool:
    """Delays the computation of `tensor` until all of `until` exist; whether it did.

    Only for matrix products and sums of embedding rows without consumers, so that
    nothing waits with it and no cycle arises: `until` must not depend on `tensor`. The
    delayed op is the one that allocates, not a cast or scaling of its result.
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


def order_of(op: tf.Operation) -> int:
    """A number that grows with each op that is built in a graph.

    TensorFlow's order of building; nothing public tells it without a list of all ops.
    """
    return int(op._id)
