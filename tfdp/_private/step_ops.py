"""The ops of a function's graph, and the graphs of the functions that they call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["called_graph", "captures_of", "is_resource"]


def called_graph(op: tf.Operation, attribute: str) -> Any:
    """The graph of the function that an op's `attribute` names; None: it has none."""
    name = op.get_attr(attribute).name
    graph = op.graph
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function.graph
        graph = getattr(graph, "outer_graph", None)
    return None


def captures_of(graph: Any) -> list[tuple[Any, Any]]:
    """What a function's graph took from outside: (the value there, its input)."""
    return list(graph.captures)


def is_resource(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a handle of something that lies elsewhere."""
    return tensor.dtype in (tf.resource, tf.variant)
