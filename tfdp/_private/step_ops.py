"""The ops of a function's graph, and the graphs of the functions that they call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

__all__ = [
    "CALLS",
    "MAY_CALL",
    "PYTHON",
    "called_graph",
    "given_to",
    "graphs_called",
    "is_compiled_by_xla",
    "is_resource",
    "names_called",
    "only_called",
    "operations_within",
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
