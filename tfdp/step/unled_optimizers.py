"""Optimizers that nobody leads: what cannot be exact with them is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import is_branch_graph, keras_state
from tfdp._private.optimizer_hooks import REDUCE, strategy_of
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.sharding.updates import shards_of
from tfdp.step.momentum_sums import momentum_compression_of
from tfdp.step.repeated_rows import CLIPPING

__all__ = ["refuse_unled"]


def refuse_unled(value: Sequence[Any]) -> bool:
    """Refuses a reduction that an unknown optimizer asks for, where it is not exact.

    Returns:
      Whether an optimizer that nobody leads asks: for the sum of its gradients.

    Raises:
      ScopeError: when it was made elsewhere.
      ConfigurationError: when it would clip, test or update by shards before.
    """
    # TensorFlow's reduction is not told who asks; Keras' open name scopes tell.
    stack = keras_state.get_global_attribute("name_scope_stack") or []
    callers = [getattr(scope, "caller", None) for scope in stack]
    optimizers = [c for c in callers if isinstance(c, keras.optimizers.Optimizer)]
    for optimizer in optimizers:
        if REDUCE in vars(optimizer) or "apply" in vars(optimizer):
            return False
    for optimizer in optimizers:
        if strategy_of(optimizer) is not tf.distribute.get_strategy():
            raise ScopeError(
                f"The optimizer {optimizer.name!r} updates weights in strategy.run, "
                "but was not made under this strategy. Make it in `with "
                "strategy.scope():`, once and before strategy.run."
            )
        why = _why_not_exact(optimizer)
        if why is not None:
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} was made within strategy.run, or "
                f"copied, so the strategy does not know it, and {why}. Make it in "
                "`with strategy.scope():`, once and before strategy.run, or wrap it: "
                "tfdp.DistributedOptimizer(optimizer)."
            )
    is_led = any(getattr(o, "reduces_gradients", False) for o in optimizers)
    return bool(optimizers) and not is_led


def _why_not_exact(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Why adding the gradients of an unknown optimizer is not enough."""
    if shards_of(optimizer) is not None:
        return "with shard=... each replica would add another shard of its gradients"
    set_options = [name for name in CLIPPING if getattr(optimizer, name, None)]
    if set_options:
        return (
            f"has {set_options[0]} set: Keras would clip each replica's gradient "
            "before they are added, which is another update than on one device"
        )
    reducer = tf.distribute.get_strategy().extended.reducer
    if reducer.compressed is not None:
        return "its gradients would be sent without Communication(compression=...)"
    if momentum_compression_of(optimizer) is not None:
        return "its gradients would be sent in the place of its momentum"
    graph = tf.compat.v1.get_default_graph()
    if is_branch_graph(graph) and not optimizer.gradient_accumulation_steps:
        return (
            "is called within a conditional, such as a loss scaler's, whose branch "
            "each replica would choose by its own gradients: the replicas would wait "
            "for each other for ever"
        )
    return None
