"""The parts of a model that matter to parity: layers, random states, optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

HALF_PRECISION = ("float16", "bfloat16")
# Numbers that say how much a layer of Keras draws; 0 switches it off.
AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")
# Bits of the significand, the hidden one among them: u = 2^-bits.
SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """`model` and every layer in it, however deep, in the order of creation."""
    found: dict[int, keras.layers.Layer] = {}
    _collect(model, found)
    return list(found.values())


def _collect(layer: keras.layers.Layer, found: dict[int, keras.layers.Layer]) -> None:
    if id(layer) in found:
        return
    found[id(layer)] = layer
    for value in vars(layer).values():
        for part in _layers_in(value):
            _collect(part, found)


def _layers_in(value: Any) -> Iterator[keras.layers.Layer]:
    if isinstance(value, keras.layers.Layer):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _layers_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _layers_in(item)


def random_layers(
    model: keras.Model,
) -> list[tuple[keras.layers.Layer, keras.random.SeedGenerator]]:
    """The layers that own a generator of random numbers, each with it."""
    return [
        (layer, value)
        for layer in layers_of(model)
        for value in vars(layer).values()
        if isinstance(value, keras.random.SeedGenerator)
    ]


def switch_off_random_layers(model: keras.Model) -> list[str]:
    """Sets the rates of dropout and noise to 0; the names of the layers it was done to.

    Layers that draw for another reason (augmentation, a layer's own code) stay as they
    are.
    """
    names = []
    for layer, _ in random_layers(model):
        amounts = [name for name in AMOUNTS if _is_positive(getattr(layer, name, 0))]
        for name in amounts:
            setattr(layer, name, 0.0)
        if amounts:
            names.append(layer.name)
    return list(dict.fromkeys(names))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def inner_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """`optimizer` and those it wraps."""
    found = [optimizer]
    while isinstance(
        inner := getattr(found[-1], "inner_optimizer", None), keras.optimizers.Optimizer
    ):
        found.append(inner)
    return found


def unit_round_off(dtype: str) -> float:
    """u: half the distance of 1 to the next number; 0 for integers."""
    bits = SIGNIFICAND_BITS.get(str(dtype))
    return 0.0 if bits is None else float(np.ldexp(1.0, -bits))


def compute_round_off(model: keras.Model) -> float:
    """u of the coarsest type that a layer of `model` computes in."""
    return max(unit_round_off(layer.compute_dtype) for layer in layers_of(model))
