"""Follows an axis of features through ops that treat its entries one by one.

Stricter than the analysis of rows, which warns: here every op must be one of those
below, and what it joins with the features must be the same for each row and feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import module_of_gradient

#: Ops of one tensor that treat each entry by itself.
UNARY = frozenset(
    "Abs Neg Exp Expm1 Log Log1p Sqrt Rsqrt Square Reciprocal Inv Tanh Sigmoid Relu "
    "Relu6 Elu Selu LeakyRelu Softplus Softsign Erf Erfc Sin Cos Sign Round Floor Ceil "
    "Cast Identity StopGradient PreventGradient Snapshot CheckNumerics ZerosLike "
    "OnesLike IsNan IsInf IsFinite LogicalNot".split()
)
#: Ops of several tensors that do, with broadcasting.
ENTRYWISE = frozenset(
    "Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan Maximum Minimum Pow AddN "
    "SquaredDifference Greater GreaterEqual Less LessEqual Equal NotEqual LogicalAnd "
    "LogicalOr SelectV2 ClipByValue".split()
)
#: Draws, independent for each entry, of the shape that is their first input.
DRAWS = frozenset("StatelessRandomUniformV2 StatelessRandomNormalV2".split())
#: Where a gradient of its own is known: `tf.nn.silu` has one to save memory.
GRADIENTS = "tensorflow.python.ops.nn_impl"


@dataclasses.dataclass(frozen=True)
class Features:
    """A tensor of which an axis has features.

    Args:
      axis: that axis, counted from the last, -1.
      sources: where they come from.
      is_shape: whether it is the shape of such a tensor.
    """

    axis: int
    sources: frozenset[Any]
    is_shape: bool = False


class Entrywise:
    """The features that come out of sources, entry by entry, in a function's graph.

    Args:
      graph: of a function, traced with whole features; the number of rows and that of
        features, in the sources, are unknown: neither can become a constant.
      sources: by the names of tensors: their features.
      ends: the names of tensors behind which nothing is followed.
      may_draw: whether replicas draw different numbers: else all parts of the features
        would get the same ones.
    """

    def __init__(
        self,
        graph: Any,
        sources: Mapping[str, Features],
        ends: Collection[str],
        may_draw: bool = True,
    ):
        self._draws = DRAWS if may_draw else frozenset()
        self._features: dict[str, Features] = {}
        #: By the names of ends: the features that have come there.
        self.reached: dict[str, Features] = {}
        #: Sources of which something else is computed, or returned.
        self.lost: set[Any] = set()
        # Replicas have the same values of weights, and of what is computed from them;
        # not of their batches, of draws, and of the state that they keep.
        weights = set(_handles(graph))
        self._differs = {t.name for t in graph.inputs if t.name not in weights}
        for op in graph.get_operations():
            name = op.outputs[0].name if op.outputs else "no output"
            if name in sources:
                self._features[name] = sources[name]
                self._differs.add(name)
                continue
            self._follow(op)
            if name in ends and name in self._features:
                self.reached[name] = self._features.pop(name)
        self._lose([output.name for output in graph.outputs])

    def sources_of(self, names: Iterable[str]) -> set[Any]:
        """The sources of which features are in the tensors with these names."""
        found = (self._features.get(name) for name in names)
        return {source for one in found if one is not None for source in one.sources}

    def _follow(self, op: tf.Operation) -> None:
        names = [tensor.name for tensor in op.inputs]
        if not _is_repeated(op) or any(name in self._differs for name in names):
            self._differs.update(tensor.name for tensor in op.outputs)
        tracked = [self._features.get(name) for name in names]
        if not any(tracked):
            return
        if op.type == "IdentityN" and module_of_gradient(op) == GRADIENTS:
            for given, output in zip(tracked, op.outputs, strict=True):
                if given is not None:
                    self._features[output.name] = given
            return
        result = self._after(op, tracked)
        if result is None:
            self._lose(names)
        else:
            self._features[op.outputs[0].name] = result

    def _after(
        self, op: tf.Operation, tracked: Sequence[Features | None]
    ) -> Features | None:
        """The features in an op's output; None: nothing is known of them."""
        given = [one for one in tracked if one is not None]
        first = given[0]
        sources = frozenset().union(*(one.sources for one in given))
        if any(one.is_shape for one in given):
            is_draw = (
                op.type in self._draws and tracked[0] is not None and len(given) == 1
            )
            return dataclasses.replace(first, is_shape=False) if is_draw else None
        if op.type == "Shape":
            return dataclasses.replace(first, is_shape=True)
        if op.type not in UNARY | ENTRYWISE or len({one.axis for one in given}) > 1:
            return None
        for tensor, one in zip(op.inputs, tracked, strict=True):
            if one is None and not self._is_alike(tensor, first.axis, op.outputs[0]):
                return None
        return Features(first.axis, sources)

    def _is_alike(self, tensor: tf.Tensor, axis: int, output: tf.Tensor) -> bool:
        """Whether it is the same for each row and each feature of `output`."""
        rank, of_all = tensor.shape.rank, output.shape.rank
        if tensor.name in self._differs or rank is None or of_all is None:
            return False
        return all(
            rank < -place or tensor.shape[place] == 1 for place in (axis, -of_all)
        )

    def _lose(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._features:
                self.lost |= self._features[name].sources


def _handles(graph: Any) -> Iterator[str]:
    """The names of the handles of weights, as the graph has captured them."""
    of_weights = {id(variable.handle) for variable in graph.trainable_variables}
    for outer, inner in graph.captures:
        if id(outer) in of_weights:
            yield inner.name


def _is_repeated(op: tf.Operation) -> bool:
    """Whether an op has the same outputs on each replica, of the same inputs."""
    if op.type in ("ReadVariableOp", "Placeholder"):
        return True
    calls = any(attribute.type == "func" for attribute in op.op_def.attr)
    return not (op.op_def.is_stateful or calls or "Random" in op.type)


def origin_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of which it is a copy, perhaps of another type."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor
