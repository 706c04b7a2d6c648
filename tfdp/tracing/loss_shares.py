"""Tracks which numbers are a replica's share of the global loss.

Each scaling of a loss multiplies it by a factor that is recorded here: n_r / N,
D_r / D, or 1 for a sum. A linear function of such products is a share: it must not be
scaled again, its sum over the replicas is the global number, and reports take the
factor back. Graphs show this in their ops; in eager mode a tape records it.
"""

from __future__ import annotations

import collections
import contextlib
import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private.step_ops import (
    MAY_CALL,
    given_to,
    graphs_called,
    names_called,
    only_called,
)
from tfdp.tracing.replica_invariance import is_exchanged, key_of, outermost

LINEAR = {
    *("AddN", "AddV2", "Add", "Cast", "ConcatV2", "Identity", "IdentityN", "Neg"),
    *("Pack", "Squeeze", "StopGradient", "Sub"),
}
QUOTIENTS = {"RealDiv", "DivNoNan", "Div"}
# Linear as well; their other inputs are axes and shapes.
FIRST_INPUT_ONLY = {"EnsureShape", "ExpandDims", "Mean", "Reshape", "Sum"}
# The name scope of ops that TensorFlow's tapes build.
GRADIENT_SCOPE = "gradient_tape"


class Standing(enum.Enum):
    """How a number relates to the global loss.

    LOCAL: depends on this replica's rows, or on none. SHARE: its part of a sum over
    replicas. REPORTED: a share without its factor. MIXED: both, or not linear
    in the shares, or unknown. CONSTANT, of a term: a number other than 0.
    """

    LOCAL = "local"
    SHARE = "share"
    REPORTED = "reported"
    MIXED = "mixed"
    CONSTANT = "constant"


class LossShares:
    """The factors that one replica's trace multiplied losses by."""

    def __init__(self) -> None:
        self._factors: dict[Any, tf.Tensor] = {}
        self._reports: dict[Any, tf.Tensor] = {}
        # Keys that depend on no factor: with and without paths through gradients.
        self._free: dict[bool, set[Any]] = {True: set(), False: set()}
        # Eager mode: records what depends on the factors.
        self._tape: tf.GradientTape | None = None
        self._is_recording = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within this, eager mode records what depends on the factors."""
        tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._tape, self._is_recording = tape, True
        try:
            with tape:
                yield
        finally:
            self._is_recording = False

    def factor(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """`value` as a factor that scales a loss to its share."""
        return self._note(self._factors, value, dtype)

    def report_factor(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """`value` as a factor that takes a share back for a report."""
        return self._note(self._reports, value, dtype)

    def __bool__(self) -> bool:
        return bool(self._factors)

    def is_factor(self, tensor: tf.Tensor) -> bool:
        return key_of(tensor) in self._factors

    def standing_of(self, value: Any) -> Standing:
        if not tf.is_tensor(value) or not (self._factors or self._reports):
            return Standing.LOCAL
        if isinstance(value, tf.__internal__.EagerTensor):
            return self._standing_in_eager_mode(value)
        if self._is_product_with(value, self._reports):
            return Standing.REPORTED
        kinds = set(self._kinds_of_terms(value)) - {Standing.CONSTANT}
        if not kinds:
            return Standing.LOCAL
        return kinds.pop() if len(kinds) == 1 else Standing.MIXED

    def has_constant(self, value: tf.Tensor) -> bool:
        """Whether a term of `value`, a share in a graph, is a nonzero constant."""
        is_eager = isinstance(value, tf.__internal__.EagerTensor)
        return not is_eager and Standing.CONSTANT in self._kinds_of_terms(value)

    def _note(
        self, noted: dict[Any, tf.Tensor], value: Any, dtype: tf.DType
    ) -> tf.Tensor:
        # A new tensor, so that products with it can be identified.
        tensor = tf.identity(tf.cast(value, dtype))
        noted[key_of(tensor)] = tensor
        if self._is_recording and isinstance(tensor, tf.__internal__.EagerTensor):
            self._tape.watch(tensor)  # type: ignore[union-attr]
        return tensor

    def _kinds_of_terms(self, value: tf.Tensor) -> Iterator[Standing]:
        todo, seen = [value], set()
        # The arguments of called functions that are followed, by key.
        given: dict[Any, tf.Tensor] = {}
        while todo:
            tensor = outermost(todo.pop(), lambda tensor: key_of(tensor) in given)
            if tensor is None:
                yield Standing.LOCAL
                continue
            if key_of(tensor) in seen:
                continue
            seen.add(key_of(tensor))
            if is_exchanged(tensor):
                yield Standing.LOCAL  # a sum over replicas is no share
                continue
            op, inputs = tensor.op, list(tensor.op.inputs)
            called = only_called(op)
            inner = None if called is None else called.outputs[tensor.value_index]
            if key_of(tensor) in given:
                todo.append(given[key_of(tensor)])
            # Only once: another call of the same function has other arguments.
            elif inner is not None and key_of(inner) not in seen:
                arguments = given_to(called, inputs)
                given.update(zip(map(key_of, called.inputs), arguments, strict=True))
                todo.append(inner)
            elif op.type == "Const":
                if np.any(tf.get_static_value(tensor)):
                    yield Standing.CONSTANT
            elif op.type in QUOTIENTS and not self._depends_on_factor(inputs[1]):
                todo.append(inputs[0])
            elif op.type == "Mul":
                if any(map(self.is_factor, inputs)):
                    yield Standing.SHARE
                    continue
                made = [t for t in inputs if self._depends_on_factor(t)]
                if len(made) == 1:
                    todo += made
                else:
                    yield Standing.MIXED if made else Standing.LOCAL
            elif op.type == "SelectV2" and not self._depends_on_factor(inputs[0]):
                todo += inputs[1:]  # such as 0 on a replica without rows
            elif op.type in FIRST_INPUT_ONLY:
                todo += inputs[:1]
            elif op.type in LINEAR:
                todo += inputs[:-1] if op.type == "ConcatV2" else inputs_of(tensor)
            else:
                stored_from_shares = self._depends_on_factor(tensor)
                yield Standing.MIXED if stored_from_shares else Standing.LOCAL

    def depends_on_factor(self, value: tf.Tensor, *, by_gradients: bool = True) -> bool:
        """Whether `value`, of a graph, depends on any factor.

        With `by_gradients` also through rows moved by the sign of a loss' gradient
        (FGSM, PGD): that of a share's gradient is that of the global loss, and such
        rows are no part of a loss. Other functions of gradients may differ by replica.
        """
        known_free = self._free[by_gradients]
        graphs = {id(factor.graph) for factor in self._factors.values()}
        # The first arguments of called functions, by parameter.
        given: dict[Any, tf.Tensor] = {}
        inside: set[int] = set()
        seen, todo, visited = set(), [value], set()
        while todo:
            tensor = outermost(todo.pop(), lambda tensor: key_of(tensor) in given)
            if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
                continue
            key = key_of(tensor)
            if key in seen or key in known_free or is_exchanged(tensor):
                continue
            if not by_gradients and _is_sign_of_gradient(tensor):
                continue
            seen.add(key)
            called = only_called(tensor.op)
            if self.is_factor(tensor):
                return True
            if id(tensor.graph) not in inside:
                visited.add(key)
            if key in given:
                todo.append(given[key])
            elif called is not None:
                arguments = given_to(called, tensor.op.inputs)
                todo.append(called.outputs[tensor.value_index])
                of = zip(map(key_of, called.inputs), arguments, strict=True)
                for argument, one in of:
                    # Another call of the same function has other arguments.
                    if given.setdefault(argument, one) is not one:
                        todo.append(one)
                inside.add(id(called))
            # The body of such an op cannot be followed.
            elif tensor.op.type in MAY_CALL and _may_hold(tensor.op, graphs):
                return True  # possibly
            else:
                todo += inputs_of(tensor)
        known_free |= visited
        return False

    def _depends_on_factor(self, value: tf.Tensor) -> bool:
        return self.depends_on_factor(value, by_gradients=False)

    def _is_product_with(self, value: tf.Tensor, noted: dict[Any, tf.Tensor]) -> bool:
        """Whether `value` is a product with one of `noted`, perhaps reshaped."""
        tensor = outermost(value)
        while tensor is not None and tensor.op.type in ("Cast", "Identity", "Reshape"):
            tensor = outermost(tensor.op.inputs[0])
        if tensor is None or tensor.op.type != "Mul":
            return False
        return any(key_of(factor) in noted for factor in tensor.op.inputs)

    def _standing_in_eager_mode(self, value: tf.Tensor) -> Standing:
        if self._tape is None:
            return Standing.LOCAL
        total = tf.reduce_sum(value)
        paused = self._tape.stop_recording if self._is_recording else None
        with paused() if paused else contextlib.nullcontext():
            reports = self._slopes(value, self._reports)
            if reports:
                return Standing.REPORTED
            slopes = self._slopes(value, self._factors)
        if not slopes:
            return Standing.LOCAL
        shares = sum(float(f) * float(slope) for f, slope in slopes)
        # If it is linear in the factors without other terms, it equals the slopes' sum.
        size = sum(abs(float(f) * float(slope)) for f, slope in slopes)
        is_share = not np.isfinite(shares) or abs(shares - float(total)) <= 1e-5 * size
        return Standing.SHARE if is_share else Standing.MIXED

    def _slopes(
        self, value: tf.Tensor, noted: dict[Any, tf.Tensor]
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        factors = list(noted.values())
        slopes = self._tape.gradient(value, factors)  # type: ignore[union-attr]
        pairs = zip(factors, slopes, strict=True)
        return [(factor, slope) for factor, slope in pairs if slope is not None]


def _may_hold(op: tf.Operation, graphs: Collection[int]) -> bool:
    """Whether `op` calls, directly or not, a graph with one of these ids."""
    todo = [op]
    while todo:
        op = todo.pop()
        called = list(graphs_called(op))
        if len(called) < len(list(names_called(op))):
            return True  # possibly: one callee is unknown
        for graph in called:
            if id(graph) in graphs:
                return True
            todo += [one for one in graph.get_operations() if one.type in MAY_CALL]
    return False


def _is_sign_of_gradient(tensor: tf.Tensor) -> bool:
    """Whether it is the sign of a gradient with respect to rows."""
    if tensor.op.type != "Sign":
        return False
    gradient = outermost(tensor.op.inputs[0])
    if gradient is None or isinstance(gradient, tf.__internal__.EagerTensor):
        return False
    if GRADIENT_SCOPE not in gradient.op.name.split("/"):
        return False
    # A gradient with respect to a weight is a partial sum, of the weight's shape.
    shape = gradient.shape
    return not shape.is_fully_defined() or not any(
        op.type == "ReadVariableOp" and op.outputs[0].shape == shape
        for op in gradient.graph.get_operations()
    )


def ancestors(
    value: tf.Tensor,
    is_found: Callable[[tf.Tensor], bool] = lambda tensor: False,
    is_behind: Callable[[tf.Tensor], bool] = lambda tensor: False,
) -> Iterator[tf.Tensor]:
    """`value` and its ancestors, breadth first, up to arguments of an inner graph that
    are no captures, and without those that `is_behind`."""
    seen, todo = set(), collections.deque([value])
    while todo:
        tensor = outermost(todo.popleft(), is_found)
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if key_of(tensor) not in seen and not is_behind(tensor):
            seen.add(key_of(tensor))
            yield tensor
            todo.extend(inputs_of(tensor))


def inputs_of(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """The inputs of the op that `tensor`, of a graph, depends on."""
    inputs = tensor.op.inputs
    # Each output is one input; the others are there for custom gradients.
    is_passed_on = tensor.op.type == "IdentityN"
    return [inputs[tensor.value_index]] if is_passed_on else inputs
