"""A function of the graph that several replicas call, each with its own variables.

Private are here: what a function captured being put in the place of something else,
the device of an operation taken away, and a graph's inner functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.names import graphs_inside, whole_of
from tfdp._private.step_ops import called_graph

__all__ = [
    "ExchangeInside",
    "TracedAlone",
    "are_alike",
    "have_one_content",
    "is_traced_alone",
    "trace_alone",
]

# TensorFlow then optimizes the body once for all who call, and does not put a copy of
# it into the place of each call.
NOT_INLINED = {"_noinline": True}
# Set on the graph of such a function while it is traced.
MARK = "_tfdp_traced_alone"


class ExchangeInside(Exception):
    """An exchange between replicas was about to be built into such a function."""


@dataclasses.dataclass(frozen=True)
class TracedAlone:
    """A function that was traced for one replica, in whose place others may call it.

    Args:
      function: TensorFlow's concrete one.
      captures: what it took from outside of it: mostly the replica's variables.
      signature: of its arguments.
    """

    function: Any
    captures: tuple[tf.Tensor, ...]
    signature: tuple[tf.TensorSpec, ...]

    def call(self, arguments: list[tf.Tensor], rank: int | None = None) -> None:
        """Adds a call to the graph: with its own captures, or those of `rank`."""
        captures = self.captures
        if rank is not None:
            captures = tuple(_of_rank(captured, rank) for captured in captures)
        self.function.set_external_captures(captures)
        self.function(*arguments)

    def takes(self, arguments: list[tf.Tensor]) -> bool:
        """Whether these are arguments of the types and shapes it was traced for."""
        return _signature_of(arguments) == self.signature


def trace_alone(
    function: Callable[[list[tf.Tensor]], None],
    arguments: list[tf.Tensor],
    device: str,
) -> TracedAlone:
    """`function(arguments)` as a function that does not name `device`, the replica's.

    Raises:
      ExchangeInside: when replicas exchange something in it.
    """

    def body(*inner: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        setattr(graph, MARK, True)
        with tf.device(None):
            function(list(inner))
        # What lay on this replica's device is to lie on that of whoever calls.
        for operation in graph.get_operations():
            if operation.device == device:
                operation._set_device("")

    signature = _signature_of(arguments)
    compiled = tf.function(body, autograph=False, experimental_attributes=NOT_INLINED)
    concrete = compiled.get_concrete_function(*signature)
    return TracedAlone(concrete, tuple(concrete.captured_inputs), signature)


def _signature_of(arguments: list[tf.Tensor]) -> tuple[tf.TensorSpec, ...]:
    return tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments)


def is_traced_alone() -> bool:
    """Whether what is built now goes into such a function."""
    return any(getattr(graph, MARK, False) for graph in graphs_inside(None))


def are_alike(first: TracedAlone, second: TracedAlone, rank: int) -> bool:
    """Whether `second`, traced for `rank`, is `first` with that replica's variables."""
    if first.signature != second.signature:
        return False
    if len(first.captures) != len(second.captures):
        return False
    for captured, other in zip(first.captures, second.captures, strict=True):
        # What is of the replica's own graph nobody else can be given.
        if not isinstance(captured, tf.__internal__.EagerTensor):
            return False
        if _of_rank(captured, rank) is not other:
            return False
    return have_one_content(first, second)


def have_one_content(first: TracedAlone, second: TracedAlone) -> bool:
    """Whether both do the same, with whatever they captured."""
    return _content_of(first.function.graph) == _content_of(second.function.graph)


def _of_rank(captured: tf.Tensor, rank: int) -> tf.Tensor:
    """The same variable's part on the replica `rank`; of others what came."""
    whole = whole_of(captured)
    return captured if whole is None else whole.values[rank].handle


def _content_of(graph: Any) -> list[Any]:
    """All that a graph does, without the names of operations and functions."""
    place = {op.name: i for i, op in enumerate(graph.get_operations())}
    return [_operation_content(op, place) for op in graph.get_operations()]


def _operation_content(operation: tf.Operation, place: dict[str, int]) -> Any:
    attributes = dict(operation.node_def.attr.items())
    beside = attributes.pop("_class", None)
    names = [] if beside is None else beside.list.s
    return (
        operation.type,
        operation.device,
        [(place[tensor.op.name], tensor.value_index) for tensor in operation.inputs],
        sorted(place[other.name] for other in operation.control_inputs),
        [place.get(name.decode().removeprefix("loc:@"), name) for name in names],
        {
            name: _attribute(operation, name, value)
            for name, value in attributes.items()
        },
    )


def _attribute(operation: tf.Operation, name: str, value: Any) -> Any:
    if value.WhichOneof("value") == "func":
        inner = called_graph(operation, name)
        if inner is not None:
            return _content_of(inner)
    return value.SerializeToString(deterministic=True)
