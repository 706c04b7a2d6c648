"""Warns of losses that were probably not scaled to their share of the global one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import given_losses
from tfdp._private.names import in_compiled_function
from tfdp.errors import ConfigurationError
from tfdp.tracing.batch_rows import has_rows_of
from tfdp.tracing.dependencies import are_reduced, batch_keys, is_of_own_rows
from tfdp.tracing.keras_steps import is_stock_step, name_of_step
from tfdp.tracing.loss_shares import LossShares, Standing, ancestors
from tfdp.tracing.replica_invariance import GATHERED_ROWS, graph_tensors, is_named
from tfdp.tracing.row_means import SELECTS, is_plain_mean, is_sum_over_rows, rows_of
from tfdp.tracing.run import ReplicaRun, trace_of

# Ops after which a mean is still a mean, or a term of the loss.
TERMS = {"AddN", "AddV2", "Cast", "Identity", "Neg", "Reshape", "Squeeze", "Sub"}


def is_share(shares: LossShares, loss: Any, caller: str) -> bool:
    """Whether `loss` is this replica's share of the global loss; ConfigurationError if
    one part of it is and another is not."""
    standing = shares.standing_of(loss)
    if standing is Standing.MIXED:
        raise ConfigurationError(
            f"{caller} was given a loss with one part that is this replica's share of "
            "the global loss already (a Keras loss took its mean, or local_mean or "
            "local_sum was called), and another part is not, or that is not a plain "
            "sum of such parts. Call tfdp.losses.local_mean(...) on the other part "
            "alone, and add the Keras loss to its result."
        )
    return standing is Standing.SHARE


def reported_standing(run: ReplicaRun, rank: Any, loss: Any, subject: str) -> Standing:
    """The `Standing` of a loss that is reported; warns where a part is no share.
    `subject` starts the warning's sentence, such as "the step returned"."""
    shares = run.shares[trace_of(rank)]
    standing = shares.standing_of(loss)
    if standing is Standing.MIXED:
        run.suspicions.add(
            f"{subject} a loss with one part that is the replica's share of the "
            "global loss (a Keras loss took its mean) and another part that is not, "
            "such as a mean taken by hand, a penalty on weights, or sum(self.losses). "
            "If gradients are taken of it, that part counts once for each replica: "
            "scale it with tfdp.losses.local_mean(...), or, if it is a sum over rows, "
            "tfdp.losses.local_sum(...)"
        )
    elif standing is Standing.SHARE and shares.has_constant(loss):
        run.suspicions.add(
            f"{subject} a loss to which a constant was added. It changes no gradient, "
            "but the reported number contains it once for each replica: scale it with "
            "tfdp.losses.local_mean(tf.constant(...))"
        )
    return standing


def warn_about_added_sum(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> None:
    """Warns of an `add_loss` that seems to be a sum over the replica's rows."""
    if run.group_size == 1 or isinstance(loss, tf.__internal__.EagerTensor):
        return
    rows = rows_of(run, rank)
    if rows.keys and is_sum_over_rows(loss, rows):
        run.suspicions.add(
            "a layer gave add_loss what looks like a sum over its rows, which was "
            "taken for their mean. Give it the mean, or, to add the replicas' sums, "
            "tfdp.losses.local_sum(loss)"
        )


def warn_about_sum_of_all(run: ReplicaRun, rank: Any, losses: tf.Tensor) -> None:
    """Warns of row losses, to be added up, that are equal on all replicas."""
    if run.group_size == 1 or isinstance(losses, tf.__internal__.EagerTensor):
        return
    keys = batch_keys(run.batches, trace_of(rank))
    if keys and are_reduced([losses], keys, or_of_gathered=True)[0]:
        run.suspicions.add(
            "a loss with reduction='sum' or 'none' depends on the rows of all replicas "
            "(tfdp.losses.all_rows): each replica has the same values, and each counts "
            "once for each replica. Take those of this replica's rows, "
            "tfdp.losses.own_rows(values, y)"
        )


def note_local_gradients(
    run: ReplicaRun, rank: Any, gradients: Sequence[Any], optimizer: Any
) -> None:
    """Records an optimizer that gets gradients of a loss that is no share."""
    trace = trace_of(rank)
    if run.group_size == 1 or not run.batches or trace != min(run.batches):
        return
    # The last gradient is the nearest to the loss.
    parts = tf.nest.flatten(list(gradients)[-1:], expand_composites=True)
    part = next(iter(parts), None)
    if part is None or isinstance(part, tf.__internal__.EagerTensor):
        return
    is_share = run.shares[trace].depends_on_factor(part)
    if not is_share and is_of_own_rows(run.batches, trace, part):
        run.local_optimizers.add(str(optimizer.name))


def is_mean_taken_by_hand(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> bool:
    """Whether a term of `loss`, of a graph, is an unscaled mean over rows."""
    if loss.shape.rank != 0 or isinstance(loss, tf.__internal__.EagerTensor):
        return False
    return _has_mean(run, rank, loss)


def are_values_of_rows(
    run: ReplicaRun,
    rank: Any,
    loss: tf.Tensor,
    shapes_of_weights: Collection[tuple[int, ...]],
) -> bool:
    """Whether a value for `add_loss`, of rank 1 or more, has one entry per row: Keras
    adds those up. A penalty on a weight may have one of `shapes_of_weights`."""
    batch = run.batches.get(trace_of(rank), [])
    rows = batch[0].shape[0] if batch else None
    length = loss.shape[0] if loss.shape.rank else None
    is_eager = isinstance(loss, tf.__internal__.EagerTensor)
    if is_eager and rows is None:
        rows = run.count_of(rank)
    has_graph = not is_eager and not in_compiled_function()
    if length is not None and length != rows:
        if not rows or length % rows:
            return False
        if has_graph:
            return has_rows_of(loss, batch, deeply=True)
        run.suspicions.add(
            f"a layer gave add_loss a tensor of shape {tuple(loss.shape)} on a replica "
            f"of {rows} rows. With run_eagerly=True or jit_compile=True tfdp cannot "
            "determine whether it has several values of each row, and took their sum "
            "for a mean over the rows. Give it one value for each row, or a number: "
            "the mean over the rows, or tfdp.losses.local_sum(...) of a sum"
        )
        return False
    if not has_graph:
        if tuple(loss.shape) in shapes_of_weights:
            run.suspicions.add(
                f"a layer gave add_loss a tensor of shape {tuple(loss.shape)}, which "
                "is both that of a weight and as long as the replica has rows. With "
                "run_eagerly=True or jit_compile=True it was taken for values of "
                "rows. Give add_loss the sum of a penalty, "
                "keras.ops.sum(penalty), or leave jit_compile and run_eagerly out"
            )
        return True
    is_made = not batch or is_of_own_rows(run.batches, trace_of(rank), loss)
    return is_made and not _has_mean(run, rank, loss)


def _has_mean(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> bool:
    shares = run.shares[trace_of(rank)]
    rows = rows_of(run, rank)
    todo = [loss]
    for tensor in graph_tensors(todo):
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op.type == "Mean":
            if is_plain_mean(tensor, rows):
                return True
        elif op.type in TERMS:
            todo += inputs
        elif op.type in SELECTS:
            todo += inputs[1:]
        elif op.type == "Mul" and not any(map(shares.is_factor, inputs)):
            # A mean times the number of rows is a sum.
            is_constant = any(tf.get_static_value(one) is not None for one in inputs)
            todo += inputs if is_constant else []
    return False


def seems_local(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> bool:
    """Whether `loss`, no share, depends on rows and is not a sum over own rows."""
    if loss.shape.rank != 0:
        return False
    if isinstance(loss, tf.__internal__.EagerTensor):
        return True  # eager values do not show what they depend on
    if run.batches and trace_of(rank) != min(run.batches):
        return False  # one replica is enough: the check walks the whole model
    if is_of_own_rows(run.batches, trace_of(rank), loss):
        return not is_sum_over_rows(loss, rows_of(run, rank))
    return any(is_named(one, GATHERED_ROWS) for one in ancestors(loss))


def why_loss_seems_local(model: Any, step: Any, run: ReplicaRun) -> str | None:
    """Why the loss of a training step may be a mean over the local batch only, a clause
    for a message; None when it is scaled to its share or is a sum."""
    if run.group_size == 1 or name_of_step(step) != "train_step":
        return None
    if run.scaled_losses:
        names = ", ".join(sorted(map(repr, run.local_optimizers)))
        if not names or is_stock_step(step):
            return None
        return (
            "of one loss of its train_step Keras took the mean, and of another one, "
            f"whose gradients go to the optimizer {names}, it did not"
        )
    own = "its {} is its own and no Keras loss took a mean in it"
    if not is_stock_step(step):
        return None if run.added_losses else own.format("train_step")
    losses = filter(None, given_losses(model))
    reductions = {getattr(loss, "reduction", "mean") for loss in losses}
    if reductions <= {"sum", "none", None}:
        if not reductions:  # only layers, or `compute_loss`, produce losses
            is_own = type(model).compute_loss is not keras.Model.compute_loss
            return own.format("compute_loss") if is_own and run.local_losses else None
        if not run.mean_losses:
            return None  # Keras took none for a number
        return (
            "its loss takes a mean over all rows itself, and Keras none with "
            f"reduction={'sum' if 'sum' in reductions else 'none'!r}"
        )
    return "its loss function returns a scalar, so Keras took no mean"
