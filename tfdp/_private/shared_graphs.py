"""A function of the graph that several replicas call, each with its own variables.

Private are here: what a function captured being put in the place of something else,
the device of an operation taken away, how a call is optimized, who asks for its
replica, and a graph's inner functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.function_protos import NOT_INLINED
from tfdp._private.names import eager_context, whole_of
from tfdp._private.op_types import ASSIGNS
from tfdp._private.optimized_once import (
    begin_optimizing,
    call_optimized,
    optimized_once,
    tell_shape,
)
from tfdp._private.shared_calls import SharedCall
from tfdp._private.step_ops import (
    CALLS,
    MAY_CALL,
    called_graph,
    graphs_called,
    names_called,
)
from tfdp._private.traced_alone import mark_traced_alone, refuse_variable

__all__ = [
    "AsksForItsReplica",
    "LaterChanges",
    "TracedAlone",
    "are_alike",
    "have_one_content",
    "can_be_repeated",
    "is_shown_by_one",
    "nobody_asks_for_the_replica",
    "trace_alone",
]

# Operations that keep something, and keep it in what they are given.
OF_VARIABLES = {
    *("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"),
    *("Assert", *ASSIGNS),
}
# One with `Case` that keeps something is built by each replica.
KNOWN_CALLS = MAY_CALL.difference(("Case", "StatelessCase"))


class LaterChanges:
    """What is still to be changed in a graph when functions have been optimized.

    Args:
      graph: of a step. What is built into a graph within, such as a branch, is changed
        at once: when the branch is built, it is as it is. None: everything is.
    """

    def __init__(self, graph: Any):
        self._graph = graph
        self._changes: list[Callable[[], None]] = []

    def add(self, change: Callable[[], None]) -> None:
        """Makes a change of the graph being built, by `make` at the latest."""
        if tf.compat.v1.get_default_graph() is self._graph:
            self._changes.append(change)
        else:
            change()

    def make(self) -> None:
        """Makes all changes: the graph is about to be finished."""
        while self._changes:
            self._changes.pop(0)()


@dataclasses.dataclass(frozen=True)
class TracedAlone:
    """A function that was traced for one replica, in whose place others may call it.

    Args:
      function: TensorFlow's concrete one.
      captures: what it took from outside of it: mostly the replica's variables.
      signature: of its arguments.
      own: what the replica has of its own in the graph outside, such as its batch.
    """

    function: Any
    captures: tuple[tf.Tensor, ...]
    signature: tuple[tf.TensorSpec, ...]
    own: tuple[tf.Tensor, ...] = ()

    @functools.cached_property
    def _optimizing(self) -> Any:
        return begin_optimizing(self.function)

    @functools.cached_property
    def optimized(self) -> Any:
        """What stands for it in calls; None: TensorFlow optimizes each by itself."""
        return optimized_once(self.function, self._optimizing)

    @functools.cached_property
    def _shared_call(self) -> SharedCall | None:
        outputs = self.function.graph.outputs
        # What is behind these a conditional does not say.
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in outputs):
            return None
        return SharedCall(self.function)

    def call(
        self,
        arguments: Sequence[tf.Tensor],
        rank: int | None = None,
        own: Sequence[tf.Tensor] = (),
        *,
        looked_into: bool = True,
        is_run: bool = True,
        changes: LaterChanges | None = None,
    ) -> Any:
        """Adds a call to the graph.

        Args:
          arguments: of the function.
          rank: whose variables it is called with; None: those that it captured.
          own: what the replica has in the place of what is its own.
          looked_into: whether TensorFlow's graph optimizer may look into the function
            at each call, which may take as long as to optimize all else.
          is_run: False for what is only looked at: nobody optimizes that.
          changes: takes down what to do when the function is optimized; None: now.
        """
        captures = self.captures
        if rank is not None:
            captures = tuple(_of_rank(c, rank, self.own, own) for c in captures)
        changes = changes or LaterChanges(None)
        if is_run:
            _ = self._optimizing  # has begun, then
        token = next((c for c in captures if c.dtype == tf.resource), None)
        # A conditional's inputs lie on one device: no tables or writers of the host.
        is_own = all(
            c.dtype != tf.resource or whole_of(c) is not None for c in captures
        )
        is_hidden = is_run and not looked_into and token is not None and is_own
        if is_hidden and self._shared_call is not None:
            shared = self._shared_call
            results, call = shared.add([*arguments, *captures], token)
            changes.add(lambda: shared.call_optimized(call, self.optimized))
            return results
        self.function.set_external_captures(captures)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        results = self.function(*arguments)
        calls = [
            operation
            for operation in graph.get_operations()[before:]
            if is_run and operation.type in CALLS
        ]
        changes.add(lambda: self._optimize(calls))
        return results

    def _optimize(self, calls: Sequence[tf.Operation]) -> None:
        for call in calls:
            if self.optimized is not None:
                call_optimized(call, self.optimized)

    def takes(
        self, arguments: Sequence[tf.Tensor], own: Sequence[tf.Tensor] = ()
    ) -> bool:
        """Whether these are tensors of the types and shapes it was traced for."""
        return (
            _signature_of(arguments) == self.signature
            and _signature_of(own) == _signature_of(self.own)
            # The same tensor may come twice, as the input and the target.
            and _places(own, own) == _places(self.own, self.own)
        )


def trace_alone(
    function: Callable[[list[tf.Tensor]], Any],
    arguments: Sequence[tf.Tensor],
    device: str,
    own: Sequence[tf.Tensor] = (),
) -> TracedAlone:
    """`function(arguments)` as a function that does not name `device`, the replica's.

    Raises:
      ExchangeInside: when replicas exchange something in it, or it makes a variable.
    """

    def body(*inner: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        mark_traced_alone(graph)
        # By the device outside of graphs TensorFlow tells for which replica it has
        # traced a `tf.function` that is called here, and captured its variables.
        with (
            tf.device(None),
            eager_context.device(device),
            tf.variable_creator_scope(refuse_variable),
        ):
            results = function(list(inner))
        # What lay on this replica's device is to lie on that of whoever calls.
        for operation in graph.get_operations():
            if operation.device == device:
                operation._set_device("")
        for captured, inside in graph.captures:
            tell_shape(inside, whole_of(captured))
        return results

    signature = _signature_of(arguments)
    compiled = tf.function(body, autograph=False, experimental_attributes=NOT_INLINED)
    concrete = compiled.get_concrete_function(*signature)
    captures = tuple(concrete.captured_inputs)
    return TracedAlone(concrete, captures, signature, tuple(own))


def can_be_repeated(traced: TracedAlone) -> bool:
    """Whether other calls of it do what other traces of it would have done.

    Not where an operation keeps something of its own, such as the state of a random
    generator, or where replicas share what they change.
    """
    for captured in traced.captures:
        if captured.dtype == tf.resource and whole_of(captured) is None:
            return False
    return _keeps_nothing(traced.function.graph)


def _keeps_nothing(graph: Any) -> bool:
    for operation in graph.get_operations():
        if operation.type in KNOWN_CALLS:
            inner = list(graphs_called(operation))
            are_known = len(inner) == len(list(names_called(operation)))
            if not are_known or not all(map(_keeps_nothing, inner)):
                return False
        known = operation.type in KNOWN_CALLS or operation.type in OF_VARIABLES
        if operation.op_def.is_stateful and not known:
            return False
    return True


class AsksForItsReplica(Exception):
    """What is traced asked which replica it is."""


@contextlib.contextmanager
def nobody_asks_for_the_replica() -> Iterator[None]:
    """While this lasts, who asks which replica it is meets an error.

    What Python decides by the answer is not seen in the graph.

    Raises:
      AsksForItsReplica: somebody has asked, also where that error was caught.
    """
    context: Any = tf.distribute.get_replica_context()
    plain = type(context)
    asked = []

    def refuse(self: Any) -> Any:
        asked.append(True)
        raise AsksForItsReplica

    led = {"replica_id_in_sync_group": property(refuse), "__slots__": ()}
    context.__class__ = type(plain.__name__, (plain,), led)
    try:
        yield
    finally:
        context.__class__ = plain
    if asked:
        raise AsksForItsReplica


def _places(tensors: Sequence[tf.Tensor], among: Sequence[tf.Tensor]) -> list[int]:
    return [_place(tensor, among) for tensor in tensors]


def _place(tensor: tf.Tensor, among: Sequence[tf.Tensor]) -> int:
    """The place of this very tensor; -1: it is not there."""
    return next((i for i, other in enumerate(among) if other is tensor), -1)


def _signature_of(arguments: Sequence[tf.Tensor]) -> tuple[tf.TensorSpec, ...]:
    return tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments)


def is_shown_by_one(
    traced: TracedAlone, rank: int, common: Sequence[tf.Tensor]
) -> bool:
    """Whether `traced`, built by known code, says what that builds for the others.

    Known code asks for its replica, which nobody can meanwhile, or uses what is the
    replica's own. So it does where that is known of each tensor that was captured.

    Args:
      traced: while nobody could ask for the replica.
      rank: of the replica.
      common: tensors that all replicas have in common.
    """
    for captured in traced.captures:
        if max(_place(captured, traced.own), _place(captured, common)) >= 0:
            continue
        whole = whole_of(captured)
        if whole is None or whole.values[rank].handle is not captured:
            return False
        kinds = [(copy.shape, copy.dtype) for copy in whole.values]
        if any(kind != kinds[0] for kind in kinds):
            return False
    return can_be_repeated(traced)


def are_alike(first: TracedAlone, second: TracedAlone, rank: int) -> bool:
    """Whether `second`, traced for `rank`, is `first` with that replica's variables."""
    if first.signature != second.signature or len(first.own) != len(second.own):
        return False
    if len(first.captures) != len(second.captures):
        return False
    for captured, other in zip(first.captures, second.captures, strict=True):
        if _of_rank(captured, rank, first.own, second.own) is not other:
            return False
    return have_one_content(first, second)


def have_one_content(first: TracedAlone, second: TracedAlone) -> bool:
    """Whether both do the same, with whatever they captured."""
    return _content_of(first.function.graph) == _content_of(second.function.graph)


def _of_rank(
    captured: tf.Tensor,
    rank: int,
    own_of_first: Sequence[tf.Tensor],
    own: Sequence[tf.Tensor],
) -> tf.Tensor:
    """What the replica `rank` has in the place of `captured`; if nothing, what came."""
    place = _place(captured, own_of_first)
    if place >= 0:
        return own[place]
    whole = whole_of(captured)
    return captured if whole is None else whole.values[rank].handle


def _content_of(graph: Any) -> list[Any]:
    """All that a graph does, without the names of operations and functions."""
    place = {op.name: i for i, op in enumerate(graph.get_operations())}
    return [_operation_content(op, place) for op in graph.get_operations()]


def _operation_content(operation: tf.Operation, place: dict[str, int]) -> Any:
    attributes = dict(operation.node_def.attr.items())
    attributes.pop("_user_specified_name", None)  # that of what was captured
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
