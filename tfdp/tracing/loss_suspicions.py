"""Losses that look as if nobody brought them to their share, told from the graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.keras_models import given_losses
from tfdp.errors import ConfigurationError
from tfdp.tracing.batch_rows import reduced_axes
from tfdp.tracing.keras_steps import is_stock_step, name_of_step
from tfdp.tracing.loss_shares import LossShares, Standing
from tfdp.tracing.own_rows import batch_keys, is_made_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = [
    "is_number_for_all_rows",
    "is_share",
    "is_sum_over_rows",
    "reported_standing",
    "suspect_added_sum",
    "why_loss_seems_local",
]

# What a sum is followed by on its way to `add_loss`: none of it divides by the rows.
PASSING = {
    *("AddN", "AddV2", "Cast", "ExpandDims", "Identity", "Mul", "Neg", "Pack"),
    *("Reshape", "Squeeze", "StridedSlice", "Sub", "Transpose"),
}
QUOTIENTS = {"RealDiv", "DivNoNan", "Div"}
SELECTS = {"Select", "SelectV2"}
# Which of their inputs have the rows that they add up.
SUMS_OF_ROWS = {
    **dict.fromkeys(("L2Loss", "SegmentSum", "UnsortedSegmentSum"), slice(1)),
    **dict.fromkeys(("Bincount", "DenseBincount", "RaggedBincount"), slice(None)),
    "ScatterNd": slice(2),
    "TensorScatterAdd": slice(1, 3),
}


def is_share(shares: LossShares, loss: Any, caller: str) -> bool:
    """Whether `loss` is this replica's share of the global loss already.

    Raises:
      ConfigurationError: when one part of it is and another is not.
    """
    standing = shares.standing_of(loss)
    if standing is Standing.MIXED:
        raise ConfigurationError(
            f"{caller} was given a loss of which one part is this replica's share of "
            "the global loss already (a Keras loss took its mean, or local_mean or "
            "local_sum was called), and another part is not, or that is not a plain "
            "sum of such parts. Call tfdp.losses.local_mean(...) on the part that was "
            "taken by hand alone, and add the Keras loss to its result."
        )
    return standing is Standing.SHARE


def reported_standing(run: ReplicaRun, rank: Any, loss: Any, who: str) -> Standing:
    """What `loss`, which is reported, is; notes where a part of it is no share.

    Args:
      run: the strategy's current run.
      rank: the calling replica.
      loss: a number.
      who: was given the loss, or returned it: the beginning of a sentence.
    """
    shares = run.shares[trace_of(rank)]
    standing = shares.standing_of(loss)
    if standing is Standing.MIXED:
        run.suspicions.add(
            f"{who} a loss of which one part is the replica's share of the global loss "
            "(a Keras loss took its mean) and another part is not, such as a mean that "
            "was taken by hand, a penalty on weights, or sum(self.losses). If "
            "gradients are taken of it, that part counts once for each replica: bring "
            "it to its share with tfdp.losses.local_mean(...)"
        )
    elif standing is Standing.SHARE and shares.has_constant(loss):
        run.suspicions.add(
            f"{who} a loss to which a constant was added. It moves no weight, but the "
            "number that is reported holds it once for each replica: bring it to its "
            "share with tfdp.losses.local_mean(tf.constant(...))"
        )
    return standing


def suspect_added_sum(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> None:
    """Notes a loss for `add_loss` that seems to be a sum over the replica's rows."""
    if run.group_size == 1 or isinstance(loss, tf.__internal__.EagerTensor):
        return
    keys = batch_keys(run.batches, trace_of(rank))
    if keys and is_sum_over_rows(loss, keys):
        run.suspicions.add(
            "a layer gave add_loss what looks like a sum over its rows, which was "
            "taken for their mean. Give it the mean, or, to add the replicas' sums, "
            "tfdp.losses.local_sum(loss)"
        )


def is_number_for_all_rows(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> bool:
    """Whether `loss` is one number for all rows, and no sum over them, in graphs."""
    if loss.shape.rank != 0 or isinstance(loss, tf.__internal__.EagerTensor):
        return False
    return not is_sum_over_rows(loss, batch_keys(run.batches, trace_of(rank)))


def is_sum_over_rows(loss: tf.Tensor, batch: set[Any]) -> bool:
    """Whether a term of `loss` is a sum over rows that nothing divides by their number.

    Args:
      loss: a tensor of the graph being built.
      batch: the keys (`key_of`) of the tensors that the replica was given.
    """
    todo = [loss]
    while todo:
        tensor = outermost(todo.pop())
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if is_exchanged(tensor):
            continue
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op.type in QUOTIENTS:
            if not _is_number_of_rows(inputs[1], inputs[0]):
                todo.append(inputs[0])
        elif op.type == "Sum":
            is_stack = inputs[0].op.type == "Pack"  # of terms, not of rows
            is_over_rows = 0 in (reduced_axes(inputs) or ()) and not is_stack
            if is_over_rows and is_made_of(inputs[0], batch):
                return True
            todo.append(inputs[0])
        elif op.type in PASSING:
            todo += inputs
        elif op.type in SELECTS:
            todo += inputs[1:]
        elif any(is_made_of(one, batch) for one in _added_along_rows(op)):
            return True
    return False


def _added_along_rows(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs of an operation, other than Sum, that it adds up along their rows."""
    inputs = list(op.inputs)
    if op.type == "MatMul":
        first, second = inputs
        # Of each the axis that both have in common is its rows, or its columns.
        return [first] * op.get_attr("transpose_a") + [second] * (
            not op.get_attr("transpose_b")
        )
    if op.type == "Einsum":
        given, made = op.get_attr("equation").decode().split("->")
        labels = zip(given.split(","), inputs, strict=True)
        return [one for label, one in labels if label[:1] not in ("", ".", *made)]
    return inputs[SUMS_OF_ROWS[op.type]] if op.type in SUMS_OF_ROWS else []


def _is_number_of_rows(divisor: tf.Tensor, total: tf.Tensor) -> bool:
    """Whether it is taken from data, or from the shape of what was added up."""
    number = tf.get_static_value(divisor)
    if number is None:
        return True
    while total.op.type in PASSING and len(total.op.inputs) == 1:
        total = total.op.inputs[0]
    shape = total.op.inputs[0].shape if total.op.type == "Sum" else tf.TensorShape([])
    return bool(shape.rank) and number in (shape[0], shape.num_elements())


def why_loss_seems_local(model: Any, step: Any, run: ReplicaRun) -> str | None:
    """Why the loss of a training step may be a mean over the local batch only.

    Returns:
      A clause for a message, or None when the loss was brought to its share, or is a
      sum, so that adding the replicas' gradients is right.
    """
    if run.group_size == 1 or name_of_step(step) != "train_step" or run.scaled_losses:
        return None
    if not is_stock_step(step):
        if run.added_losses:
            return None
        return "its train_step is its own and no Keras loss took a mean in it"
    losses = filter(None, given_losses(model))
    reductions = {getattr(loss, "reduction", "mean") for loss in losses}
    if reductions <= {"sum", "none", None}:
        if not run.number_losses:
            return None
        return (
            "its loss returns a number for all rows, of which Keras takes no mean with "
            f"reduction={'sum' if 'sum' in reductions else 'none'!r}"
        )
    return "its loss function returns a scalar, so Keras took no mean"
