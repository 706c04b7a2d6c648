"""How a layer computes with a weight in parts, or why it is gathered.

A layer computes in parts where one axis, other than that of data, cuts its kernel:

    column   in an output: each member of the group has its part of the features
    row      in an input that is summed over: each has its terms of the sum
    lookup   in the vocabulary of a table: each has its words
    heads    the projections of an attention by heads: each has its heads

All other layers gather their weights, and compute on their own rows: `gathered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras

from tfdp._private.keras_layers import is_attention, projections_of, replaced_in
from tfdp.plan.mesh import MeshLayout

#: How a weight rests; None: whole.
LayoutOf: TypeAlias = Callable[[Any], MeshLayout | None]


#: The axis of heads, of what a projection of an attention makes.
HEADS = -2


class ComputesAs(NamedTuple):
    """How a layer computes with a weight.

    Args:
      name: "column", "row", "lookup", "heads" or "gathered".
      why: for "gathered": what keeps the layer from computing in parts.
    """

    name: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class InParts:
    """A layer that computes in parts.

    Args:
      layer: a layer of Keras' own class.
      kind: "column", "row", "lookup" or "heads".
      along: the axis of the mesh that cuts the kernel.
      weights: those of which the layer reads its member's part; the kernel first.
      feature_axis: the axis of the layer's output (column) or input (row) of which each
        member has a part, counted from the last, -1.
      bias_axis: of a column: the axis of its bias along which that is; None: none is.
      shares_bias: of heads: whether members take their parts of biases that are whole.
    """

    layer: Any
    kind: str
    along: str
    weights: tuple[Any, ...]
    feature_axis: int = -1
    bias_axis: int | None = None
    shares_bias: bool = False

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
            for weight in made.weights:
                found.setdefault(weight.path, ComputesAs(made.kind))
        elif made is not None:
            found[made.kernel.path] = ComputesAs("gathered", made.why)
    for layer in layers:
        heads = _heads_in_parts(layer, layout_of)
        if heads is not None:
            found.update({w.path: ComputesAs("heads") for w in heads.weights})
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
    layers = list(layers)
    made = [in_parts(layer, layout_of) for layer in layers]
    heads = [_heads_in_parts(layer, layout_of) for layer in layers]
    return [one for one in (*made, *heads) if isinstance(one, InParts)]


def _heads_in_parts(layer: Any, layout_of: LayoutOf) -> InParts | None:
    """An attention of Keras' of which each member computes its own heads."""
    if not is_attention(layer):
        return None
    projections = projections_of(layer)
    parts = [in_parts(one, layout_of) for one in projections]
    made = [one for one in parts if isinstance(one, InParts)]
    along = made[-1].along if made else ""
    wanted = [*["column"] * (len(projections) - 1), "row"]
    if [one.kind for one in made] != wanted or any(
        (one.along, one.feature_axis) != (along, HEADS) for one in made
    ):
        return None
    weights = tuple(weight for one in made for weight in one.weights)
    shares = any(
        one.layer.bias is not None and not one.has_own_bias for one in made[:-1]
    )
    return InParts(layer, "heads", along, weights, HEADS, shares_bias=shares)


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
    replaced = replaced_in(layer, of_keras)
    if replaced:
        return f"{type(layer).__name__} has a {replaced} of its own"
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


def _column(
    layer: Any, kernel: Any, along: str, axes: tuple[int, int | None], layout_of: Any
) -> InParts:
    """A column; `axes`: of its output, and of its bias."""
    feature_axis, bias_axis = axes
    weights: tuple[Any, ...] = (kernel,)
    if layer.bias is not None and bias_axis is not None:
        layout = layout_of(layer.bias)
        if layout is not None and layout.axes[bias_axis] == along:
            weights = (kernel, layer.bias)
    return InParts(layer, "column", along, weights, feature_axis, bias_axis)


def _of_dense(layer: Any, kernel: Any, cut: _Cut, layout_of: LayoutOf) -> InParts | str:
    if cut.dimension == 0:
        return InParts(layer, "row", cut.along, (kernel,))
    return _column(layer, kernel, cut.along, (-1, 0), layout_of)


def _of_einsum(
    layer: Any, kernel: Any, cut: _Cut, layout_of: LayoutOf
) -> InParts | str:
    equation = layer.equation.replace(" ", "")
    if "." in equation:
        return "its equation has an ellipsis"
    inputs, rest = equation.split(",")
    of_kernel, output = rest.split("->")
    label, rows = of_kernel[cut.dimension], output[0]
    if inputs[0] != rows or rows in of_kernel:
        return "its first axis is not that of rows"
    if label in output and label not in inputs:
        of_bias = [one for one in output if one in (layer.bias_axes or "")]
        bias_axis = of_bias.index(label) if label in of_bias else None
        axes = output.index(label) - len(output), bias_axis
        return _column(layer, kernel, cut.along, axes, layout_of)
    if label in inputs and label not in output:
        axis = inputs.index(label) - len(inputs)
        return InParts(layer, "row", cut.along, (kernel,), axis)
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
