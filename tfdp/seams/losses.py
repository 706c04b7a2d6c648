"""Replaces the functions in which Keras makes a mean of a loss, and scales it.

Keras divides a replica's mean by the number of replicas, which is right only if all
replicas have equally many samples and equal weights. The replacements decide by the
strategy of the calling thread:

    a replica of a tfdp strategy         the strategy's `losses_of_replica` scales
    a tfdp strategy's scope, no replica  nothing is scaled: the plain loss
    anything else                        Keras' own functions
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

from tfdp.errors import ConfigurationError, SeamError
from tfdp.seams.replace import replace_function
from tfdp.seams.table import LOSS

# The property by which a strategy says that it scales losses itself.
LOSSES_OF_REPLICA = "losses_of_replica"
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class MeanLoss(NamedTuple):
    """A replica's mean loss before it is scaled, and what it was made of.

    `mean` is the sum of `values`, which `weights` (sample weights times mask, or None)
    have multiplied, over `divisor`. `mask` is a tensor or None. `given_mask` and
    `given_weights` are what the loss was called with; `made_of` are the tensors of
    losses, weights and mask before Keras multiplied them.
    """

    mean: Any
    values: Any
    weights: Any
    divisor: Any
    mask: Any
    is_by_weights: bool
    given_mask: Any
    given_weights: Any
    made_of: tuple[Any, ...]


def replace_loss_functions() -> None:
    """Puts the replacements in place, also where a module imported the names."""
    for name, replacement in _REPLACEMENTS.items():
        replace_function(LOSS, name, replacement)


def _reduce_weighted_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_weighted_values(*args: Any, **kwargs: Any) -> Any:
        is_tfdp, losses = _losses_here()
        if not is_tfdp or losses is None:
            return original(*args, **kwargs)
        return _scaled(losses, *args, **kwargs)

    return reduce_weighted_values


def _left_to(method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a function of one number by a method of what scales losses here."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scaled(value: Any) -> Any:
            is_tfdp, losses = _losses_here()
            if not is_tfdp:
                return original(value)
            return value if losses is None else getattr(losses, method)(value)

        return scaled

    return replacement


def _reduce_values(original: Callable[..., Any]) -> Callable[..., Any]:
    # Only Keras' own `reduce_weighted_values` calls it, and no replica calls that.
    @functools.wraps(original)
    def reduce_values(*args: Any, **kwargs: Any) -> Any:
        if _losses_here()[1] is not None:
            raise SeamError(
                f"On a replica, {LOSS}.reduce_values reduced a loss that did not pass "
                "through reduce_weighted_values as tfdp replaced it, so its mean has "
                "no share of the global batch. Either something replaced that function "
                "after the strategy was made, or a module holds it under another name. "
                "Call it as an attribute of its module, and replace it only before "
                "you make the strategy."
            )
        return original(*args, **kwargs)

    return reduce_values


_REPLACEMENTS = {
    "reduce_values": _reduce_values,
    "reduce_weighted_values": _reduce_weighted_values,
    # Keras scales the sum of a model's penalties by it, too.
    "scale_loss_for_distribution": _left_to("scaled_penalty"),
    "unscale_loss_for_distribution": _left_to("reported"),
}


class _Plain(threading.local):
    is_on = False


_plain = _Plain()


@contextlib.contextmanager
def plain_losses() -> Iterator[None]:
    """Makes losses of the calling thread's replica means of its own rows within the
    context, as on one device: for libraries that combine them."""
    _plain.is_on = True
    try:
        yield
    finally:
        _plain.is_on = False


def _losses_here() -> tuple[bool, Any]:
    """Whether the thread is in the scope of a tfdp strategy, and what scales losses on
    its replica; None: it is on no replica."""
    strategy = tf.distribute.get_strategy()
    if not hasattr(type(strategy), LOSSES_OF_REPLICA):
        return False, None
    if tf.distribute.in_cross_replica_context() or _plain.is_on:
        return True, None
    return True, getattr(strategy, LOSSES_OF_REPLICA)


def _scaled(
    losses: Any,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """`reduce_weighted_values` with Keras' operations in Keras' order, up to the
    scaling of a mean."""
    keras_losses = importlib.import_module(LOSS)
    given_weights, given_mask = sample_weight, mask
    reduction = keras_losses.standardize_reduction(reduction)
    if values is None:
        raise ConfigurationError(
            "A loss function returned None: it must return a tensor, with a value for "
            "each row (`return` is missing?)."
        )
    values = ops.convert_to_tensor(values, dtype=dtype)
    weights = sample_weight
    if weights is not None:
        weights = ops.convert_to_tensor(weights, dtype=dtype)
    if mask is not None:
        mask = ops.convert_to_tensor(mask, dtype=dtype)
    made_of = tuple(part for part in (values, weights, mask) if part is not None)
    weights = keras_losses.apply_mask(
        weights, mask, dtype=values.dtype, reduction=reduction
    )
    if weights is not None:
        weights = ops.cast(weights, values.dtype)
        values, weights = keras_losses.squeeze_or_expand_to_same_rank(values, weights)
        values = values * weights
    if reduction in (None, "none") or tuple(values.shape) in ((), (0,)):
        return values
    total = ops.sum(values)
    if reduction not in MEANS:
        return total
    is_by_weights = reduction == "mean_with_sample_weight"
    if is_by_weights and weights is not None:
        divisor = ops.cast(ops.sum(weights), total.dtype)
    else:
        shape = ops.convert_to_tensor(ops.shape(values), dtype="int32")
        divisor = ops.cast(ops.prod(shape), total.dtype)
    mean = ops.divide_no_nan(total, divisor)
    return losses.scaled_mean(
        MeanLoss(
            mean,
            values,
            weights,
            divisor,
            mask,
            is_by_weights,
            given_mask,
            given_weights,
            made_of,
        )
    )
