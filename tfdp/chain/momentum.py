"""Optimizers that send their momentum, compressed, in the place of gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import own_copy, replicas_of
from tfdp.chain.compression import (
    CompressedExchange,
    places_taken,
)
from tfdp.chain.reduction import Reduction, Stage, scale_when_summed
from tfdp.compression.method import MomentumCompression, SentMomenta
from tfdp.errors import ConfigurationError
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.reducer import Reducer


class Momentum(Stage):
    """Replaces gradients by parts of the next momentum, which are smoother.

    With the momentum m, equal on all R replicas, and gradients g_r with the sum g,
    replica r sends a part of the next momentum,

        m_r = beta_1 m / R + (1 - beta_1) g_r      sum over r: beta_1 m + (1 - beta_1) g

    and the optimizer gets the gradient (M - beta_1 m) / (1 - beta_1) for the
    received sum M.

    Args:
      places: of the gradients that are compressed.
      kept: beta_1; 0 in the warm-up, which is uncompressed and bit-exact: 0 m + 1 g.
      is_plain: whether this step is of the warm-up.
    """

    def __init__(
        self, places: list[int], unit: Any, kept: tf.Tensor, is_plain: tf.Tensor
    ):
        self._places, self._kept, self._is_plain = places, kept, is_plain
        self._scale = tf.constant(1.0) if unit is None else tf.cast(unit, tf.float32)

    def before(self, reduction: Reduction) -> None:
        optimizer = reduction.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        replicas = replicas_of(tf.distribute.get_strategy())
        self._momenta, self._types = {}, {}
        for place in self._places:
            gradient, variable = reduction.gradients[place], reduction.variables[place]
            momentum = own_copy(inner.momentum_of(variable).value, reduction.rank)
            own = tf.cast(momentum.read_value(), tf.float32)
            self._momenta[place] = self._kept * self._scale * own
            part = self._momenta[place] / replicas
            new = (1 - self._kept) * tf.cast(gradient, tf.float32)
            # The initial momentum may be NaN, and 0 times NaN is not 0.
            reduction.gradients[place] = tf.where(self._is_plain, new, part + new)
            self._types[place] = gradient.dtype

    def after(self, reduction: Reduction) -> None:
        for place, momentum in self._momenta.items():
            total = (reduction.gradients[place] - momentum) / (1 - self._kept)
            reduction.gradients[place] = tf.cast(total, self._types[place])


def momentum_stages(reduction: Reduction, reducer: Reducer) -> list[Stage]:
    """The stages of an optimizer that sends its momentum."""
    optimizer, strategy = reduction.optimizer, tf.distribute.get_strategy()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own_method = inner.momentum_compression
    _refuse_here(inner, strategy, reducer)
    reduction.step.of(SentMomenta).add(id(inner))
    compressed = reducer.compressed_by(own_method.method, own_method.across)
    _refuse_place(inner, strategy, own_method, compressed)
    places = places_taken(compressed, reduction)
    if not places:
        return []
    is_plain = tf.convert_to_tensor(inner.iterations) < own_method.warmup_steps
    kept = tf.where(is_plain, 0.0, own_method.beta_1)
    unit = scale_when_summed(optimizer)
    return [
        Momentum(places, unit, kept, is_plain),
        CompressedExchange(compressed, places, unit, is_plain),
    ]


def _refuse_here(
    optimizer: Optimizer, strategy: tf.distribute.Strategy, reducer: Reducer
) -> None:
    owner = type(optimizer).__name__
    if reducer.compressed is not None:
        raise ConfigurationError(
            f"Communication(compression={reducer.compressed.method!r}) and {owner} "
            "both decide what is sent. Leave the first out; the optimizer has a "
            "compression of its own."
        )
    if getattr(strategy, "compiles_steps", True):
        raise ConfigurationError(
            f"{owner} cannot send its momentum under {type(strategy).__name__}. Use "
            "tfdp.DataParallelStrategy or tfdp.MultiHostDataParallelStrategy, or "
            "keras.optimizers.Adam."
        )


def _refuse_place(
    optimizer: Optimizer,
    strategy: tf.distribute.Strategy,
    own_method: MomentumCompression,
    compressed: CompressedSums,
) -> None:
    """Refuses an `across` for which everything would be sent uncompressed."""
    owner, replicas = type(optimizer).__name__, replicas_of(strategy)
    is_one_process = len(strategy.extended.worker_devices) == replicas
    if own_method.across == "replicas" and not is_one_process:
        raise ConfigurationError(
            f"{owner}(across='replicas') lets the replicas of one process send "
            "separately, and here are several hosts. Leave across out: each host sends "
            "its own."
        )
    if replicas > 1 and compressed.peers == 1:
        raise ConfigurationError(
            f"{owner}(across='hosts') compresses what crosses hosts, and here is one. "
            "Set across='replicas' to let each replica send separately, use "
            "Communication(hierarchy=(2, 2)), which simulates hosts, or "
            "keras.optimizers.Adam."
        )
