"""The exact share of a replica's loss in the loss of the whole batch.

Keras divides a replica's mean loss by the number of replicas R, which is right only
when every replica has as many samples, and as much weight, as the others. It asks the
strategy for R in two functions: `scale_loss_for_distribution`, right after a mean was
taken, and `unscale_loss_for_distribution`, when a loss is reported. To these two, and
to nobody else, the strategy answers with a number that knows better:

    scale:    1 / R  becomes  D_r / D    D_r: what the replica's mean was divided by
    unscale:  R      becomes  N / n_r    n_r: samples; Keras weights reports by n_r

With S_r the replica's sum, scale gives S_r / D, whose sum over replicas is the loss of
the whole batch, for masked and weighted means as well as plain ones. Unscale gives
(S_r / D) (N / n_r), whose mean weighted by n_r is the same. The factor stands on the
loss, before backprop: behind it, replicas that depend on each other (synchronised batch
normalization) would get wrong gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from tfdp._tf.padded_batch import Padding
from tfdp._tf.replica_run import ReplicaRun, trace_of

__all__ = ["LossReplicaCount", "loss_replica_count", "why_loss_seems_local"]

LOSS_MODULE = "keras.src.losses.loss"
SCALE = "scale_loss_for_distribution"
UNSCALE = "unscale_loss_for_distribution"

SumOverReplicas = Callable[[tf.Tensor, Any], tf.Tensor]


# A float, because Python asks a subclass of float first when it divides 1.0 by it.
class LossReplicaCount(float):
    """R, which divides and casts to the exact factors of one replica's loss."""

    fraction: tf.Tensor | None = None
    report_factor: tf.Tensor | None = None

    def __rtruediv__(self, other: Any) -> Any:
        if self.fraction is None:
            return other / float(self)
        return other * self.fraction

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        value = float(self) if self.report_factor is None else self.report_factor
        return tf.convert_to_tensor(value, dtype=dtype, name=name)


def loss_replica_count(
    run: ReplicaRun, rank: Any, sum_over_replicas: SumOverReplicas
) -> LossReplicaCount | None:
    """The answer to Keras' loss functions; None when somebody else asks.

    Args:
      run: the strategy's current run.
      rank: the calling replica.
      sum_over_replicas: all-reduces a scalar; called at most once per masked or
        weighted loss, never for a plain mean.
    """
    asker = sys._getframe(2)
    if asker.f_globals.get("__name__") != LOSS_MODULE:
        return None
    if asker.f_code.co_name == SCALE:
        run.scaled_losses.add(trace_of(rank))
        count = _replica_count(run)
        count.fraction = _fraction(run, rank, asker.f_back, sum_over_replicas)
        return count
    if asker.f_code.co_name == UNSCALE:
        count = _replica_count(run)
        if not run.is_even and _is_weighted_by_samples(asker.f_back):
            count.report_factor = tf.math.divide_no_nan(
                tf.cast(run.total_of(rank), tf.float32),
                tf.cast(run.count_of(rank), tf.float32),
            )
        return count
    return None


def _replica_count(run: ReplicaRun) -> LossReplicaCount:
    """R; at least 2 for a padded batch, because Keras scales only from 2 on.

    The number itself is then not used: `fraction` and `report_factor` are set.
    """
    return LossReplicaCount(max(run.replicas, 2) if run.padding else run.replicas)


def _fraction(
    run: ReplicaRun,
    rank: Any,
    reducer: FrameType | None,
    sum_over_replicas: SumOverReplicas,
) -> tf.Tensor | None:
    """D_r / D, or None where it is 1 / R for sure."""
    padding = run.padding_of(rank)
    denominator = _weight_denominator(reducer)
    if padding is not None and not _is_global(denominator, reducer, padding):
        return _fraction_of_rows(reducer, padding)
    if denominator is None:
        return None if run.is_even else run.share_of(rank)
    denominator = tf.stop_gradient(tf.cast(denominator, tf.float32))
    counted = denominator
    if padding is not None and _reduction(reducer) != "mean_with_sample_weight":
        mask = tf.cast(_mask_of(reducer), tf.float32)
        counted = tf.reduce_sum(mask * padding.weights(mask.shape.rank))
    total = sum_over_replicas(counted, rank)
    run.denominators.setdefault(trace_of(rank), []).append(total)
    return tf.math.divide_no_nan(denominator, total)


def _is_global(denominator: Any, reducer: FrameType | None, padding: Padding) -> bool:
    """Whether D must be asked of all replicas: it is not a number of rows."""
    if denominator is None:
        return False
    if _reduction(reducer) != "mean_with_sample_weight" or padding.has_user_weights:
        return True
    return _mask_of(reducer) is not None


def _fraction_of_rows(reducer: FrameType | None, padding: Padding) -> tf.Tensor:
    """D_r / D where both are rows, of which some only fill the batch up.

    Keras divided the sum of the real rows' losses by all rows, or, where the rows'
    weights were asked to divide, by their sum; by nothing for a regularisation.
    """
    if reducer is None or reducer.f_code.co_name != "reduce_values":
        return padding.count / padding.total
    if _reduction(reducer) != "mean_with_sample_weight":
        return padding.rows / padding.total
    entries = tf.size(reducer.f_locals["values"]) // padding.rows
    return padding.count / (padding.total * tf.cast(entries, tf.float32))


def _reduction(reducer: FrameType | None) -> Any:
    if reducer is None or reducer.f_code.co_name != "reduce_values":
        return None
    return reducer.f_locals.get("reduction")


def _mask_of(reducer: FrameType | None) -> Any:
    """The mask of the predictions that `reduce_values` was called for."""
    outer = reducer.f_back if reducer is not None else None
    if outer is None or outer.f_code.co_name != "reduce_weighted_values":
        return None
    return outer.f_locals.get("mask")


def _weight_denominator(reducer: FrameType | None) -> Any:
    """What a mean over weights or unmasked entries was divided by; None: samples."""
    if reducer is None or reducer.f_code.co_name != "reduce_values":
        return None  # regularisation and add_loss: per sample
    weights = reducer.f_locals.get("sample_weight")
    if reducer.f_locals.get("reduction") == "mean_with_sample_weight":
        return None if weights is None else tf.reduce_sum(weights)
    mask = _mask_of(reducer)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


def _is_weighted_by_samples(reporter: FrameType | None) -> bool:
    """Whether the report that follows is weighted by the replica's samples.

    The model's loss always is. The loss of one of several outputs is only when the
    prediction's batch size is known while the graph is built.
    """
    prediction = reporter.f_locals.get("y_p") if reporter is not None else None
    if prediction is None:
        return True
    return tf.nest.flatten(prediction)[0].shape[0] is not None


def why_loss_seems_local(model: Any, step: Any, run: ReplicaRun) -> str | None:
    """Why the loss of a training step may be a mean over the local batch only.

    Returns:
      A clause for a message, or None when the loss was brought to its share, or is a
      sum, so that adding the replicas' gradients is right.
    """
    if run.scaled_losses or run.replicas == 1 or step.__name__ != "train_step":
        return None
    if type(model).train_step is not keras.Model.train_step:
        return "its train_step is its own and no Keras loss took a mean in it"
    compiled = getattr(model, "_compile_loss", None)
    losses = tf.nest.flatten(getattr(compiled, "_user_loss", None))
    reductions = {getattr(loss, "reduction", "mean") for loss in losses if loss}
    if reductions <= {"sum", "none", None}:
        return None
    return "its loss function returns a scalar, so Keras took no mean"
