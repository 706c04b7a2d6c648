"""Which numbers are a replica's share of the global loss already.

Wherever a replica's loss is brought to its share, it is multiplied by a factor that is
noted here: n_r / N, D_r / D, or 1 for a sum. A number that is made of such products, by
linear operations only, is a share: it must not be scaled again, its sum over the
replicas is the global number, and where it is reported the factor is taken back.

In a graph this is read off the operations; in eager mode a tape records what is made of
the factors.
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
from tfdp.tracing.replica_invariance import is_exchanged, outermost

LINEAR = {
    *("AddN", "AddV2", "Add", "Cast", "ConcatV2", "EnsureShape", "ExpandDims"),
    *("Identity", "IdentityN", "Mean", "Neg", "Pack", "Reshape", "Squeeze", "Sub"),
    *("StopGradient", "Sum"),
}
QUOTIENTS = {"RealDiv", "DivNoNan", "Div"}
# Their other inputs are axes and shapes.
FIRST_INPUT_ONLY = {"EnsureShape", "ExpandDims", "Mean", "Reshape", "Sum"}
# The name scope of what TensorFlow's tapes build.
GRADIENT_SCOPE = "gradient_tape"


class Standing(enum.Enum):
    """What a number is to the global loss.

    LOCAL: of this replica's rows, or of none. SHARE: this replica's part of a sum over
    replicas. REPORTED: a share of which the factor was taken back. MIXED: made of
    shares and of other numbers, or not linear in the shares, or it cannot be told.
    CONSTANT, of a term: a number other than 0, which moves no weight.
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
        # Made of no factor: by ways through gradients, and by others only.
        self._free: dict[bool, set[Any]] = {True: set(), False: set()}
        # Records what is made of the factors, in eager mode.
        self._tape: tf.GradientTape | None = None
        self._is_recording = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts in eager mode, what is made of the factors is recorded."""
        tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._tape, self._is_recording = tape, True
        try:
            with tape:
                yield
        finally:
            self._is_recording = False

    def factor(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """`value` as a factor that brings a loss to its share."""
        return self._note(self._factors, value, dtype)

    def report_factor(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """`value` as a factor that takes a share back, for a report."""
        return self._note(self._reports, value, dtype)

    def __bool__(self) -> bool:
        return bool(self._factors)

    def is_factor(self, tensor: tf.Tensor) -> bool:
        """Whether a loss is brought to its share by `tensor` itself."""
        return key_of(tensor) in self._factors

    def standing_of(self, value: Any) -> Standing:
        """What `value`, a tensor of the trace, is to the global loss."""
        if not tf.is_tensor(value) or not (self._factors or self._reports):
            return Standing.LOCAL
        if isinstance(value, tf.__internal__.EagerTensor):
            return self._standing_in_eager_mode(value)
        if self._is_made_of(value, self._reports):
            return Standing.REPORTED
        kinds = set(self._kinds_of_terms(value)) - {Standing.CONSTANT}
        if not kinds:
            return Standing.LOCAL
        return kinds.pop() if len(kinds) == 1 else Standing.MIXED

    def has_constant(self, value: tf.Tensor) -> bool:
        """Whether a term of `value`, a share in a graph, is a number other than 0."""
        is_eager = isinstance(value, tf.__internal__.EagerTensor)
        return not is_eager and Standing.CONSTANT in self._kinds_of_terms(value)

    def _note(
        self, noted: dict[Any, tf.Tensor], value: Any, dtype: tf.DType
    ) -> tf.Tensor:
        # A tensor of its own: what is multiplied by it is told by it.
        tensor = tf.identity(tf.cast(value, dtype))
        noted[key_of(tensor)] = tensor
        if self._is_recording and isinstance(tensor, tf.__internal__.EagerTensor):
            self._tape.watch(tensor)  # type: ignore[union-attr]
        return tensor

    def _kinds_of_terms(self, value: tf.Tensor) -> Iterator[Standing]:
        todo, seen = [value], set()
        # Of called functions that are looked into: their arguments, by key.
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
                yield Standing.LOCAL  # a sum over replicas, which is no part of one
                continue
            op, inputs = tensor.op, list(tensor.op.inputs)
            called = only_called(op)
            inner = None if called is None else called.outputs[tensor.value_index]
            if key_of(tensor) in given:
                todo.append(given[key_of(tensor)])
            # Once: of another call of the same function the arguments are others.
            elif inner is not None and key_of(inner) not in seen:
                arguments = given_to(called, inputs)
                given.update(zip(map(key_of, called.inputs), arguments, strict=True))
                todo.append(inner)
            elif op.type == "Const":
                if np.any(tf.get_static_value(tensor)):
                    yield Standing.CONSTANT
            elif op.type in QUOTIENTS and not self._is_made(inputs[1]):
                todo.append(inputs[0])
            elif op.type == "Mul":
                if any(map(self.is_factor, inputs)):
                    yield Standing.SHARE
                    continue
                made = [t for t in inputs if self._is_made(t)]
                if len(made) == 1:
                    todo += made
                else:
                    yield Standing.MIXED if made else Standing.LOCAL
            elif op.type == "SelectV2" and not self._is_made(inputs[0]):
                todo += inputs[1:]  # 0 on a replica without rows, for one
            elif op.type in LINEAR:
                todo += _terms_of(tensor)
            else:
                made_of_shares = self._is_made(tensor)
                yield Standing.MIXED if made_of_shares else Standing.LOCAL

    def is_share_made(self, value: tf.Tensor, *, by_gradients: bool = True) -> bool:
        """Whether any factor stands somewhere in `value`.

        Args:
          value: of a graph.
          by_gradients: also where `value` is made of rows that were moved by the sign
            of a loss' gradient (FGSM, PGD). Of a loss that is a share that is the sign
            of the global loss' gradient, and such rows are no part of a loss. What is
            made of a gradient otherwise may be another thing on each replica.
        """
        known_free = self._free[by_gradients]
        graphs = {id(factor.graph) for factor in self._factors.values()}
        # Of functions that are called: what they were given first, by argument.
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
                    # Of another call of the same function the arguments are others.
                    if given.setdefault(argument, one) is not one:
                        todo.append(one)
                inside.add(id(called))
            # What such an operation computes is not seen from outside.
            elif tensor.op.type in MAY_CALL and _may_hold(tensor.op, graphs):
                return True  # perhaps
            else:
                todo += goes_into(tensor)
        known_free |= visited
        return False

    def _is_made(self, value: tf.Tensor) -> bool:
        return self.is_share_made(value, by_gradients=False)

    def _is_made_of(self, value: tf.Tensor, noted: dict[Any, tf.Tensor]) -> bool:
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
        # What is linear in the factors and has no other term is the sum of its slopes.
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
    """Whether what `op` calls is, or calls, one of the graphs, named by their ids."""
    todo = [op]
    while todo:
        op = todo.pop()
        called = list(graphs_called(op))
        if len(called) < len(list(names_called(op))):
            return True  # perhaps: one is not known
        for graph in called:
            if id(graph) in graphs:
                return True
            todo += [one for one in graph.get_operations() if one.type in MAY_CALL]
    return False


def _is_sign_of_gradient(tensor: tf.Tensor) -> bool:
    """Whether it is the sign of a gradient by rows."""
    if tensor.op.type != "Sign":
        return False
    gradient = outermost(tensor.op.inputs[0])
    if gradient is None or isinstance(gradient, tf.__internal__.EagerTensor):
        return False
    if GRADIENT_SCOPE not in gradient.op.name.split("/"):
        return False
    # By a weight it is a part of a sum over the replicas, of the weight's shape.
    shape = gradient.shape
    return not shape.is_fully_defined() or not any(
        op.type == "ReadVariableOp" and op.outputs[0].shape == shape
        for op in gradient.graph.get_operations()
    )


def _terms_of(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """What a linear operation adds, or lays together, without its axes and shapes."""
    op, inputs = tensor.op, goes_into(tensor)
    if op.type in FIRST_INPUT_ONLY:
        return inputs[:1]
    return inputs[:-1] if op.type == "ConcatV2" else inputs


def key_of(tensor: tf.Tensor) -> Any:
    """What tells a tensor from all others of the trace."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return id(tensor)
    return id(tensor.graph), tensor.name


def ancestors(
    value: tf.Tensor,
    known: Collection[Any] = (),
    is_found: Callable[[tf.Tensor], bool] = lambda tensor: False,
    is_behind: Callable[[tf.Tensor], bool] = lambda tensor: False,
) -> Iterator[tf.Tensor]:
    """`value` and every tensor that it is made of, the nearest first, but for `known`.

    Arguments of an inner graph end the way unless it captured them, and so does what
    `is_behind` says.
    """
    seen, todo = set(), collections.deque([value])
    while todo:
        tensor = outermost(todo.popleft(), is_found)
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if key_of(tensor) in seen or key_of(tensor) in known or is_behind(tensor):
            continue
        seen.add(key_of(tensor))
        yield tensor
        todo.extend(goes_into(tensor))


def goes_into(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """What the operation behind `tensor`, of a graph, makes it of."""
    inputs = tensor.op.inputs
    # Each result is one input as it is: others stand beside it for their gradients.
    is_passed_on = tensor.op.type == "IdentityN"
    return [inputs[tensor.value_index]] if is_passed_on else inputs
