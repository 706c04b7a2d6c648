"""Scales a replica's loss to its exact share of the loss of the whole batch.

Keras divides a replica's mean loss by the number of replicas R, which is right only if
all replicas have equally many samples and equal weights. The functions in which it does
so are replaced (`tfdp.seams.losses`), and call `ReplicaLosses`:

    scale:    1 / R  becomes  D_r / D    D_r: what the replica's mean was divided by
    unscale:  R      becomes  n / n_r    n_r: samples; Keras weights reports by n_r

D is n, or an all-reduce of D_r if D_r is not proportional to the rows of the batch
(`loss_checks`). With S_r the replica's sum, scale gives S_r / D, with the loss of the
whole batch as sum over replicas, and unscale (S_r / D) (n / n_r), with the same mean
weighted by n_r. The factor is applied before backprop: after it, replicas that depend
on each other (synchronized batch normalization) would get wrong gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import ADD_UP, LOSSES, given_losses, layers_within
from tfdp._private.names import current_rank, run_independently
from tfdp.errors import ConfigurationError
from tfdp.lint.findings import IN_ANY_LAYER, IN_LAYER, IN_LOSS, IN_STEP, Cures
from tfdp.lint.registry import ShareOf, is_of_graph, register
from tfdp.seams.losses import MeanLoss
from tfdp.seams.replace import Override, around, instead
from tfdp.tracing.batch_weight import Denominator, Kind, note_denominator
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.loss_checks import (
    are_values_of_rows,
    has_entry_per_row,
    is_share,
    note_added,
    note_computed,
    reported_standing,
    warn_about_added_sum,
    warn_about_sum_of_all,
    warn_about_weighted_number,
)
from tfdp.tracing.loss_shares import GivenLosses, LossShares, Standing
from tfdp.tracing.rows import PaddedLoss, Rows
from tfdp.tracing.step import Mode, Step

WEIGHTS_CANCEL = (
    "tfdp: the sample weights of a replica are not 0 and their sum is. With "
    "reduction='mean_with_sample_weight' its rows would count for nothing. Use weights "
    "that are not negative, or reduction='sum_over_batch_size'."
)


class ReplicaLosses:
    """Scales the results of Keras' loss functions on one replica of a step.

    Args:
      replicas: the number of replicas of the strategy, on all hosts.
      sum_over_replicas: called with D_r at most once per masked or weighted loss, and
        never for a plain mean.
    """

    def __init__(
        self,
        step: Step,
        rank: Any,
        replicas: int,
        sum_over_replicas: Callable[[tf.Tensor, Any], tf.Tensor],
    ):
        self._step, self._rank, self._replicas = step, rank, replicas
        self._shares = step.trace(rank).shares
        self._sees_all = step.trace(rank).sees_all_rows
        is_alone = replicas == 1 and step.mode is not Mode.PADDED
        self._is_alone = is_alone or self._sees_all
        self._sum_over_replicas = sum_over_replicas

    def scaled_mean(self, loss: MeanLoss) -> Any:
        """This replica's share of the loss: the mean times D_r / D."""
        step, rank = self._step, self._rank
        if self._is_alone:
            _note_own_denominator(step, rank, loss)
            return loss.mean
        step.of(GivenLosses).are_scaled = True
        entries = loss.made_of[0]
        if not entries.shape.rank and len(loss.made_of) > 1:
            warn_about_weighted_number(step, rank, entries, loss.given_weights)
        if _is_of_shares(self._shares, entries):
            return self._unchanged(loss.mean)
        fraction = self._fraction(loss)
        share = _product(loss.mean, self._shares.factor(fraction, loss.mean.dtype))
        if is_of_graph(loss.values):
            register(share, ShareOf(tuple(filter(is_of_graph, loss.made_of))))
        return share

    def scaled_penalty(self, value: Any) -> Any:
        """The sum of a model's penalties, and of what layers add, times n_r / n."""
        step, rank = self._step, self._rank
        if self._is_alone and not self._sees_all:
            _note_penalty(step, rank)
            return value
        step.of(GivenLosses).are_added = True
        fraction = _share_of_rows(step, rank)
        is_scaled = is_share(self._shares, value, "add_loss")
        if not is_scaled:
            _note_penalty(step, rank)
        if self._sees_all:
            from tfdp.step.all_rows import added_to_whole

            # The sum that it becomes a part of is scaled.
            return added_to_whole(step, rank, value, fraction if is_scaled else None)
        if is_scaled:
            return self._unchanged(value)
        return _product(value, self._shares.factor(fraction, value.dtype))

    def reported(self, value: Any) -> Any:
        """A share times n / n_r: a mean that a report weights by rows."""
        step, rank = self._step, self._rank
        if self._replicas == 1 or self._sees_all:
            return value  # the share is the whole
        subject = "the model's `compute_loss` returned"
        reported_standing(step, rank, value, subject)
        factor = _report_factor(step, rank, value)
        return _product(value, self._shares.report_factor(factor, value.dtype))

    def _unchanged(self, share: Any) -> Any:
        return _product(share, tf.ones([], share.dtype))

    def _fraction(self, loss: MeanLoss) -> Any:
        """This replica's part of the denominator, D_r / D."""
        step, rank, trace = self._step, self._rank, self._step.trace(self._rank)
        rows = trace.rows
        if rows.is_padded:
            is_masked = loss.mask is not None
            is_global = (
                not loss.is_by_weights
                or trace.of(PaddedLoss).has_user_weights
                or is_masked
            )
            if _weight_denominator(loss) is None or not is_global:
                _note_mean_of_rows(step, rank)
                return _fraction_of_rows(loss, rows)
        denominator = _own_denominator(step, rank, loss)
        if denominator is None:
            _note_mean_of_rows(step, rank)
            return _share_of_rows(step, rank)
        denominator = _not_cancelled(denominator, loss)
        denominator = tf.stop_gradient(tf.cast(denominator, tf.float32))
        # Dummy rows count neither in the numerator nor in the denominator.
        denominator = rows.part(denominator)
        counted = denominator
        if rows.is_padded and not loss.is_by_weights:
            mask = tf.cast(loss.mask, tf.float32)
            counted = tf.reduce_sum(mask * rows.weights(mask.shape.rank))
        total = self._sum_over_replicas(counted, rank)
        _note_total(step, rank, total, loss)
        return tf.math.divide_no_nan(denominator, total)


def _product(value: Any, factor: Any) -> Any:
    return keras.ops.multiply(value, factor)


def _share_of_rows(step: Step, rank: Any) -> Any:
    return 1.0 / step.group_size if step.is_even else step.share_together(rank)


def _report_factor(step: Step, rank: Any, value: Any) -> Any:
    """n / n_r, or 1: the factor from a share to the reported number."""
    if value.shape.rank:
        return 1.0  # losses of rows, which were not scaled
    if step.is_even:
        return float(step.group_size)
    return tf.math.divide_no_nan(
        step.total_together(rank), tf.cast(step.count_of(rank), tf.float32)
    )


def _is_of_shares(shares: LossShares, values: Any) -> bool:
    """Whether the values that Keras averages are shares already."""
    standing = shares.standing_of(values)
    if standing is Standing.MIXED:
        raise ConfigurationError(
            "The call() of a loss, or a function given as one, mixes values of single "
            "rows with the result of a Keras loss object, which is this replica's "
            "share of the global loss already and would be scaled once more. Take the "
            "function of that loss, which gives a value for each row: "
            "keras.losses.mean_squared_error(y, p), not MeanSquaredError()(y, p). Or "
            "rows, or weights, were moved by the gradient of a loss: by the sign of a "
            "gradient by rows they may be; else take the "
            "gradient of a sum of values of rows, tf.reduce_sum("
            "keras.losses.mean_squared_error(y, p))."
        )
    return standing is Standing.SHARE


def _note_own_denominator(step: Step, rank: Any, loss: MeanLoss) -> None:
    """Records the divisor of an unscaled loss for accumulation (`batch_weight`)."""
    denominator = _own_denominator(step, rank, loss)
    if denominator is None:
        _note_mean_of_rows(step, rank)
    else:
        total = tf.stop_gradient(tf.cast(denominator, tf.float32))
        _note_total(step, rank, total, loss)


def _note_total(step: Step, rank: Any, total: tf.Tensor, loss: MeanLoss) -> None:
    of = loss.given_weights if loss.is_by_weights else loss.given_mask
    if of is None:
        note_denominator(step, rank, Denominator(total, Kind.COUNTED, loss.values))
    else:
        note_denominator(step, rank, Denominator(total, of))


def _note_mean_of_rows(step: Step, rank: Any) -> None:
    note_denominator(step, rank, Denominator(None))


def _note_penalty(step: Step, rank: Any) -> None:
    # Equal on all replicas.
    note_denominator(step, rank, Denominator(None, of=Kind.PENALTY))


def _own_denominator(step: Step, rank: Any, loss: MeanLoss) -> Any:
    """D_r if it is not proportional to the rows of the batch, else None."""
    denominator = _weight_denominator(loss)
    if denominator is None and not has_entry_per_row(step, rank, loss.values):
        return loss.divisor
    return denominator


def _not_cancelled(denominator: tf.Tensor, loss: MeanLoss) -> tf.Tensor:
    """`denominator`, checked at run time: if a replica's weights cancel out while those
    of the batch do not, its rows would be lost."""
    if not loss.is_by_weights or loss.weights is None:
        return denominator
    size = tf.reduce_sum(tf.abs(loss.weights))
    is_lost = tf.logical_and(tf.equal(denominator, 0), tf.not_equal(size, 0))
    check = tf.debugging.Assert(tf.logical_not(is_lost), [WEIGHTS_CANCEL])
    run_independently(check)  # not ordered after other replicas' checks
    with tf.control_dependencies([check]):
        return tf.identity(denominator)


def _fraction_of_rows(loss: MeanLoss, rows: Rows) -> tf.Tensor:
    """D_r / D if both are numbers of rows. Keras divided the valid rows' losses by all
    rows, or by the sum of the rows' weights."""
    if not loss.is_by_weights:
        return rows.size / rows.total
    entries = tf.size(loss.values) // rows.size
    return rows.count / (rows.total * tf.cast(entries, tf.float32))


def _weight_denominator(loss: MeanLoss) -> Any:
    """The sum of weights or unmasked entries that divided a mean; None: samples did."""
    if loss.is_by_weights:
        return None if loss.weights is None else tf.reduce_sum(loss.weights)
    if loss.mask is None:
        return None
    return tf.reduce_sum(tf.cast(loss.mask, tf.float32))


class _LayerLosses(collections.defaultdict[int, list[Any]]):
    """Losses of layers, by the id of the list that Keras appends them to."""

    def __init__(self) -> None:
        super().__init__(list)


class OwnLosses(MutableSequence):
    """The losses of a layer (`add_loss`), a separate list for each replica: replicas
    take turns at a `merge_call`, and one would clear, or count, another's losses."""

    def __init__(self, step: Step, cure: str) -> None:
        self._step, self._cure = step, cure

    @property
    def _own(self) -> list[Any]:
        return self._step.here.of(_LayerLosses)[id(self)]

    def __getitem__(self, place: Any) -> Any:
        return self._own[place]

    def __setitem__(self, place: Any, loss: Any) -> None:
        self._own[place] = loss

    def __delitem__(self, place: Any) -> None:
        del self._own[place]

    def __len__(self) -> int:
        return len(self._own)

    def insert(self, place: int, loss: Any) -> None:
        self._own.insert(place, loss)
        note_added(self._step, current_rank(), loss, self._cure)


def added_loss_overrides(model: Any, step: Step) -> Iterator[Override]:
    """Overrides that give each replica its own losses of the layers of `model`."""
    if not isinstance(model, keras.Model) or step.replicas == 1:
        return
    for layer in layers_within(model):
        cure = IN_LAYER.format(f"the layer {layer.name!r}, whose loss it is,")
        own = OwnLosses(step, IN_ANY_LAYER if layer is model else cure)
        yield Override(layer, LOSSES, instead(own))
        if isinstance(layer, keras.Model):
            yield Override(layer, ADD_UP, around(_add_up, layer, step))


def _add_up(add_up: Any, model: keras.Model, step: Step, loss: Any) -> Any:
    """Adds a layer's `add_loss` to the model's; values of rows as a sum, a share."""
    rank, given = current_rank(), tf.convert_to_tensor(loss)
    shares = step.trace(rank).shares
    if shares.standing_of(given) is Standing.LOCAL:
        shapes = {tuple(weight.shape) for weight in model.trainable_weights}
        if given.shape.rank != 0 and are_values_of_rows(step, rank, given, shapes):
            if not given.dtype.is_floating:
                given = tf.cast(given, keras.config.floatx())
            loss = tf.reduce_sum(given) * shares.factor(1.0, given.dtype)
        else:
            warn_about_added_sum(step, rank, given)
    return add_up(loss)


def reduction_overrides(model: Any, step: Step, fn: Any) -> Iterator[Override]:
    """Overrides that make compiled losses with `reduction="sum"` return shares.

    Keras does not scale sums. So row losses are multiplied by a recorded factor 1
    before they are summed. `compute_loss` of the model refuses a loss of rows to which
    a mean or a sum was added.
    """
    # If both are Keras' own, nothing divides a sum.
    stock = keras.Model.compute_loss
    is_stock = is_stock_step(fn) and type(model).compute_loss is stock
    losses = given_losses(model) if isinstance(model, keras.Model) else []
    if step.of(Cures).other is IN_LOSS and not is_stock_step(fn):
        step.of(Cures).other = IN_STEP
    if losses and step.replicas > 1:
        yield Override(model, "compute_loss", around(_checked_loss, step))
    # One loss may serve several outputs: override it once.
    for loss in {id(loss): loss for loss in losses}.values():
        if isinstance(loss, keras.losses.Loss) and loss.reduction == "sum":
            yield Override(loss, "call", around(_losses_of_rows, step, is_stock))


def _losses_of_rows(
    call: Any, step: Step, is_stock: bool, *args: Any, **kwargs: Any
) -> Any:
    losses = call(*args, **kwargs)
    is_rows = tf.is_tensor(losses) and losses.shape.rank != 0
    if not is_rows or tf.distribute.in_cross_replica_context():
        return losses  # a scalar may be anything
    rank = current_rank()
    if is_stock:
        note_denominator(step, rank, Denominator(None, of=Kind.SUM))
    if step.here.sees_all_rows:
        return losses
    warn_about_sum_of_all(step, rank, losses)
    step.of(GivenLosses).are_scaled = True
    return losses * step.trace(rank).shares.factor(1.0, losses.dtype)


def _checked_loss(compute: Any, step: Step, /, *args: Any, **kwargs: Any) -> Any:
    """Refuses losses of rows to which a mean or sum was added: one device counts it
    once per row of the global batch, and a replica does not have their number then."""
    loss = compute(*args, **kwargs)
    if not tf.distribute.in_cross_replica_context():
        note_computed(step, current_rank(), loss)
    if not tf.is_tensor(loss) or not loss.shape.rank:
        return loss
    warn_about_sum_of_all(step, current_rank(), loss)
    if step.here.shares.standing_of(loss) is Standing.LOCAL:
        return loss
    raise ConfigurationError(
        "A loss with reduction='none' was added to another one that is a mean "
        "or a sum over the batch, which then counts once for each row. Give every "
        "loss reduction='sum_over_batch_size', or 'sum'."
    )
