"""Sums of gradients by way of the momentum: what is made small is smoother than they.

With the momentum m, which all R replicas have alike, and the gradient g_r of each,
whose sum is g, replica r sends a part of the next momentum,

    m_r = beta_1 m / R + (1 - beta_1) g_r       sum over r = beta_1 m + (1 - beta_1) g

and the optimizer is given the gradient by which it comes to the sum M that arrived:

    (M - beta_1 m) / (1 - beta_1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.compression.momentum import MomentumCompression
from tfdp.errors import ConfigurationError
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.reducer import Reducer
from tfdp.step.compression import PlainSums, is_taken, sum_compressed
from tfdp.tracing.current_run import current_run

__all__ = ["momentum_compression_of", "sum_by_momentum"]


def momentum_compression_of(optimizer: Any) -> MomentumCompression | None:
    """How `optimizer`, or the one within it, sends its momentum; None: it does not."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "momentum_compression", None)


def sum_by_momentum(
    asked: MomentumCompression,
    reducer: Reducer,
    gradients: Sequence[Any],
    state: Sequence[tf.Tensor],
    rank: int,
    variables: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
    plain_sums: PlainSums,
    unit: Any,
) -> tuple[list[Any], list[tf.Tensor]]:
    """As `sum_compressed`, of momenta; see the top.

    Args:
      asked: what the optimizer says.
      reducer: the strategy's.
      gradients, state, rank, variables, optimizer, plain_sums, unit: see there.

    Raises:
      ConfigurationError: where momenta cannot be sent so.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    strategy = tf.distribute.get_strategy()
    _refuse_here(inner, strategy, reducer)
    found = current_run()
    if found is not None:
        found[0].sent_momentum.add(id(inner))
    compressed = reducer.compressed_by(asked.method, asked.across)
    _refuse_place(inner, strategy, asked, compressed)
    is_plain = tf.convert_to_tensor(inner.iterations) < asked.warmup_steps
    # As they are in the warm-up, to the last bit: 0 m + 1 g.
    kept = tf.where(is_plain, 0.0, asked.beta_1)
    scale = tf.constant(1.0) if unit is None else tf.cast(unit, tf.float32)
    sent, momenta = list(gradients), {}
    for place, (gradient, variable) in enumerate(
        zip(gradients, variables, strict=True)
    ):
        if is_taken(compressed, gradient, variable):
            own = own_copy(inner.momentum_of(variable).value, rank).read_value()
            momenta[place] = kept * scale * tf.cast(own, tf.float32)
            part = momenta[place] / strategy.num_replicas_in_sync
            new = (1 - kept) * tf.cast(gradient, tf.float32)
            # Where there is none it may not be a number, and 0 times that is not 0.
            sent[place] = tf.where(is_plain, new, part + new)
    sums, totals = sum_compressed(
        compressed,
        sent,
        state,
        rank,
        variables,
        optimizer,
        plain_sums,
        unit,
        is_plain=is_plain,
    )
    for place, momentum in momenta.items():
        total = (sums[place] - momentum) / (1 - kept)
        sums[place] = tf.cast(total, gradients[place].dtype)
    return sums, totals


def _refuse_here(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    reducer: Reducer,
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
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    asked: MomentumCompression,
    compressed: CompressedSums,
) -> None:
    """Refuses an `across` that would let everything be sent as it is."""
    owner, replicas = type(optimizer).__name__, strategy.num_replicas_in_sync
    is_one_process = len(strategy.extended.worker_devices) == replicas
    if asked.across == "replicas" and not is_one_process:
        raise ConfigurationError(
            f"{owner}(across='replicas') lets the replicas of one process send apart, "
            "and here are several hosts. Leave across out: each host sends its own."
        )
    if replicas > 1 and compressed.group.size == 1:
        raise ConfigurationError(
            f"{owner}(across='hosts') makes small what crosses hosts, and here is one. "
            "Say across='replicas' to let each replica send apart, use "
            "Communication(hierarchy=(2, 2)), which simulates hosts, or "
            "keras.optimizers.Adam."
        )
