"""The graph of a functional model: its operations, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import keras

__all__ = [
    "Node",
    "functional_of",
    "is_overridden",
    "is_run_by_keras",
    "override_runs",
    "nodes_of",
    "run_nodes",
]

RUN = "_run_through_graph"


class Node(NamedTuple):
    """One call of an operation.

    Args:
      operation: a layer, or an operation of `keras.ops`.
      takes: symbolic tensors, by which the call knows its arguments.
      gives: symbolic tensors, one for each result.
      variables: that it is given beside tensors, as a tied table is.
      fill: (values by the ids of symbolic tensors) -> arguments and keyword arguments.
    """

    operation: Any
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]
    variables: tuple[keras.Variable, ...]
    fill: Callable[[Mapping[int, Any]], tuple[Any, Any]]


def functional_of(model: keras.Model) -> Any:
    """What runs the graph of a functional or built sequential model; None: no graph."""
    if isinstance(model, keras.Sequential):
        model = getattr(model, "_functional", None)
    if (
        model is None
        or not hasattr(model, RUN)
        or not hasattr(model, "_nodes_by_depth")
    ):
        return None
    return model


def is_run_by_keras(model: keras.Model) -> bool:
    """Whether `call` of its class is the one that Keras wrote."""
    return type(model).call.__module__.startswith("keras.src.")


def is_overridden(functional: Any) -> bool:
    """Whether `override_runs` was called for it."""
    return RUN in vars(functional)


def nodes_of(functional: Any) -> list[Node]:
    """In the order in which Keras runs them."""
    by_depth = functional._nodes_by_depth
    return [
        Node(
            node.operation,
            tuple(node.input_tensors),
            tuple(node.outputs),
            tuple(_variables_in(node.arguments)),
            node.arguments.fill_in,
        )
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def _variables_in(arguments: Any) -> list[keras.Variable]:
    flat = keras.tree.flatten((arguments.args, arguments.kwargs))
    return [value for value in flat if isinstance(value, keras.Variable)]


def run_nodes(
    nodes: Iterable[Node],
    values: dict[int, Any],
    operation_fn: Callable[[Any], Callable],
) -> None:
    """Runs them as Keras does, and adds what they give to `values`."""
    for node in nodes:
        args, kwargs = node.fill(values)
        results = operation_fn(node.operation)(*args, **kwargs)
        for symbol, value in zip(node.gives, keras.tree.flatten(results), strict=True):
            values[id(symbol)] = value


def override_runs(
    functional: Any, lead: Callable[[list[Any], Callable[[Any], Callable]], list[Any]]
) -> None:
    """Has `lead(inputs, operation_fn)` give the outputs where tensors are computed.

    Where Keras asks for shapes, or clones the model, its own code runs.
    """
    own = functional._run_through_graph

    def run(inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
        flat = keras.tree.flatten(inputs)
        is_symbolic = any(isinstance(value, keras.KerasTensor) for value in flat)
        if call_fn is not None or is_symbolic:
            return own(inputs, operation_fn, call_fn)
        outputs = lead(flat, operation_fn)
        return keras.tree.pack_sequence_as(functional._outputs_struct, outputs)

    # Past Keras' own __setattr__, which refuses changes after the build.
    vars(functional)[RUN] = run
