"""Scales a replica's loss to its exact share of the loss of the whole batch.

Keras divides a replica's mean loss by the number of replicas R, which is right only if
all replicas have equally many samples and equal weights. It queries R in two functions:
`scale_loss_for_distribution`, after a mean, and `unscale_loss_for_distribution`, for
reports. Only these two get a number that divides differently:

    scale:    1 / R  becomes  D_r / D    D_r: what the replica's mean was divided by
    unscale:  R      becomes  N / n_r    n_r: samples; Keras weights reports by n_r

D is N, or an all-reduce of D_r if D_r is not proportional to the rows of the batch
(`batch_rows`). With S_r the replica's sum, scale gives S_r / D, with the loss of the
whole batch as sum over replicas, and unscale (S_r / D) (N / n_r), with the same mean
weighted by n_r. The factor is applied before backprop: after it, replicas that depend
on each other (synchronized batch normalization) would get wrong gradients.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, MutableSequence
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.frames import frame_of_caller
from tfdp._private.keras_models import ADD_UP, LOSSES, given_losses, layers_within
from tfdp._private.names import current_rank, run_independently
from tfdp.errors import ConfigurationError
from tfdp.seams.replace import instance_attributes
from tfdp.tracing.batch_rows import has_entry_per_row
from tfdp.tracing.batch_weight import Denominator, Kind, note_denominator
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.loss_shares import LossShares, Standing, ancestors
from tfdp.tracing.loss_suspicions import (
    are_values_of_rows,
    is_mean_taken_by_hand,
    is_share,
    reported_standing,
    seems_local,
    warn_about_added_sum,
    warn_about_sum_of_all,
)
from tfdp.tracing.padded_batch import Padding
from tfdp.tracing.run import ReplicaRun, trace_of

LOSS_MODULE = "keras.src.losses.loss"
SCALE = "scale_loss_for_distribution"
UNSCALE = "unscale_loss_for_distribution"

WEIGHTS_CANCEL = (
    "tfdp: the sample weights of a replica are not 0 and their sum is. With "
    "reduction='mean_with_sample_weight' its rows would count for nothing. Use weights "
    "that are not negative, or reduction='sum_over_batch_size'."
)

# The most operations between a loss' result and a user's value that uses it.
MOST_NEAR = 100

SumOverReplicas = Callable[[tf.Tensor, Any], tf.Tensor]


# A float, because Python tries a subclass of float first when it divides 1.0 by it.
class LossReplicaCount(float):
    """R, which divides and casts to the exact factors, in the dtype of the loss."""

    fraction: tf.Tensor
    report_factor: tf.Tensor

    def __rtruediv__(self, other: Any) -> Any:
        return self.fraction

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return self.report_factor


def loss_replica_count(
    run: ReplicaRun, rank: Any, sum_over_replicas: SumOverReplicas
) -> LossReplicaCount | None:
    """R for Keras' loss functions; None for other callers. `sum_over_replicas` is
    called at most once per masked or weighted loss, and never for a plain mean."""
    caller = frame_of_caller()
    if not _is_loss_of_keras(caller, SCALE, UNSCALE):
        return None
    value, shares = caller.f_locals["value"], run.shares[trace_of(rank)]
    # At least 2 for a padded batch, because Keras scales only from 2 on.
    count = LossReplicaCount(max(run.replicas, 2) if run.padding else run.replicas)
    reducer = caller.f_back
    if caller.f_code.co_name == SCALE:
        is_added = _name_of(reducer) == ADD_UP
        if _is_of_shares(shares, reducer) or (
            is_added and is_share(shares, value, "add_loss")
        ):
            # No factor: eager mode could not identify a product of two factors.
            count.fraction = tf.ones([], value.dtype)
        else:
            fraction = _fraction(run, rank, reducer, sum_over_replicas)
            count.fraction = shares.factor(fraction, value.dtype)
        is_mean = _name_of(reducer) == "reduce_values"
        (run.scaled_losses if is_mean else run.added_losses).add(trace_of(rank))
    else:
        subject = "the model's `compute_loss` returned"
        standing = reported_standing(run, rank, value, subject)
        if standing is Standing.LOCAL and seems_local(run, rank, value):
            run.local_losses.add(trace_of(rank))
        if is_mean_taken_by_hand(run, rank, value):
            run.mean_losses.add(trace_of(rank))
        factor = _report_factor(run, rank, value, reducer)
        count.report_factor = shares.report_factor(factor, value.dtype)
    return count


def note_of_one_replica(run: ReplicaRun, rank: Any) -> None:
    """Records the divisor of an unscaled loss for accumulation (`batch_weight`)."""
    caller = frame_of_caller()
    if not _is_loss_of_keras(caller, SCALE):
        return
    denominator = _own_denominator(run, rank, caller.f_back)
    if denominator is None:
        _note_row_mean(run, rank, caller.f_back)
    else:
        noted = tf.stop_gradient(tf.cast(denominator, tf.float32))
        _note_denominator(run, rank, noted, caller.f_back)


def _is_loss_of_keras(caller: FrameType, *names: str) -> bool:
    is_of_losses = caller.f_globals.get("__name__") == LOSS_MODULE
    return is_of_losses and caller.f_code.co_name in names


def _report_factor(
    run: ReplicaRun, rank: Any, value: Any, reporter: FrameType | None
) -> Any:
    """N / n_r, R, or 1: the factor from a share to the reported number."""
    if value.shape.rank:
        return 1.0  # losses of rows, which were not scaled
    # On TPU one graph serves all replicas, and Keras updates reports; elsewhere each is
    # weighted by the replica's rows (`step.reports`).
    is_weighted = isinstance(rank, int) or _is_weighted_by_samples(reporter)
    if run.is_even or not is_weighted:
        return float(run.group_size)
    return tf.math.divide_no_nan(
        run.total_in_group(rank), tf.cast(run.count_of(rank), tf.float32)
    )


def _is_of_shares(shares: LossShares, reducer: FrameType | None) -> bool:
    """Whether the values that Keras averages are shares already."""
    values = _locals(reducer, "reduce_values").get("values")
    if values is None:
        return False
    if not isinstance(values, tf.__internal__.EagerTensor):
        # Usually no factor is near; a full walk would cover the forward pass.
        near = itertools.islice(ancestors(values), MOST_NEAR) if shares else ()
        if not any(map(shares.is_factor, near)):
            return False
    standing = shares.standing_of(values)
    if standing is Standing.MIXED:
        raise ConfigurationError(
            "The call() of a loss, or a function given as one, mixes values of single "
            "rows with the result of a Keras loss object, which is this replica's "
            "share of the global loss already and would be scaled once more. Take the "
            "function of that loss, which gives a value for each row: "
            "keras.losses.mean_squared_error(y, p), not MeanSquaredError()(y, p). Or "
            "rows, or weights, were moved by the gradient of a loss: by the sign of a "
            "gradient by rows they may be (not with run_eagerly=True); else take the "
            "gradient of a sum of values of rows, tf.reduce_sum("
            "keras.losses.mean_squared_error(y, p))."
        )
    return standing is Standing.SHARE


def _fraction(
    run: ReplicaRun,
    rank: Any,
    reducer: FrameType | None,
    sum_over_replicas: SumOverReplicas,
) -> Any:
    """D_r / D."""
    padding, by_weights = run.padding_of(rank), _is_by_weights(reducer)
    if padding is not None:
        is_mask = _mask_of(reducer) is not None
        is_global = not by_weights or padding.has_user_weights or is_mask
        if _weight_denominator(reducer) is None or not is_global:
            _note_row_mean(run, rank, reducer)
            return _fraction_of_rows(reducer, padding)
    denominator = _own_denominator(run, rank, reducer)
    if denominator is None:
        _note_row_mean(run, rank, reducer)
        return run.even_share if run.is_even else run.share_in_group(rank)
    denominator = _not_cancelled(denominator, reducer)
    denominator = tf.stop_gradient(tf.cast(denominator, tf.float32))
    # Dummy rows count neither in the numerator nor in the denominator.
    denominator = run.own_part(rank, denominator)
    counted = denominator
    if padding is not None and not by_weights:
        mask = tf.cast(_mask_of(reducer), tf.float32)
        counted = tf.reduce_sum(mask * padding.weights(mask.shape.rank))
    total = sum_over_replicas(counted, rank)
    _note_denominator(run, rank, total, reducer)
    return tf.math.divide_no_nan(denominator, total)


def _note_denominator(
    run: ReplicaRun, rank: Any, total: tf.Tensor, reducer: FrameType | None
) -> None:
    of = _as_given(reducer, "sample_weight" if _is_by_weights(reducer) else "mask")
    if of is None and reducer is not None:
        values = reducer.f_locals["values"]
        note_denominator(run, rank, Denominator(total, Kind.COUNTED, values))
    else:
        note_denominator(run, rank, Denominator(total, of))


def _note_row_mean(run: ReplicaRun, rank: Any, reducer: FrameType | None) -> None:
    is_mean = _name_of(reducer) == "reduce_values"  # else a penalty, equal on all
    note_denominator(run, rank, Denominator(None, of=None if is_mean else Kind.PENALTY))


def _own_denominator(run: ReplicaRun, rank: Any, reducer: FrameType | None) -> Any:
    """D_r if it is not proportional to the rows of the batch, else None."""
    denominator, given = _weight_denominator(reducer), _locals(reducer, "reduce_values")
    if (
        denominator is None
        and given
        and not has_entry_per_row(run, rank, given["values"])
    ):
        return given["divisor"]
    return denominator


def _not_cancelled(denominator: tf.Tensor, reducer: FrameType | None) -> tf.Tensor:
    """`denominator`, checked at run time: if a replica's weights cancel out while those
    of the batch do not, its rows would be lost."""
    weights = _locals(reducer, "reduce_values").get("sample_weight")
    if not _is_by_weights(reducer) or weights is None:
        return denominator
    size = tf.reduce_sum(tf.abs(weights))
    is_lost = tf.logical_and(tf.equal(denominator, 0), tf.not_equal(size, 0))
    check = tf.debugging.Assert(tf.logical_not(is_lost), [WEIGHTS_CANCEL])
    if check is None:
        return denominator  # in eager mode Assert has raised already
    run_independently(check)  # not ordered after other replicas' checks
    with tf.control_dependencies([check]):
        return tf.identity(denominator)


def _fraction_of_rows(reducer: FrameType | None, padding: Padding) -> tf.Tensor:
    """D_r / D if both are numbers of rows. Keras divided the valid rows' losses by all
    rows, or by the sum of the rows' weights; regularization losses by nothing."""
    given = _locals(reducer, "reduce_values")
    if not given:
        return padding.count / padding.total
    if not _is_by_weights(reducer):
        return padding.rows / padding.total
    entries = tf.size(given["values"]) // padding.rows
    return padding.count / (padding.total * tf.cast(entries, tf.float32))


def _name_of(frame: FrameType | None) -> str:
    return "" if frame is None else frame.f_code.co_name


def _locals(frame: FrameType | None, name: str) -> dict[str, Any]:
    """The local variables of a function with that name; of others none."""
    is_named = frame is not None and frame.f_code.co_name == name
    return frame.f_locals if is_named else {}  # type: ignore[union-attr]


def _is_by_weights(reducer: FrameType | None) -> bool:
    reduction = _locals(reducer, "reduce_values").get("reduction")
    return reduction == "mean_with_sample_weight"


def _mask_of(reducer: FrameType | None) -> Any:
    """The mask of the predictions in the call of `reduce_values`."""
    outer = reducer.f_back if reducer is not None else None
    return _locals(outer, "reduce_weighted_values").get("mask")


def _as_given(reducer: FrameType | None, name: str) -> Any:
    """The loss call's mask or weights, before Keras cast them."""
    outer = reducer.f_back if reducer is not None else None
    caller = outer.f_back if outer is not None else None
    if caller is None or not _is_loss_of_keras(caller, "__call__"):
        return None
    return caller.f_locals.get(name)


def _weight_denominator(reducer: FrameType | None) -> Any:
    """What a mean over weights or unmasked entries was divided by; None: samples."""
    given = _locals(reducer, "reduce_values")
    if _is_by_weights(reducer):
        weights = given.get("sample_weight")
        return None if weights is None else tf.reduce_sum(weights)
    # Regularization and add_loss: per sample.
    mask = _mask_of(reducer) if given else None
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


def _is_weighted_by_samples(reporter: FrameType | None) -> bool:
    """Whether Keras weights the next report by samples, which takes a static size."""
    prediction = reporter.f_locals.get("y_p") if reporter is not None else None
    if prediction is None:
        return True
    return tf.nest.flatten(prediction)[0].shape[0] is not None


class OwnLosses(MutableSequence):
    """The losses of a layer (`add_loss`), a separate list for each replica: eager
    replicas take turns, and one would clear, or count, the losses of another."""

    def __init__(self) -> None:
        self._by_trace: dict[int, list[Any]] = {}

    @property
    def _own(self) -> list[Any]:
        return self._by_trace.setdefault(trace_of(current_rank()), [])

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


@contextlib.contextmanager
def own_losses(model: Any, run: ReplicaRun) -> Iterator[None]:
    """Within this, each replica has its own losses of the layers of `model`."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, keras.Model) and run.replicas > 1:
            for layer in layers_within(model):
                overrides: dict[str, Any] = {LOSSES: OwnLosses()}
                if isinstance(layer, keras.Model):
                    overrides[ADD_UP] = functools.partial(_add_up, layer, run)
                stack.enter_context(instance_attributes(layer, overrides))
        yield


def _add_up(model: keras.Model, run: ReplicaRun, loss: Any) -> Any:
    """Adds a layer's `add_loss` to the model's; values of rows as a sum, a share."""
    rank, given = current_rank(), tf.convert_to_tensor(loss)
    shares = run.shares[trace_of(rank)]
    if shares.standing_of(given) is Standing.LOCAL:
        shapes = {tuple(weight.shape) for weight in model.trainable_weights}
        if given.shape.rank != 0 and are_values_of_rows(run, rank, given, shapes):
            if not given.dtype.is_floating:
                given = tf.cast(given, keras.config.floatx())
            loss = tf.reduce_sum(given) * shares.factor(1.0, given.dtype)
        else:
            warn_about_added_sum(run, rank, given)
    return getattr(type(model), ADD_UP)(model, loss)


@contextlib.contextmanager
def overridden_reductions(model: Any, run: ReplicaRun, step: Any) -> Iterator[None]:
    """Within this, compiled losses with `reduction="sum"` return shares.

    Keras does not scale sums. So row losses are multiplied by a recorded factor 1
    before they are summed. `compute_loss` of the model refuses a loss of rows to which
    a mean or a sum was added.
    """
    # If both are Keras' own, nothing divides a sum.
    stock = keras.Model.compute_loss
    is_stock = is_stock_step(step) and type(model).compute_loss is stock
    with contextlib.ExitStack() as stack:
        losses = given_losses(model) if isinstance(model, keras.Model) else []
        if losses and run.replicas > 1:
            compute = functools.partial(_checked_loss, model.compute_loss, run)
            stack.enter_context(instance_attributes(model, {"compute_loss": compute}))
        # One loss may serve several outputs: override it once.
        for loss in {id(loss): loss for loss in losses}.values():
            if isinstance(loss, keras.losses.Loss) and loss.reduction == "sum":
                call = functools.partial(_losses_of_rows, loss.call, run, is_stock)
                stack.enter_context(instance_attributes(loss, {"call": call}))
        yield


def _losses_of_rows(
    call: Any, run: ReplicaRun, is_stock: bool, *args: Any, **kwargs: Any
) -> Any:
    losses = call(*args, **kwargs)
    is_rows = tf.is_tensor(losses) and losses.shape.rank != 0
    if not is_rows or tf.distribute.in_cross_replica_context():
        return losses  # a scalar may be anything
    rank = current_rank()
    warn_about_sum_of_all(run, rank, losses)
    if is_stock:
        note_denominator(run, rank, Denominator(None, of=Kind.SUM))
    run.scaled_losses.add(trace_of(rank))
    return losses * run.shares[trace_of(rank)].factor(1.0, losses.dtype)


def _checked_loss(compute: Any, run: ReplicaRun, *args: Any, **kwargs: Any) -> Any:
    """Refuses losses of rows to which a mean or sum was added: one device counts it
    once per row of the global batch, and a replica does not have their number then."""
    loss = compute(*args, **kwargs)
    if not tf.is_tensor(loss) or not loss.shape.rank:
        return loss
    warn_about_sum_of_all(run, current_rank(), loss)
    if run.shares[trace_of(current_rank())].standing_of(loss) is Standing.LOCAL:
        return loss
    raise ConfigurationError(
        "A loss with reduction='none' was added to another one that is a mean "
        "or a sum over the batch, which then counts once for each row. Give every "
        "loss reduction='sum_over_batch_size', or 'sum'."
    )
