"""What `DistributedOptimizer` cannot be made of, and where it cannot update."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.tracing.current_run import current_run

__all__ = ["check_arguments", "check_place"]


def check_arguments(optimizer: Any, accumulate_steps: Any, initial_scale: Any) -> None:
    """Refuses what `DistributedOptimizer` cannot be made of.

    Raises:
      ConfigurationError: naming the argument.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            "DistributedOptimizer wraps a keras.optimizers.Optimizer, such as "
            "keras.optimizers.Adam(1e-3). Received: "
            f"{_what_it_is(optimizer)}."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "DistributedOptimizer scales the loss itself: pass the optimizer inside "
            f"{optimizer.name!r} (its inner_optimizer) instead."
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigurationError(
            "Accumulation is asked for twice: use DistributedOptimizer("
            f"accumulate_steps={optimizer.gradient_accumulation_steps}) and leave "
            "gradient_accumulation_steps of the inner optimizer out."
        )
    if not is_whole(accumulate_steps, least=1):
        raise ConfigurationError(
            "accumulate_steps must be an integer of at least 1. Received: "
            f"{accumulate_steps!r}."
        )
    if not is_number(initial_scale) or not 0 < initial_scale < math.inf:
        raise ConfigurationError(
            f"initial_scale must be a number above 0. Received: {initial_scale!r}."
        )


def _what_it_is(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}; call it: {given.__name__}()"
    if isinstance(given, str):
        return f"{given!r}; pass keras.optimizers.get({given!r})"
    return repr(given)


def check_place(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an update where `optimizer`, a distributed one, would not do it alone.

    Raises:
      ScopeError: under a stock strategy.
      ConfigurationError: another optimizer holds it.
    """
    strategy, found = tf.distribute.get_strategy(), current_run()
    if found is None and strategy.num_replicas_in_sync > 1:
        raise ScopeError(
            f"DistributedOptimizer {optimizer.name!r} is used under "
            f"{type(strategy).__name__}, which stops all replicas at every "
            "reduction and so cannot accumulate or test within one. Use "
            "tfdp.DataParallelStrategy() in its place."
        )
    if found is not None and found[0].replicas > 1 and found[0].is_updating:
        raise ConfigurationError(
            f"DistributedOptimizer {optimizer.name!r} is held by another optimizer, "
            "whose gradients are added up over the replicas already: it would add them "
            "once more. Wrap the other way round, the optimizer that does the update "
            "innermost; a loss is scaled by "
            "DistributedOptimizer(optimizer, dynamic_loss_scale=True)."
        )
