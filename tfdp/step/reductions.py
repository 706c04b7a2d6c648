"""Compiled losses with `reduction="sum"` or "none", told apart from means.

Keras asks for the number of replicas where it takes a mean, and nobody where it takes a
sum. So the losses of the rows are multiplied by 1 before they are summed, by a factor
that is noted (`tracing.loss_shares`): what a step of one's own makes of the sum, or
reports of it, is then added over the replicas. Losses of rows are refused where a mean
or a sum was added to them, whoever asks for the loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import given_losses
from tfdp._private.names import current_rank
from tfdp.errors import ConfigurationError
from tfdp.tracing.batch_weight import Denominator, Kind, note_denominator
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.loss_shares import Standing
from tfdp.tracing.loss_suspicions import suspect_sum_of_all
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["led_reductions"]


@contextlib.contextmanager
def led_reductions(model: Any, run: ReplicaRun, step: Any) -> Iterator[None]:
    """While this lasts, what the sums among `model`'s losses give is a share.

    `compute_loss` of the model refuses what is neither of rows nor of the batch. Where
    `step` is Keras' own, and so is `compute_loss`, nothing divides a sum.
    """
    is_stock = is_stock_step(step)
    is_stock = is_stock and type(model).compute_loss is keras.Model.compute_loss
    with contextlib.ExitStack() as stack:
        losses = given_losses(model) if isinstance(model, keras.Model) else []
        if losses and run.replicas > 1:
            compute = functools.partial(_of_rows_or_whole, model.compute_loss, run)
            stack.enter_context(instance_attributes(model, {"compute_loss": compute}))
        # One loss may be given for several outputs: it is led once.
        for loss in {id(loss): loss for loss in losses}.values():
            if isinstance(loss, keras.losses.Loss) and loss.reduction == "sum":
                lead = functools.partial(_losses_of_rows, loss.call, run, is_stock)
                led = {"call": lead}
                stack.enter_context(instance_attributes(loss, led))
        yield


def _losses_of_rows(
    call: Any, run: ReplicaRun, is_stock: bool, *args: Any, **kwargs: Any
) -> Any:
    losses = call(*args, **kwargs)
    is_rows = tf.is_tensor(losses) and losses.shape.rank != 0
    if not is_rows or tf.distribute.in_cross_replica_context():
        return losses  # of a scalar nothing says what it is
    suspect_sum_of_all(run, current_rank(), losses)
    if is_stock:
        note_denominator(run, current_rank(), Denominator(None, of=Kind.SUM))
    trace = trace_of(current_rank())
    run.scaled_losses.add(trace)
    shares = run.shares[trace]
    return losses * shares.factor(1.0, losses.dtype)


def _of_rows_or_whole(compute: Any, run: ReplicaRun, *args: Any, **kwargs: Any) -> Any:
    """Refuses losses of rows to which a mean, or a sum, was added.

    Keras adds it to each row's, so that one device counts it once for each row of the
    global batch. A replica has other rows, and knew none of that at the mean.

    Raises:
      ConfigurationError: when the loss is such a sum.
    """
    loss = compute(*args, **kwargs)
    if not tf.is_tensor(loss) or not loss.shape.rank:
        return loss
    suspect_sum_of_all(run, current_rank(), loss)
    if run.shares[trace_of(current_rank())].standing_of(loss) is Standing.LOCAL:
        return loss
    raise ConfigurationError(
        "A loss with reduction='none' was added to another one that is a mean "
        "or a sum over the batch, which then counts once for each row. Give every "
        "loss reduction='sum_over_batch_size', or 'sum'."
    )
