"""The table of `tfdp plan --layout`: what the rules do, by the shapes of weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.grid.kinds import kinds_in
from tfdp.grid.layouts import distribution_of, mesh_of, rules_for, rules_of
from tfdp.plan.mesh import Axes, Mesh
from tfdp.tools.report.text import format_bytes, format_table
from tfdp.tools.testing.model_parts import layers_of

FIRST = ("rule", "axes", "weights", "shape", "rests as", "computes as")
TITLES = (*FIRST, "bytes per device", "exchanges per step")
#: Of one weight, by how its layer computes; the sum over copies of a part comes last.
EXCHANGES = {
    "whole": "1 all-reduce",
    "gathered": "1 all-gather, 1 reduce-scatter",
    **dict.fromkeys(("column", "row", "heads", "lookup"), "2 of rows each way"),
}
HEADS = ("query", "key", "value")
ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """One weight, the rules that meet it, and the axes of the only one of them."""

    rules: tuple[str, ...]
    path: str
    axes: Axes
    shape: tuple[int, ...]
    rests_as: tuple[int, ...]
    computes_as: str
    why: str
    bytes_per_device: int
    bytes_whole: int
    exchanges: str


@dataclasses.dataclass(frozen=True)
class LayoutTable:
    """The rows of all weights, and in `flaws` a sentence for each fault of a rule."""

    model: str
    mesh: Mesh
    rows: tuple[WeightRow, ...]
    flaws: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no rule has a fault."""
        return not self.flaws

    @property
    def sums(self) -> dict[str, int]:
        """Bytes of weights on one device, on all, and in the model."""
        here = sum(row.bytes_per_device for row in self.rows)
        whole = sum(row.bytes_whole for row in self.rows)
        return {"device": here, "devices": here * self.mesh.replicas, "model": whole}

    def cells(self) -> list[tuple[str, ...]]:
        """Rows of TITLES: weights that differ only in their paths are one."""
        alike: dict[WeightRow, list[WeightRow]] = {}
        for row in self.rows:
            alike.setdefault(dataclasses.replace(row, path=""), []).append(row)
        return [
            (
                " and ".join(rows[0].rules) or "-",
                ", ".join(axis or "-" for axis in rows[0].axes) or "-",
                _some([row.path for row in rows]),
                _text(rows[0].shape),
                "whole" if rows[0].computes_as == "whole" else _text(rows[0].rests_as),
                rows[0].computes_as,
                format_bytes(sum(row.bytes_per_device for row in rows)),
                rows[0].exchanges,
            )
            for rows in alike.values()
        ]

    def print(self) -> None:
        print(f"{self.model}:\n\n{format_table([TITLES, *self.cells()])}\n")
        size = {name: format_bytes(count) for name, count in self.sums.items()}
        print(
            f"weights: {size['device']} per device, {size['devices']} on all "
            f"{self.mesh.replicas} ({self.mesh}); the model has {size['model']}"
        )
        for why in dict.fromkeys(row.why for row in self.rows if row.why):
            paths = [row.path for row in self.rows if row.why == why]
            print(f"not in parts: {_some(paths)}: {why}")
        if self.flaws:
            print("\nfaults\n" + "\n".join(f"- {flaw}" for flaw in self.flaws))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "weights": [dataclasses.asdict(row) for row in self.rows],
            "bytes": self.sums,
            "flaws": list(self.flaws),
        }


def layout_table(
    name: str, model: keras.Model, layout: Any, refused: Mapping[str, str]
) -> LayoutTable:
    """The table of a built model; `refused`: rules, and why Keras refused them."""
    distribution = distribution_of(layout)
    mesh, rules = mesh_of(distribution), rules_of(distribution)
    weights = [(weight, rules_for(weight.path, rules)) for weight in model.weights]
    cut = {}
    for weight, met in weights:
        axes, shape = _axes_of(met, rules), tuple(weight.shape)
        if weight.trainable and len(axes) <= len(shape) and not _repeats(axes):
            cut[weight.path] = mesh.layout(shape, axes)
    layouts = {path: found for path, found in cut.items() if found is not None}
    layers = layers_of(model)
    kinds = kinds_in(layers, lambda weight: layouts.get(weight.path))
    rows = []
    for weight, met in weights:
        path, shape = weight.path, tuple(weight.shape)
        bytes_whole = math.prod(shape) * tf.as_dtype(weight.dtype).size
        rests_as, computes_as, why, parts = shape, "whole", "", 1
        if found := layouts.get(path):
            parts, rests_as = found.parts, found.shard_shape(0)
            computes_as, why = kinds[path]
        exchanges = EXCHANGES[computes_as] if weight.trainable else "-"
        if 1 < parts < mesh.replicas:
            exchanges += ", 1 all-reduce"
        how = (computes_as, why, bytes_whole // parts, bytes_whole, exchanges)
        rows.append(WeightRow(met, path, _axes_of(met, rules), shape, rests_as, *how))
    flaws = [f"The rule {rule!r}: {why}." for rule, why in refused.items()]
    flaws += [
        f"The rule {' and '.join(map(repr, met))}: {fault}: {_some(paths)}."
        for (met, fault), paths in _faults(rows, mesh, _heads(layers)).items()
    ]
    used = {rule for _, met in weights for rule in met}
    flaws += [
        f"The rule {rule!r} meets no weight. Paths are such as {model.weights[0].path}."
        for rule in rules
        if rule not in used and not rule.endswith("output")  # a layer's result
    ]
    return LayoutTable(name, mesh, tuple(rows), tuple(flaws))


def _axes_of(met: Sequence[str], rules: Mapping[str, Axes]) -> Axes:
    return rules[met[0]] if len(met) == 1 else ()


def _repeats(axes: Axes) -> bool:
    return any(axis and axes.count(axis) > 1 for axis in axes)


def _heads(layers: Sequence[keras.layers.Layer]) -> set[str]:
    """The paths of the weights whose dimension before the last is one of heads."""
    weights = (
        w for each in layers if isinstance(each, ATTENTION) for w in each.weights
    )
    return {w.path for w in weights if w.path.split("/")[-2] in HEADS}


def _faults(
    rows: Sequence[WeightRow], mesh: Mesh, heads: set[str]
) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """The weights with each fault of each rule."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for row in rows:
        for fault in _faults_of(row, mesh, row.path in heads):
            text = f"{row.path} ({_text(row.shape)})"
            found.setdefault((row.rules, fault), []).append(text)
    return found


def _faults_of(row: WeightRow, mesh: Mesh, has_heads: bool) -> Iterator[str]:
    rank, axes = len(row.shape), row.axes
    if len(row.rules) > 1:
        yield "both meet one weight, change one"
    elif row.rules and len(axes) != rank:
        yield f"it has {len(axes)} axes, and the weight {rank} dimensions"
    if _repeats(axes):
        yield "it gives one axis to two dimensions"
    for place, (size, axis) in enumerate(zip(row.shape, axes, strict=False)):
        if axis and size % mesh.size(axis):
            what = f"{size} heads" if has_heads and place == rank - 2 else f"{size}"
            yield f"{what} of dimension {place} cannot be cut into {mesh.size(axis)}"


def _some(texts: Sequence[str]) -> str:
    return texts[0] + (f" and {len(texts) - 1} more" if len(texts) > 1 else "")


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
