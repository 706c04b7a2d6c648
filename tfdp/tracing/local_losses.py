"""Scales a replica's loss to its share of the global one: `local_mean`, `local_sum`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.tracing.loss_checks import count_power, is_share, warn_about_loss
from tfdp.tracing.loss_shares import GivenLosses, LossShares, Standing
from tfdp.tracing.step import Step, current_step


def local_mean(loss: tf.Tensor) -> tf.Tensor:
    """Scales a mean over this replica's samples to its share of the global mean.

        loss * n_r / N      n_r: this replica's samples, N: those of all replicas

    The replicas' gradients are summed: the sum is then the gradient of the mean over
    the global batch, however unevenly it is split. A loss that was divided p times by
    the replica's own number of rows is scaled to one divided by that of all: times
    (n_r / N)^(1 + p), or (n_r / N)^p if it is a Keras loss.

    Outside a tfdp strategy, and on one replica, returns the loss unchanged. A loss that
    is no mean over samples (Dice, a root of a mean) must be computed from `all_rows`;
    `LocalMeanWarning` says so.

    Args:
      loss: a scalar, the mean over the samples of this replica, or any number that is
        identical on all replicas.

    Returns:
      The scaled scalar; take its gradient.

    Raises:
      ConfigurationError: it is not a floating-point number.

    Example, in a custom `train_step`:

    ```python
    import keras
    import tensorflow as tf
    import tfdp

    class Mine(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                share = tfdp.losses.local_mean(loss)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(share, variables), variables)
            return {"loss": loss}
    ```
    """
    _refuse_function("local_mean", loss)
    found = current_step()
    if found is None or found[0].here.sees_all_rows:
        return loss
    step, rank = found
    loss = _as_tensor("local_mean", loss)
    shares = _shares(step, rank)
    share = step.share_together(rank)
    power, is_of_rows = count_power(step, rank, loss)
    is_scaled = is_share(shares, loss, "local_mean") or is_of_rows
    if is_scaled and not power:
        return loss
    if not is_scaled:
        warn_about_loss(step, rank, loss)
    # A loss that is proportional to n_r^p shall be so to n^p.
    exponent = (0 if is_scaled else 1) - power
    if exponent < 0:
        share, exponent = tf.math.divide_no_nan(1.0, share), -exponent
    factor = share if exponent == 1 else share**exponent
    return loss * shares.factor(factor, loss.dtype, power=-power)


def local_sum(loss: tf.Tensor) -> tf.Tensor:
    """States that the global loss is the sum of the replicas' losses; changes nothing.

    For sums over the samples, and for losses already divided by the global batch size.

    Args:
      loss: a scalar; or a value for each row, with the gradient of their sum.

    Returns:
      `loss`.

    Raises:
      ConfigurationError: as `local_mean`.
    """
    _refuse_function("local_sum", loss)
    found = current_step()
    if found is None or found[0].here.sees_all_rows:
        return loss
    step, rank = found
    loss = _as_tensor("local_sum", loss)
    shares = _shares(step, rank)
    if shares.standing_of(loss) is Standing.SHARE:
        return loss
    return loss * shares.factor(1.0, loss.dtype)


def _refuse_function(function: str, loss: Any) -> None:
    if callable(loss):
        raise ConfigurationError(
            f"tfdp.losses.{function} takes the number that a loss function computed, "
            f"not the function: call it within the function, or within the train_step. "
            f"Received: {loss!r}."
        )


def _as_tensor(function: str, loss: Any) -> tf.Tensor:
    """The loss of a variable or Python number as a tensor, for graph analysis."""
    try:
        found = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):
        found = None
    if found is None or not found.dtype.is_floating:
        raise ConfigurationError(
            f"tfdp.losses.{function} takes a loss: a floating-point number, as a "
            f"tensor, a variable or a Python number. Received: {loss!r}."
        )
    return found


def _shares(step: Step, rank: Any) -> LossShares:
    """The losses that a replica has scaled so far; refuses padded batches."""
    if step.trace(rank).rows.is_padded:
        raise ConfigurationError(
            "This batch was padded to a fixed size, and a custom loss counts the "
            "padding. Use self.compute_loss(x=x, y=y, y_pred=y_pred), which leaves it "
            "out, or batches of one size (drop_remainder=True)."
        )
    step.of(GivenLosses).are_scaled = True
    return step.trace(rank).shares
