"""The graph of a functional model: its operations, and how to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import keras

from tfdp.seams.replace import is_replaced, replace

RUN = "_run_through_graph"


class OperationCall(NamedTuple):
    """One call of an operation."""

    operation: Any  # a layer, or an operation of `keras.ops`
    takes: tuple[Any, ...]  # symbolic input tensors
    gives: tuple[Any, ...]  # symbolic output tensors
    variables: tuple[keras.Variable, ...]  # in the arguments, such as a tied table
    # (values by ids of symbolic tensors) -> args and kwargs
    fill: Callable[[Mapping[int, Any]], tuple[Any, Any]]


def functional_of(model: keras.Model) -> Any:
    """The functional graph of a functional or built sequential model; else None."""
    if isinstance(model, keras.Sequential):
        model = getattr(model, "_functional", None)
    has_graph = hasattr(model, RUN) and hasattr(model, "_nodes_by_depth")
    return model if has_graph else None


def is_run_by_keras(model: keras.Model) -> bool:
    """Whether the class has Keras' own `call`."""
    return type(model).call.__module__.startswith("keras.src.")


def is_overridden(functional: Any) -> bool:
    """Whether `override_runs` was called for it."""
    return is_replaced(functional, RUN)


def overridden_for(functional: Any) -> str:
    """The function that `override_runs` was called for; "" if it was not."""
    return getattr(getattr(functional, RUN), "_made_for", "")


def nodes_of(functional: Any) -> list[OperationCall]:
    """The nodes in the order in which Keras runs them."""
    by_depth = functional._nodes_by_depth
    nodes = [n for depth in sorted(by_depth, reverse=True) for n in by_depth[depth]]
    return [_node_of(n) for n in nodes if n.operation and not n.is_input]


def _node_of(node: Any) -> OperationCall:
    arguments, takes = node.arguments, tuple(node.input_tensors)
    flat = keras.tree.flatten((arguments.args, arguments.kwargs))
    variables = tuple(value for value in flat if isinstance(value, keras.Variable))
    return OperationCall(
        node.operation, takes, tuple(node.outputs), variables, arguments.fill_in
    )


def values_of(functional: Any, inputs: Iterable[Any]) -> dict[int, Any]:
    """The inputs of a call by the ids of their symbolic tensors."""
    pairs = zip(functional.inputs, inputs, strict=True)
    return {id(symbol): value for symbol, value in pairs}


def outputs_in(functional: Any, values: dict[int, Any]) -> list[Any]:
    """The outputs among such values."""
    return [values[id(symbol)] for symbol in functional.outputs]


def run_nodes(
    nodes: Iterable[OperationCall],
    values: dict[int, Any],
    operation_fn: Callable[[Any], Callable],
) -> None:
    """Runs nodes as Keras does, adding their results to `values`."""
    for node in nodes:
        args, kwargs = node.fill(values)
        results = operation_fn(node.operation)(*args, **kwargs)
        for symbol, value in zip(node.gives, keras.tree.flatten(results), strict=True):
            values[id(symbol)] = value


def override_runs(
    functional: Any,
    run: Callable[[list[Any], Callable[[Any], Callable]], list[Any]],
    made_for: str,
) -> None:
    """Makes `run(inputs, operation_fn)` compute the outputs of real tensors.

    For symbolic tensors, or when Keras clones the model, its own code runs.
    `made_for`: the function that was called for it, in words.
    """
    own = functional._run_through_graph

    def run_graph(
        inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None
    ) -> Any:
        flat = keras.tree.flatten(inputs)
        is_symbolic = any(isinstance(value, keras.KerasTensor) for value in flat)
        if call_fn is not None or is_symbolic:
            return own(inputs, operation_fn, call_fn)
        outputs = run(flat, operation_fn)
        return keras.tree.pack_sequence_as(functional._outputs_struct, outputs)

    run_graph._made_for = made_for  # type: ignore[attr-defined]
    replace(functional, RUN, run_graph)
