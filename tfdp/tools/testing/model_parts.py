"""The parts of a model that affect parity: layers, random states, optimizers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.layers import Layer
from keras.optimizers import Optimizer
from keras.random import SeedGenerator

HALF_PRECISION = ("float16", "bfloat16")
# Attributes of Keras layers that scale their randomness; 0 disables it.
AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")
# The base of Keras' augmentation layers, which has no public name.
AUGMENTATION = keras.layers.RandomFlip.__base__
# Bits of the significand with the hidden one: u = 2^-bits.
SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def layers_of(model: keras.Model) -> list[Layer]:
    """`model` and all nested layers, in order of creation."""
    found: dict[int, Layer] = {}

    def collect(layer: Layer) -> None:
        if id(layer) not in found:
            found[id(layer)] = layer
            for value in vars(layer).values():
                for part in _layers_in(value):
                    collect(part)

    collect(model)
    return list(found.values())


def _layers_in(value: Any) -> Iterator[Layer]:
    if isinstance(value, Layer):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _layers_in(item)


def random_layers(model: keras.Model) -> list[tuple[Layer, SeedGenerator]]:
    """Pairs of a layer and its random generator."""
    return [
        (layer, value)
        for layer in layers_of(model)
        for value in vars(layer).values()
        if isinstance(value, SeedGenerator)
    ]


def switch_off_random_layers(model: keras.Model) -> list[str]:
    """Sets the rates of dropout and noise to 0, and calls Keras' augmentation as
    outside of training; returns the names of these layers.

    Other random layers are unchanged: custom code, and `RandomCrop`, which gives
    another shape outside of training (Keras 3.15).
    """
    names = []
    for layer, _ in random_layers(model):
        is_crop = isinstance(layer, keras.layers.RandomCrop)
        if isinstance(layer, AUGMENTATION) and not is_crop:
            layer.call = functools.partial(_call_untrained, layer)
            names.append(layer.name)
        for name in AMOUNTS:
            value = getattr(layer, name, 0)
            if isinstance(value, (int, float)) and value > 0:
                setattr(layer, name, 0.0)
                names.append(layer.name)
    return list(dict.fromkeys(names))


def _call_untrained(layer: Layer, data: Any, training: Any = None) -> Any:
    return type(layer).call(layer, data, training=False)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """`optimizer` and the optimizers it wraps."""
    found = [optimizer]
    while isinstance(i := getattr(found[-1], "inner_optimizer", None), Optimizer):
        found.append(i)
    return found


def unit_round_off(dtype: str) -> float:
    """u: half the distance from 1 to the next number; 0 for integers."""
    bits = SIGNIFICAND_BITS.get(str(dtype))
    return 0.0 if bits is None else float(np.ldexp(1.0, -bits))


def compute_round_off(model: keras.Model) -> float:
    """u of the coarsest dtype that a layer of `model` computes in."""
    return max(unit_round_off(layer.compute_dtype) for layer in layers_of(model))
