"""Decides, refuses and reports by the analysis of a step's losses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import given_losses
from tfdp._private.names import graphs_inside, in_compiled_function, is_loop_graph
from tfdp.errors import ConfigurationError
from tfdp.lint.findings import (
    COUNTED,
    FOR_METRICS,
    IN_LOSS,
    IN_STEP,
    Cures,
    change_of_gradients,
    crossing_of,
    is_no_mean,
    no_mean,
    past_op,
    unscaled_part,
)
from tfdp.lint.registry import is_of_graph
from tfdp.lint.values import FIXED, Term, Value
from tfdp.tracing.keras_steps import is_stock_step, name_of_step
from tfdp.tracing.loss_shares import GivenLosses, LossShares, Standing, standing_of
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import MetricNotes

IN_LIBRARY = "if a library computes it, see docs/own-losses.md"
MIXED = (
    "{subject} a loss with one part that is the replica's share of the global loss (a "
    "Keras loss took its mean) and another part that is not, such as a mean taken by "
    "hand, a penalty on weights, or sum(self.losses), which counts once for each "
    "replica. Scale that part with tfdp.losses.local_mean(part), or, if it is a sum "
    f"over rows, tfdp.losses.local_sum(part); {IN_LIBRARY}"
)


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
            f"alone, and add the Keras loss to its result; {IN_LIBRARY}."
        )
    return standing is Standing.SHARE


def has_entry_per_row(step: Step, rank: Any, values: tf.Tensor) -> bool:
    """Whether `values` has one entry per row of the batch, times a constant.

    All replicas return the same; if False, they exchange the numbers of values.
    """
    if not isinstance(rank, int) or in_compiled_function():
        return True  # one program of fixed shapes for all replicas
    value = step.analysis(rank).value(values)
    is_of_rows = value.axes == (0,) and value.each == FIXED
    if is_of_rows and values.shape[1:].is_fully_defined():
        return True
    # Not loops around the step: steps_per_execution makes one.
    reducer = tf.distribute.get_strategy().extended.reducer
    run_graph = reducer.transport.order.run_graph
    if any(map(is_loop_graph, graphs_inside(run_graph))):
        step.suspicions.add(
            "within a tf.while_loop a Keras loss was weighted by the rows of the "
            "batch, because there replicas cannot exchange the number of losses "
            "they took a mean of. Take such losses outside of the loop, or scale "
            "them to their share with tfdp.losses.local_sum"
        )
        return True
    # True if every replica was given the same.
    return step.batch.counts is None and step.batch.has_tensors


def are_values_of_rows(
    step: Step,
    rank: Any,
    loss: tf.Tensor,
    shapes_of_weights: Collection[tuple[int, ...]],
) -> bool:
    """Whether a value for `add_loss`, of rank 1 or more, has one entry per row: Keras
    adds those up. A penalty on a weight may have one of `shapes_of_weights`."""
    batch = step.trace(rank).batch
    rows = batch[0].shape[0] if batch else None
    length = loss.shape[0] if loss.shape.rank else None
    if not in_compiled_function():
        value = step.analysis(rank).value(loss)
        if Term.UNKNOWN not in value.terms:
            return value.axes == (0,) and Term.ROWS in value.terms
    if length is not None and length != rows:
        if not rows or length % rows:
            return False
        step.suspicions.add(
            f"a layer gave add_loss a tensor of shape {tuple(loss.shape)} on a replica "
            f"of {rows} rows. tfdp cannot determine whether it has several values of "
            "each row (with jit_compile=True it never can), and "
            "took their sum for a mean over the rows. Give it one value for each row, "
            "or a number: the mean over the rows, or tfdp.losses.local_sum(...) of a "
            "sum"
        )
        return False
    if tuple(loss.shape) in shapes_of_weights:
        step.suspicions.add(
            f"a layer gave add_loss a tensor of shape {tuple(loss.shape)}, which "
            "is both that of a weight and as long as the replica has rows. With "
            "jit_compile=True it was taken for values of rows. Give add_loss the sum "
            "of a penalty, keras.ops.sum(penalty), or leave jit_compile out"
        )
    return True


def warn_about_added_sum(step: Step, rank: Any, loss: tf.Tensor) -> None:
    """Warns of an `add_loss` that is a sum over the replica's rows."""
    value = _value_of_several(step, rank, loss)
    if value is not None and Term.SUM in value.terms:
        step.suspicions.add(
            "a layer gave add_loss what looks like a sum over its rows, which was "
            "taken for their mean. Give it the mean, or, to add the replicas' sums, "
            "tfdp.losses.local_sum(loss)"
        )


def warn_about_sum_of_all(step: Step, rank: Any, losses: tf.Tensor) -> None:
    """Warns of row losses, to be added up, that are equal on all replicas."""
    value = _value_of_several(step, rank, losses)
    if value is not None and value.of_all and not value.is_of_replica:
        step.suspicions.add(
            "a loss with reduction='sum' or 'none' depends on the rows of all replicas "
            "(tfdp.losses.all_rows): each replica has the same values, and each counts "
            "once for each replica. Take those of this replica's rows, "
            "tfdp.losses.own_rows(values, y)"
        )


def warn_about_loss(step: Step, rank: Any, loss: tf.Tensor) -> None:
    """Warns of a loss for `local_mean` that is a sum over rows."""
    value = _value_of_several(step, rank, loss)
    if value is not None and value.cross:
        note_crossing(step, value)
    elif value is not None and value.is_scaled_by_count and value.power is None:
        step.suspicions.add(
            "local_mean was given a loss with parts that are multiplied or divided by "
            "the number of rows of the batch, and others that are not, and a replica "
            "counts its own rows, where one device counts all. Take local_mean of each "
            "part; or count all rows, tf.shape(tfdp.losses.all_rows(y))[0]",
            "counted",
        )
    elif value is not None and is_no_mean(value.but(power=0)):
        step.suspicions.add(
            "local_mean was given a number that is no mean over rows, such as a sum. "
            "Each replica computes that of its own rows, and their mean is not the "
            "loss of the whole batch. For a sum take tfdp.losses.local_sum(loss)",
            "no mean",
        )


def count_power(step: Step, rank: Any, number: Any) -> tuple[int, bool]:
    """p of a number that is proportional to n^p, n the replica's number of rows; and
    whether it has an entry for each row instead of their mean."""
    value = _value_of_several(step, rank, number)
    if value is None or not value.is_scaled_by_count:
        return 0, False
    return value.power or 0, bool(value.axes) and Term.ROWS in value.terms


def warn_about_weighted_number(
    step: Step, rank: Any, number: tf.Tensor, weights: Any
) -> None:
    """Warns of one loss for all rows, by which Keras multiplies weights or a mask."""
    is_share = step.trace(rank).shares.standing_of(number) is Standing.SHARE
    if step.group_size > 1 and not (is_share and weights is None):
        step.suspicions.add(
            "a loss function returned one number for all rows, and Keras multiplied "
            "the sample weights, or the mask, of each replica by it. Return a value "
            "for each row, and let Keras take the mean; a number of all rows belongs "
            "into compute_loss, scaled by tfdp.losses.local_mean(loss)",
            "unscaled",
        )


def reported_standing(step: Step, rank: Any, loss: Any, subject: str) -> Standing:
    """The `Standing` of a loss that is reported; warns where a part is no share.
    `subject` starts the warning's sentence, such as "the step returned"."""
    shares = step.trace(rank).shares
    standing = shares.standing_of(loss)
    value = step.analysis(rank).value(loss) if is_of_graph(loss) else None
    is_function = value is not None and value.terms == {Term.MIXED}
    if is_function and value.target is not None:  # type: ignore[union-attr]
        step.state_suspicions.add(
            f"{subject} a number computed from gradients, such as their norm, and a "
            "replica has its part of their sum only: the mean over the replicas is "
            "reported. Sum the gradients first, "
            "tfdp.losses.all_sum(gradients)",
            "number",
        )
    elif is_function:
        step.suspicions.add(
            f"{subject} a function of a loss that is not linear, such as its "
            "exponential (perplexity), and a replica has its share of the loss only. "
            "Sum it first, "
            "tfdp.losses.all_sum(loss)",
            "mixed",
        )
    elif standing is Standing.MIXED and not (
        value is not None and is_scaled_by_hand(step, value)
    ):
        step.suspicions.add(MIXED.format(subject=subject), "mixed")
    elif standing is Standing.SHARE and shares.has_constant(loss):
        step.suspicions.add(
            f"{subject} a loss to which a constant was added. It changes no gradient, "
            "but the reported number contains it once for each replica: scale it with "
            "tfdp.losses.local_mean(tf.constant(...))",
            "mixed",
        )
    elif standing is Standing.SHARE and value is not None:
        note_crossing(step, value)
        if value.is_scaled_by_count:
            step.suspicions.add(f"{subject} a loss {COUNTED}", "counted")
    return standing


def note_crossing(step: Step, value: Value) -> None:
    """Warns of a loss in which rows depend on other rows of the replica."""
    sentence = None
    if step.group_size > 1:
        sentence = crossing_of(value.cross, step.of(Cures), with_gathered=value.of_all)
    if sentence is not None:
        step.suspicions.add(sentence, "crossing")


def note_computed(step: Step, rank: Any, loss: Any) -> None:
    """Notes that `on_all_rows` reaches what the model's `compute_loss` returned."""
    cures, value = step.of(Cures), _value_of_several(step, rank, loss)
    if cures.other is IN_STEP and value is not None:
        cures.update(dict.fromkeys(value.cross - cures.keys(), IN_LOSS))


def note_added(step: Step, rank: Any, loss: Any, cure: str) -> None:
    """Notes what mends a layer's `add_loss`; `local_mean` may have warned of it."""
    value = _value_of_several(step, rank, loss)
    if value is not None and value.cross:
        step.of(Cures).update(dict.fromkeys(value.cross, cure))
        if step.suspicions.has("crossing") and step.trace(rank) is step.traces[0]:
            step.suspicions.drop("crossing")
            note_crossing(step, value)


def warn_about_number(step: Step, rank: Any, metric: Any, number: Any) -> None:
    """Warns of a number that `metric` counts and that is not a mean over rows."""
    why = _why_no_mean(step, rank, number)
    if why is not None:
        step.of(MetricNotes).checked.update(
            id(variable.value) for variable in metric.variables
        )
        step.state_suspicions.add(
            f"the metric {metric.name!r} counts one number for all rows {why}", "number"
        )


def warn_about_returned(step: Step, rank: Any, number: tf.Tensor) -> None:
    """Warns of a number that a step returns and that is not a mean over rows."""
    # Of a loss that was reported already it is the same fault.
    why = _why_no_mean(step, rank, number)
    if not step.suspicions.has("crossing") and why is not None:
        step.state_suspicions.add(f"a number is returned for all rows {why}", "number")


def _why_no_mean(step: Step, rank: Any, number: Any) -> str | None:
    value = _value_of_several(step, rank, number)
    if value is None or not is_no_mean(value):
        return None
    return no_mean(value, step.of(Cures).other)


def _value_of_several(step: Step, rank: Any, tensor: Any) -> Value | None:
    """The value of a graph's tensor, if there are several replicas; else None."""
    if step.group_size == 1 or not is_of_graph(tensor):
        return None
    return step.analysis(rank).value(tensor)


def find_faults_of_losses(step: Step, model: Any, fn: Any) -> None:
    """Adds findings about the losses whose gradients optimizers got in this step."""
    if step.group_size == 1:
        return
    applied: dict[Value, str] = {}
    for rank, gradients, name in step.of(GivenLosses).gradients:
        for given in gradients:
            part = getattr(given, "values", given)
            if is_of_graph(part):
                applied.setdefault(step.analysis(rank).value(part), name)
    for gradient, optimizer in applied.items():
        by_hand = step.of(GivenLosses).scales_by_hand and gradient.by_hand
        change = change_of_gradients(gradient, scales_by_hand=by_hand)
        if change is not None:
            step.suspicions.add(change, "changed")
        loss = gradient.target
        if loss is None:
            # Computed by hand: its own sum over the replicas has to be one device's.
            if gradient.of_all or gradient.reads:
                continue  # summed already; or accumulated, which `own_sums` follows
            loss = gradient
        note_crossing(step, loss)
        if gradient.is_scaled_by_count:
            step.suspicions.add(
                f"the optimizer {optimizer!r} got gradients of a loss, or gradients, "
                f"{COUNTED}",
                "counted",
            )
            continue
        standing = standing_of(loss)
        if loss.terms == {Term.MIXED}:
            step.suspicions.add(
                f"the optimizer {optimizer!r} got gradients of a function of a loss "
                "that is not linear, such as its logarithm, and a replica has its "
                "share of the loss only. Compute the loss in compute_loss, on which "
                "tfdp.losses.on_all_rows acts; or from the rows of all replicas, "
                "tfdp.losses.all_rows(x), and scale it, tfdp.losses.local_mean(loss)",
                "mixed",
            )
        elif standing is Standing.MIXED and not is_scaled_by_hand(step, loss):
            subject = f"the optimizer {optimizer!r} got gradients of"
            step.suspicions.add(MIXED.format(subject=subject), "mixed")
        elif standing is Standing.LOCAL and not loss.cross:
            why = unscaled_part(loss, scales_by_hand=by_hand)
            if why is not None:
                step.suspicions.add(_unscaled(step, why, optimizer), "unscaled")
        is_lost = Term.UNKNOWN in loss.terms or Term.SHARE in loss.terms
        if is_lost and loss.lost and not step.suspicions:
            step.suspicions.add(past_op(loss.lost), "lost")
    is_unknown = any(
        gradient.target is None or Term.UNKNOWN in gradient.target.terms
        for gradient in applied
    )
    if is_unknown and not step.of(GivenLosses).are_scaled:
        why = _why_it_may_be_local(step, model, fn)
        if why is not None and not step.suspicions:
            step.suspicions.add(_unscaled(step, why), "unscaled")
    if any(map(step.suspicions.has, ("crossing", "mixed", "unscaled", "changed"))):
        step.suspicions.drop("counted")  # the same fault, or one to mend first
        step.suspicions.drop("lost")
    if step.suspicions.has("crossing"):
        step.state_suspicions.drop("number")  # the same fault, reported


def is_scaled_by_hand(step: Step, loss: Value) -> bool:
    """Whether the parts of a loss that are no share may be scaled by the program."""
    others = loss.terms - {Term.SHARE, Term.REPLICATED, Term.CONSTANT, Term.MEAN}
    return step.of(GivenLosses).scales_by_hand and loss.by_hand and not others


def _why_it_may_be_local(step: Step, model: Any, fn: Any) -> str | None:
    """The reason why an unanalysed loss may be the local batch's; None: no reason."""
    if name_of_step(fn) != "train_step":
        return None
    own = "its {} is its own and no Keras loss took a mean in it"
    if not is_stock_step(fn):
        return None if step.of(GivenLosses).are_added else own.format("train_step")
    losses = list(filter(None, given_losses(model)))
    if not losses:  # only layers, or `compute_loss`, produce losses
        is_own = type(model).compute_loss is not keras.Model.compute_loss
        return (
            own.format("compute_loss")
            if is_own and not step.of(GivenLosses).are_added
            else None
        )
    reductions = {getattr(loss, "reduction", "mean") for loss in losses}
    is_scaled = reductions <= {"sum", "none", None}
    return None if is_scaled else "its loss function returns a scalar"


def _unscaled(step: Step, why: str, optimizer: str = "") -> str:
    of = f" whose gradients {optimizer!r} got" if optimizer else ""
    return (
        f"the loss{of} was not scaled to its share of the global batch ({why}), and "
        "the replicas' gradients are added: a mean over the local batch makes each "
        f"update {step.group_size} times too large. Take the gradient of "
        "tfdp.losses.local_mean(loss), or, if it is a sum or divided by the global "
        f"batch, of tfdp.losses.local_sum(loss), and {FOR_METRICS}; {IN_LIBRARY}"
    )
