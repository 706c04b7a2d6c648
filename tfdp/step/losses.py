"""The exact share of a replica's loss in the loss of the whole batch.

Keras divides a replica's mean loss by the number of replicas R, which is right only
when every replica has as many samples, and as much weight, as the others. It asks the
strategy for R in two functions: `scale_loss_for_distribution`, right after a mean was
taken, and `unscale_loss_for_distribution`, when a loss is reported. To these two, and
to nobody else, the strategy answers with a number that knows better:

    scale:    1 / R  becomes  D_r / D    D_r: what the replica's mean was divided by
    unscale:  R      becomes  N / n_r    n_r: samples; Keras weights reports by n_r

D is N or asked of all replicas: the graph tells whether D_r goes with the rows of the
batch (`batch_rows`). A loss that is a share already (`loss_shares`) is not scaled once
more: Keras adds a Keras loss that a layer took and gave to `add_loss` to the model's.

With S_r the replica's sum, scale gives S_r / D, whose sum over replicas is the loss of
the whole batch, for masked and weighted means as well as plain ones. Unscale gives
(S_r / D) (N / n_r), whose mean weighted by n_r is the same. The factor stands on the
loss, before backprop: behind it, replicas that depend on each other (synchronised batch
normalization) would get wrong gradients.
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
from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import ADD_UP, LOSSES, given_losses, layers_within
from tfdp._private.names import current_rank, run_independently
from tfdp.errors import ConfigurationError
from tfdp.tracing.batch_rows import goes_with_rows
from tfdp.tracing.batch_weight import Denominator, Kind, note_denominator
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.loss_shares import LossShares, Standing, ancestors
from tfdp.tracing.loss_suspicions import (
    are_values_of_rows,
    is_mean_taken_by_hand,
    is_share,
    reported_standing,
    seems_local,
    suspect_added_sum,
    suspect_sum_of_all,
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

# How many operations the result of a loss is away from what a program makes of it.
MOST_NEAR = 100

SumOverReplicas = Callable[[tf.Tensor, Any], tf.Tensor]


# A float, because Python asks a subclass of float first when it divides 1.0 by it.
class LossReplicaCount(float):
    """R, which divides and casts to the exact factors of one replica's loss.

    The factors are in the loss' own type: casting them makes no other tensor of them.
    """

    fraction: tf.Tensor
    report_factor: tf.Tensor

    def __rtruediv__(self, other: Any) -> Any:
        return self.fraction

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return self.report_factor


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
    asker = frame_of_caller()
    if not _is_loss_of_keras(asker, SCALE, UNSCALE):
        return None
    value, shares = asker.f_locals["value"], run.shares[trace_of(rank)]
    count = _replica_count(run)
    if asker.f_code.co_name == SCALE:
        if _is_of_shares(shares, asker.f_back) or _is_added_share(
            shares, value, asker.f_back
        ):
            # No factor: in eager mode a product of two of them is told by neither.
            count.fraction = tf.ones([], value.dtype)
        else:
            fraction = _fraction(run, rank, asker.f_back, sum_over_replicas)
            count.fraction = shares.factor(fraction, value.dtype)
        if _name_of(asker.f_back) == "reduce_values":
            run.scaled_losses.add(trace_of(rank))
        else:
            run.added_losses.add(trace_of(rank))
    else:
        who = "the model's `compute_loss` returned"
        standing = reported_standing(run, rank, value, who)
        if standing is Standing.LOCAL and seems_local(run, rank, value):
            run.local_losses.add(trace_of(rank))
        if is_mean_taken_by_hand(run, rank, value):
            run.mean_losses.add(trace_of(rank))
        factor = _report_factor(run, rank, value, asker.f_back)
        count.report_factor = shares.report_factor(factor, value.dtype)
    return count


def note_of_one_replica(run: ReplicaRun, rank: Any) -> None:
    """Notes what a loss was divided by where nothing is to be scaled.

    An accumulation weighs its batches by it; see `tracing.batch_weight`.
    """
    asker = frame_of_caller()
    if not _is_loss_of_keras(asker, SCALE):
        return
    denominator = _own_denominator(run, rank, asker.f_back)
    if denominator is None:
        _note_row_mean(run, rank, asker.f_back)
    else:
        noted = tf.stop_gradient(tf.cast(denominator, tf.float32))
        _note_denominator(run, rank, noted, asker.f_back)


def _is_loss_of_keras(asker: FrameType, *names: str) -> bool:
    is_of_losses = asker.f_globals.get("__name__") == LOSS_MODULE
    return is_of_losses and asker.f_code.co_name in names


def _replica_count(run: ReplicaRun) -> LossReplicaCount:
    """R; at least 2 for a padded batch, because Keras scales only from 2 on.

    The number itself is then not used: `fraction` and `report_factor` are set.
    """
    return LossReplicaCount(max(run.replicas, 2) if run.padding else run.replicas)


def _report_factor(
    run: ReplicaRun, rank: Any, value: Any, reporter: FrameType | None
) -> Any:
    """N / n_r, R, or 1: what makes of a share the number that is reported."""
    if value.shape.rank:
        return 1.0  # the losses of single rows: none was scaled
    # On TPU one graph serves all replicas, and reports are updated as Keras does it;
    # elsewhere each is weighted by the replica's rows (`step.reports`).
    is_weighted = isinstance(rank, int) or _is_weighted_by_samples(reporter)
    if run.is_even or not is_weighted:
        return float(run.group_size)
    return tf.math.divide_no_nan(
        run.total_in_group(rank), tf.cast(run.count_of(rank), tf.float32)
    )


def _is_of_shares(shares: LossShares, reducer: FrameType | None) -> bool:
    """Whether the values of which Keras took the mean are shares already.

    Raises:
      ConfigurationError: when a part of them is, and would be scaled once more.
    """
    if _name_of(reducer) != "reduce_values" or reducer is None:
        return False
    values = reducer.f_locals["values"]
    if not isinstance(values, tf.__internal__.EagerTensor):
        # Mostly none is near, and all that values are made of is a whole forward pass.
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


def _is_added_share(shares: LossShares, value: Any, reducer: FrameType | None) -> bool:
    """Whether what a layer gave `add_loss` is a share already."""
    return _name_of(reducer) == ADD_UP and is_share(shares, value, "add_loss")


def _fraction(
    run: ReplicaRun,
    rank: Any,
    reducer: FrameType | None,
    sum_over_replicas: SumOverReplicas,
) -> Any:
    """D_r / D."""
    padding = run.padding_of(rank)
    if padding is not None:
        weights = _weight_denominator(reducer)
        if not _is_global(weights, reducer, padding):
            _note_row_mean(run, rank, reducer)
            return _fraction_of_rows(reducer, padding)
    denominator = _own_denominator(run, rank, reducer)
    if denominator is None:
        _note_row_mean(run, rank, reducer)
        return run.even_share if run.is_even else run.share_in_group(rank)
    denominator = _not_cancelled(denominator, reducer)
    denominator = tf.stop_gradient(tf.cast(denominator, tf.float32))
    # A borrowed row is nobody's loss: neither above the line nor below it.
    denominator = run.own_part(rank, denominator)
    counted = denominator
    if padding is not None and _reduction(reducer) != "mean_with_sample_weight":
        mask = tf.cast(_mask_of(reducer), tf.float32)
        counted = tf.reduce_sum(mask * padding.weights(mask.shape.rank))
    total = sum_over_replicas(counted, rank)
    _note_denominator(run, rank, total, reducer)
    return tf.math.divide_no_nan(denominator, total)


def _note_denominator(
    run: ReplicaRun, rank: Any, total: tf.Tensor, reducer: FrameType | None
) -> None:
    name = "mask"
    if _reduction(reducer) == "mean_with_sample_weight":
        name = "sample_weight"
    of = _as_given(reducer, name)
    if of is None and reducer is not None:
        values = reducer.f_locals["values"]
        note_denominator(run, rank, Denominator(total, Kind.COUNTED, values))
    else:
        note_denominator(run, rank, Denominator(total, of))


def _note_row_mean(run: ReplicaRun, rank: Any, reducer: FrameType | None) -> None:
    is_mean = _name_of(reducer) == "reduce_values"  # else a penalty, alike in all
    note_denominator(run, rank, Denominator(None, of=None if is_mean else Kind.PENALTY))


def _own_denominator(run: ReplicaRun, rank: Any, reducer: FrameType | None) -> Any:
    """D_r, where it does not go with the rows of the batch; None: it does."""
    denominator = _weight_denominator(reducer)
    if denominator is None and not _goes_with_rows(run, rank, reducer):
        return reducer.f_locals["divisor"]  # type: ignore[union-attr]
    return denominator


def _not_cancelled(denominator: tf.Tensor, reducer: FrameType | None) -> tf.Tensor:
    """`denominator`, by which Keras divides; where it is 0 Keras' mean is 0.

    On one device that is the batch's loss. Of a replica whose weights cancel out, while
    those of the batch do not, it has lost what the rows bring.
    """
    weights = None if reducer is None else reducer.f_locals.get("sample_weight")
    if _reduction(reducer) != "mean_with_sample_weight" or weights is None:
        return denominator
    size = tf.reduce_sum(tf.abs(weights))
    is_lost = tf.logical_and(tf.equal(denominator, 0), tf.not_equal(size, 0))
    check = tf.debugging.Assert(tf.logical_not(is_lost), [WEIGHTS_CANCEL])
    if check is None:
        return denominator  # an eager one has raised already
    run_independently(check)  # it need not wait for what other replicas check
    with tf.control_dependencies([check]):
        return tf.identity(denominator)


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


def _goes_with_rows(run: ReplicaRun, rank: Any, reducer: FrameType | None) -> bool:
    """Whether D_r is in proportion to the replica's rows of the batch."""
    if reducer is None or _name_of(reducer) != "reduce_values":
        return True
    return goes_with_rows(run, rank, reducer.f_locals["values"])


def _name_of(frame: FrameType | None) -> str:
    return "" if frame is None else frame.f_code.co_name


def _reduction(reducer: FrameType | None) -> Any:
    if reducer is None or _name_of(reducer) != "reduce_values":
        return None
    return reducer.f_locals.get("reduction")


def _mask_of(reducer: FrameType | None) -> Any:
    """The mask of the predictions that `reduce_values` was called for."""
    outer = reducer.f_back if reducer is not None else None
    if outer is None or outer.f_code.co_name != "reduce_weighted_values":
        return None
    return outer.f_locals.get("mask")


def _as_given(reducer: FrameType | None, name: str) -> Any:
    """The mask or the weights of the loss that was called, before Keras cast them."""
    outer = reducer.f_back if reducer is not None else None
    caller = outer.f_back if outer is not None else None
    if caller is None or not _is_loss_of_keras(caller, "__call__"):
        return None
    return caller.f_locals.get(name)


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
    """Whether Keras weights the report that follows by the replica's samples.

    The model's loss always is. The loss of one of several outputs is only when the
    prediction's batch size is known while the graph is built.
    """
    prediction = reporter.f_locals.get("y_p") if reporter is not None else None
    if prediction is None:
        return True
    return tf.nest.flatten(prediction)[0].shape[0] is not None


# What layers give `add_loss`, kept apart by replica.
#
# Keras keeps the losses of a layer in one list, which a model clears when it is called.
# In eager mode replicas take turns wherever they sum something, such as the statistics
# of synchronised batch normalization: one would clear the losses that another has
# added, or count them as its own.
#
# A layer may give a value for each row. Keras' trainer adds these up, so that each
# replica has a part of their sum, which is its share of the loss already.


class OwnLosses(MutableSequence):
    """A list for each trace of a run, used as the calling replica's own."""

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
        """As `list.insert`, and with it `append` and `extend`."""
        self._own.insert(place, loss)


@contextlib.contextmanager
def own_losses(model: Any, run: ReplicaRun) -> Iterator[None]:
    """While this lasts, each replica has its own losses of the layers of `model`."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, keras.Model) and run.replicas > 1:
            for layer in layers_within(model):
                led: dict[str, Any] = {LOSSES: OwnLosses()}
                if isinstance(layer, keras.Model):
                    led[ADD_UP] = functools.partial(_add_up, layer, run)
                stack.enter_context(instance_attributes(layer, led))
        yield


def _add_up(model: keras.Model, run: ReplicaRun, loss: Any) -> Any:
    """The number that `model` makes of what a layer gave `add_loss`."""
    rank, given = current_rank(), tf.convert_to_tensor(loss)
    shares = run.shares[trace_of(rank)]
    if shares.standing_of(given) is Standing.LOCAL:
        shapes = {tuple(weight.shape) for weight in model.trainable_weights}
        if given.shape.rank != 0 and are_values_of_rows(run, rank, given, shapes):
            if not given.dtype.is_floating:
                given = tf.cast(given, keras.config.floatx())
            loss = tf.reduce_sum(given) * shares.factor(1.0, given.dtype)
        else:
            suspect_added_sum(run, rank, given)
    return getattr(type(model), ADD_UP)(model, loss)


# Compiled losses with `reduction="sum"` or "none", told apart from means.
#
# Keras asks for the number of replicas where it takes a mean, and nobody where it takes
# a sum. So the losses of the rows are multiplied by 1 before they are summed, by a
# factor that is noted (`tracing.loss_shares`): what a step of one's own makes of the
# sum, or reports of it, is then added over the replicas. Losses of rows are refused
# where a mean or a sum was added to them, whoever asks for the loss.


@contextlib.contextmanager
def overridden_reductions(model: Any, run: ReplicaRun, step: Any) -> Iterator[None]:
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
