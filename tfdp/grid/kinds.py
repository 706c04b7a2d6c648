"""How a layer computes with a weight in parts, or why it is gathered.

A layer computes in parts where one axis, other than that of data, cuts its kernel:

    column   in an output: each member of the group has its part of the features
    row      in an input that is summed over: each has its terms of the sum
    lookup   in the vocabulary of a table: each has its words

All other layers gather their weights, and compute on their own rows: `gathered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras

from tfdp.plan.mesh import MeshLayout

#: How a weight rests; None: whole.
LayoutOf: TypeAlias = Callable[[Any], MeshLayout | None]


class ComputesAs(NamedTuple):
    """How a layer computes with a weight.

    Args:
      name: "column", "row", "lookup" or "gathered".
      why: for "gathered": what keeps the layer from computing in parts.
    """

    name: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class InParts:
    """A layer that computes in parts.

    Args:
      layer: a layer of Keras' own class.
      kind: "column", "row" or "lookup".
      along: the axis of the mesh that cuts the kernel.
      weights: those of which the layer reads its member's part; the kernel first.
      feature_axis: the axis of the layer's output (column) or input (row) of which each
        member has a part.
    """

    layer: Any
    kind: str
    along: str
    weights: tuple[Any, ...]
    feature_axis: int = -1

    @property
    def has_own_bias(self) -> bool:
        """Whether each member has the same part of the bias as of the kernel."""
        return len(self.weights) > 1


class Gathered(NamedTuple):
    """A kernel in parts that is gathered for use, and why."""

    kernel: Any
    why: str


def kinds_in(
    layers: Sequence[keras.Layer], layout_of: LayoutOf
) -> dict[str, ComputesAs]:
    """How each weight in parts is computed with, by its path.

    `layers`: all of a model, those within others as well.
    """
    found: dict[str, ComputesAs] = {}
    for layer in layers:
        made = in_parts(layer, layout_of)
        if isinstance(made, InParts):
            found.update({w.path: ComputesAs(made.kind) for w in made.weights})
        elif made is not None:
            found[made.kernel.path] = ComputesAs("gathered", made.why)
    for layer in layers:
        for weight in layer.weights:
            if layout_of(weight) is not None:
                why = f"{type(layer).__name__} has no way to compute with a part of it"
                found.setdefault(weight.path, ComputesAs("gathered", why))
    return found


def layers_in_parts(
    layers: Iterable[keras.Layer], layout_of: LayoutOf
) -> list[InParts]:
    """The layers that compute in parts."""
    made = (in_parts(layer, layout_of) for layer in layers)
    return [one for one in made if isinstance(one, InParts)]


def in_parts(layer: Any, layout_of: LayoutOf) -> InParts | Gathered | None:
    """How `layer` computes in parts; None: it has no kernel in parts."""
    for of_keras, (name, decide) in DECISIONS.items():
        kernel = _attribute(layer, name) if isinstance(layer, of_keras) else None
        layout = None if kernel is None else layout_of(kernel)
        if layout is None:
            continue
        cut = _why_not(layer, of_keras) or _along(layout)
        found = cut if isinstance(cut, str) else decide(layer, kernel, cut, layout_of)
        return Gathered(kernel, found) if isinstance(found, str) else found
    return None


class _Cut(NamedTuple):
    """The axis of the mesh, and the dimension of the kernel that it cuts."""

    along: str
    dimension: int


def _why_not(layer: Any, of_keras: Any) -> str:
    """The reason why a layer's call may be another; "": it is as Keras made it."""
    if type(layer).call is not of_keras.call:
        return f"{type(layer).__name__} has a call of its own"
    if getattr(layer, "quantization_mode", None) is not None:
        return "it is quantized"
    if getattr(layer, "lora_enabled", False):
        return "it has a LoRA"
    return ""


def _along(layout: MeshLayout) -> _Cut | str:
    cuts = [
        _Cut(axis, dimension)
        for dimension, axis in enumerate(layout.axes)
        if axis is not None and axis != layout.mesh.batch
    ]
    if not cuts:
        return f"only {layout.mesh.batch!r}, the axis of data, cuts it"
    return cuts[0] if len(cuts) == 1 else "two axes cut it"


def _with_bias(layer: Any, layout_of: LayoutOf, kernel: Any, cut: Any) -> tuple:
    """The kernel, and the bias if the same axis cuts the same features of it."""
    along, dimension = cut
    layout = None if layer.bias is None else layout_of(layer.bias)
    if layout is None or dimension is None or layout.axes[dimension] != along:
        return (kernel,)
    return kernel, layer.bias


def _of_dense(layer: Any, kernel: Any, cut: _Cut, layout_of: LayoutOf) -> InParts | str:
    if cut.dimension == 0:
        return InParts(layer, "row", cut.along, (kernel,))
    weights = _with_bias(layer, layout_of, kernel, (cut.along, 0))
    return InParts(layer, "column", cut.along, weights)


def _of_einsum(
    layer: Any, kernel: Any, cut: _Cut, layout_of: LayoutOf
) -> InParts | str:
    equation = layer.equation.replace(" ", "")
    if "." in equation:
        return "its equation has an ellipsis"
    inputs, rest = equation.split(",")
    of_kernel, output = rest.split("->")
    label = of_kernel[cut.dimension]
    if label in output and label not in inputs:
        if output.index(label) == 0 or inputs[0] != output[0]:
            return "its first axis is not that of rows"
        bias_labels = [one for one in output if one in (layer.bias_axes or "")]
        place = bias_labels.index(label) if label in bias_labels else None
        weights = _with_bias(layer, layout_of, kernel, (cut.along, place))
        return InParts(layer, "column", cut.along, weights, output.index(label))
    if label in inputs and label not in output:
        if inputs.index(label) == 0 or inputs[0] != output[0]:
            return "its first axis is not that of rows"
        return InParts(layer, "row", cut.along, (kernel,), inputs.index(label))
    return f"{label!r} is in the input and in the output of {layer.equation!r}"


def _of_table(layer: Any, kernel: Any, cut: _Cut, layout_of: LayoutOf) -> InParts | str:
    if cut.dimension != 0:
        return "its vocabulary is whole"
    return InParts(layer, "lookup", cut.along, (kernel,))


def _attribute(layer: Any, name: str) -> Any:
    """A weight of a layer; None: it is not built."""
    return getattr(layer, name, None) if layer.built else None


#: By Keras' class, its weight and the decision; the first that fits decides.
DECISIONS: dict[type, tuple[str, Callable[..., InParts | str]]] = {
    keras.layers.Dense: ("_kernel", _of_dense),
    keras.layers.EinsumDense: ("_kernel", _of_einsum),
    keras.layers.ReversibleEmbedding: ("_embeddings", _of_table),
    keras.layers.Embedding: ("_embeddings", _of_table),
}
