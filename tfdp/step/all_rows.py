"""Computes the losses and metrics of a model on the rows of all replicas.

With L the loss of the whole batch, equal on all replicas, replica r has n_r of its n
rows and takes L n_r / n as its share. Its own rows carry a gradient, times n / n_r:

    own rows:          (n_r / n) (n / n_r) dL/dx_r  =  dL/dx_r
    weights of a loss: sum_r (n_r / n) dL/dw        =  dL/dw

So both sums are one device's, rows travel forward only, and a loss may use rows in any
way. Metrics count all rows on the first replica, and on no other.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import layers_within, mask_of, metrics_within, put_mask
from tfdp._private.names import current_rank, run_independently
from tfdp.errors import ConfigurationError
from tfdp.lint.findings import IN_ANY_LAYER, Cures
from tfdp.lint.registry import is_of_graph, key_of, register
from tfdp.lint.values import (
    JOINED,
    OF_ALL,
    OTHERWISE,
    SCALED,
    Crossing,
    Term,
)
from tfdp.losses import DENSE, ON_ALL_ROWS, gathered, on_all_rows, replicas_in_sync
from tfdp.seams.replace import Override
from tfdp.tracing.gradient_exchanges import exchanges_of, name_of_gradient
from tfdp.tracing.keras_steps import name_of_step
from tfdp.tracing.loss_shares import GivenLosses
from tfdp.tracing.rows import RowsInSight
from tfdp.tracing.state_checks import own_handle
from tfdp.tracing.step import Mode, Step

NAME = "tfdp.losses.on_all_rows"
ONE_ENTRY = (
    f"{NAME} needs outputs, targets and weights with one entry along the first axis "
    "for each row of the batch, because the rows of all replicas are joined along it. "
    "Return views of a row as outputs of their own, or stacked along axis 1."
)
COUNTED = (
    "what {method} gets is multiplied or divided by the number of rows of the batch, "
    "such as tf.shape(x)[0], and a replica counts its own rows, where one device "
    "counts all. Count these, tf.shape(tfdp.losses.all_rows(x))[0]; or put a layer "
    "that counts them into tfdp.layers.AllRows(layer)"
)


SCALED_BY_HAND = (
    "the loss that self.compute_loss returned was divided by the number of replicas, "
    f"and with {NAME} it is the replica's share already. Leave out the division"
)
START = (
    "a metric counts in {name!r} from its old value, such as a running minimum or an "
    f"average that forgets, and has a reset_state() of its own. With {NAME} one "
    "replica counts, and a reset gives each a part of the value: from 0 that is right, "
    "else make the variable with aggregation='only_first_replica'"
)


def all_rows_overrides(model: keras.Model, step: Step) -> Iterator[Override]:
    """Overrides that give `compute_loss` and `compute_metrics` the rows of all."""
    if step.mode is not Mode.PLAIN:
        raise ConfigurationError(
            f"{NAME} cannot act with sync=..., where groups of replicas step by "
            "themselves, or on batches that were padded to a fixed size (pad_batches). "
            "Leave one of the two out; batches of one size (drop_remainder=True) are "
            "not padded."
        )
    step.of(Cures).other = IN_ANY_LAYER
    for name, finish in (
        ("compute_loss", _share_of_loss),
        ("compute_metrics", _as_computed),
    ):
        is_stock = getattr(type(model), name) is getattr(keras.Model, name)
        is_own = not is_stock or name in vars(model)
        make = functools.partial(_on_all, finish, model, step, name, is_own)
        yield Override(model, name, make)


def _on_all(
    finish: Callable, model: Any, step: Step, name: str, is_own: bool, compute: Callable
) -> Callable:
    @functools.wraps(compute)
    def compute_on_all(*args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context() or step.here.sees_all_rows:
            return compute(*args, **kwargs)
        replicas_in_sync(NAME)  # or an error, where they cannot exchange
        given = inspect.signature(compute).bind(*args, **kwargs)
        rows = _RowsOfAll(step, current_rank(), f"self.{name}")
        # Keras' own methods do not look at the inputs.
        rows.take(v for k, v in given.arguments.items() if is_own or k != "x")
        given.arguments.update((k, rows.of(v)) for k, v in given.arguments.items())
        step.here.of(GatheredRows).used_in.add(name)
        ON_ALL_ROWS[model] = rows.row_bytes
        what = f"{type(model).__name__}.{name}"
        own = step.here.of(RowsInSight)
        own.written = []
        with step.here.seeing_all_rows():
            result = compute(*given.args, **given.kwargs)
        for variable, value in own.written:
            step.here.refuse_own(value, f"What {what} counts", counts=False)
            _warn_about_start(model, step, variable, value)
        return result if result is None else finish(step, what, result)

    return compute_on_all


def _share_of_loss(step: Step, what: str, loss: Any) -> tf.Tensor:
    rank = current_rank()
    if not isinstance(loss, DENSE) or tf.TensorShape(loss.shape).rank != 0:
        raise ConfigurationError(
            f"{NAME} needs a loss that is one number, and {what} returned: {loss}. "
            "Give losses reduction='sum_over_batch_size' or 'sum', and return their "
            "sum."
        )
    loss = tf.convert_to_tensor(loss)
    step.here.refuse_own(loss, f"The loss of {what}")
    step.of(GivenLosses).are_scaled = True
    share = step.share_of(rank)
    return keras.ops.multiply(loss, step.here.shares.factor(share, loss.dtype))


def _as_computed(step: Step, what: str, numbers: Any) -> Any:
    return numbers


def _warn_about_start(model: Any, step: Step, variable: Any, value: Any) -> None:
    """Warns of what a metric counts from its old value, if that may start as another
    number than 0: a reset gives each replica a part of it, and one of them counts."""
    if not is_of_graph(value):
        return
    rank = current_rank()
    how = dict(step.analysis(rank).value(value).reads).get(own_handle(variable, rank))
    is_own = any(
        not type(one).reset_state.__module__.startswith("keras.")
        for metric in model.metrics
        for one in metrics_within(metric)
        if any(own.value is variable for own in one.variables)
    )
    if how in (SCALED, OTHERWISE) and is_own:
        step.state_suspicions.add(START.format(name=variable.name.partition(":")[0]))


class GatheredRows(dict[Any, tuple[tf.Tensor, tf.Tensor]]):
    """A replica's own tensors and the rows of all, by the own one's key: gathered once
    for losses and metrics."""

    def __init__(self) -> None:
        super().__init__()
        #: How many rows come before the replica's own, and how many it has.
        self.place: Any = None
        #: The methods of the model that got them.
        self.used_in: set[str] = set()


class _RowsOfAll:
    """The rows of all replicas, in the place of a replica's own."""

    def __init__(self, step: Step, rank: int, name: str):
        """`name`: of the method that gets them."""
        self._step, self._rank, self._trace = step, rank, step.trace(rank)
        self._name = name
        self._known = self._trace.of(GatheredRows)

    def take(self, values: Any) -> None:
        """Gathers what has not been gathered, in one exchange."""
        parts = [*keras.tree.flatten(list(values))]
        parts += [mask_of(one) for one in parts if mask_of(one) is not None]
        new: dict[Any, tf.Tensor] = {}
        for part in parts:
            if isinstance(part, (*DENSE, tf.RaggedTensor, tf.SparseTensor)):
                own = _dense(part)
                if self._has_rows(own):
                    new.setdefault(key_of(own), own)
        new = {key: own for key, own in new.items() if key not in self._known}
        if new:
            self._gather(list(new.values()))

    def of(self, value: Any) -> Any:
        """`value` with the rows of all, and with their masks."""
        return keras.tree.map_structure(self._of, value)

    @property
    def row_bytes(self) -> int:
        """The size of one row of all tensors, as far as shapes are known."""
        return sum(
            own.dtype.size * math.prod(size or 1 for size in own.shape[1:])
            for own, _ in self._known.values()
        )

    def _of(self, part: Any) -> Any:
        if not isinstance(part, tf.Tensor) or key_of(part) not in self._known:
            return part
        _, whole = self._known[key_of(part)]
        mask = mask_of(part)
        if mask is not None:
            put_mask(whole, self._of(tf.convert_to_tensor(mask)))
        return whole

    def _has_rows(self, own: tf.Tensor) -> bool:
        """Whether it has a row for each of the replica's; else it is the same on all
        replicas, such as a weight that the model returns."""
        if not self._trace.may_have_rows(own):
            return False
        value = self._step.analysis(self._rank).value(own)
        known = {Term.MEAN, Term.SUM, Term.OTHER}
        is_of_all = not value.axes and bool(value.terms) and value.terms <= known
        if not own.shape.rank or is_of_all:
            raise ConfigurationError(
                f"{ONE_ENTRY} Received a number of all rows of the replica: {own}."
            )
        return True

    def _gather(self, own: Sequence[tf.Tensor]) -> None:
        step, trace = self._step, self._trace
        place = trace.place_of_all
        real = [trace.rows.real_rows(self._checked(one)) for one in own]
        count = tf.shape(real[0])[:1]
        given = [count, *(tf.stop_gradient(one) for one in real)]
        counts, *wholes = gathered(NAME, given)
        before = tf.reduce_sum(counts[:place])
        self._known.place = before, count[0]
        total = step.batch.total
        length = None if step.batch.spans_hosts or tf.is_tensor(total) else total
        for mine, whole in zip(own, wholes, strict=True):
            whole.set_shape([length, *mine.shape[1:]])
            if mine.dtype.is_floating or mine.dtype.is_complex:
                whole = self._joined(mine, whole)
            value = step.analysis(self._rank).value(mine)
            if value.is_scaled_by_count:
                step.suspicions.add(COUNTED.format(method=self._name), "counted")
            cross = value.cross
            if value.axes and not value.is_of_rows_in_order:
                cross |= {Crossing(JOINED, mine.op.name)}
            # Rows may have seen each other in a layer.
            register(whole, OF_ALL.but(cross=cross, lost=value.lost))
            self._known[key_of(mine)] = mine, whole

    def _joined(self, own: tf.Tensor, whole: tf.Tensor | None = None) -> tf.Tensor:
        """The rows of all, with a gradient for own ones; `whole`: those rows, if they
        are there."""
        name = name_of_gradient()

        @tf.custom_gradient
        def rows_of_all(own: tf.Tensor) -> Any:
            rows = whole
            if rows is None:
                real = self._trace.rows.real_rows(own)
                rows = gathered(NAME, tf.stop_gradient(real))

            def gradient(upstream: Any) -> tf.Tensor:
                with exchanges_of(name):
                    return self._sum_of_own(tf.convert_to_tensor(upstream), own)

            return tf.identity(rows), gradient

        return rows_of_all(own)

    def _sum_of_own(self, upstream: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """The sum over replicas of `upstream` at own rows, which is n / n_r times the
        replica's. As a function it has the rows of all as its gradient."""
        name, share, shape = name_of_gradient(), self._share, tf.shape(own)
        before, count = self._trace.of(GatheredRows).place

        @tf.custom_gradient
        def sum_of_own(upstream: tf.Tensor) -> Any:
            part = upstream[before : before + count]
            part *= tf.cast(tf.math.divide_no_nan(1.0, share), part.dtype)
            missing = shape[0] - count  # a dummy row has no gradient
            part = tf.concat([part, tf.zeros_like(own[:missing])], 0)

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with exchanges_of(name):
                    return self._joined(upstream)

            return tf.ensure_shape(part, own.shape), gradient

        return sum_of_own(upstream)

    @property
    def _share(self) -> tf.Tensor:
        return self._step.share_of(self._rank)

    def _checked(self, own: tf.Tensor) -> tf.Tensor:
        """`own`, which has as many rows as the replica's batch."""
        count, rows = self._step.count_of(self._rank), own.shape[0]
        if self._step.batch.counts is None:
            return own
        if isinstance(count, int) and rows is not None:
            if rows != max(count, 1):
                raise ConfigurationError(
                    f"{ONE_ENTRY} Received shape {own.shape} on a replica of {count} "
                    "rows."
                )
            return own
        has_each = tf.equal(tf.shape(own)[0], tf.maximum(count, 1))
        check = tf.debugging.Assert(has_each, [ONE_ENTRY, tf.shape(own)])
        run_independently(check)  # not ordered after other replicas' checks
        with tf.control_dependencies([check]):
            checked = tf.identity(own)
        register(checked, own)
        return checked


def _dense(part: Any) -> tf.Tensor:
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        raise ConfigurationError(
            f"{NAME} needs dense tensors. Received: {part}. Pad rows to one length "
            "(to_tensor()), and give the padding the weight 0."
        )
    return tf.convert_to_tensor(part)


def added_to_whole(
    step: Step, rank: int, value: tf.Tensor, share: Any = None
) -> tf.Tensor:
    """A term of a loss of all rows that layers computed on own rows, and gave
    `add_loss`; with `share`, the fraction by which that loss is scaled, not scaled."""
    found = step.analysis(rank).value(value) if is_of_graph(value) else OF_ALL
    if share is None:
        added = tf.identity(value)
        register(added, found.but(local=found.local - {"rows"}))
    else:
        added = value * tf.cast(tf.math.divide_no_nan(1.0, share), value.dtype)
        register(added, OF_ALL.but(cross=found.cross, lost=found.lost))
    return added


def refuse_unused(model: Any, step: Step, fn: Any) -> None:
    """Refuses a step in which a mark could not act."""
    name = name_of_step(fn)
    if name not in ("train_step", "test_step") or not isinstance(model, keras.Model):
        return
    if model in ON_ALL_ROWS:
        used = step.traces[0].of(GatheredRows).used_in
        if not used or (name == "train_step" and "compute_loss" not in used):
            raise ConfigurationError(
                f"{NAME} was called on {type(model).__name__}, and "
                f"its {name} does not call self.compute_loss(x=x, y=y, y_pred=y_pred), "
                "which would get the rows of all replicas (super().compute_loss would "
                "not). Call it; or gather the rows there, "
                "tfdp.losses.all_rows(y_pred)."
            )
        on_all_rows(model)  # which refuses one that was compiled later
        _warn_about_scaling(step)
    inner = [
        one for one in layers_within(model) if one in ON_ALL_ROWS and one is not model
    ]
    if inner:
        raise ConfigurationError(
            f"{NAME} was called on {inner[0].name!r}, and the model "
            f"that trains is {model.name!r}, which contains it. Call it on that one."
        )


def _warn_about_scaling(step: Step) -> None:
    """Warns of a loss of all rows that a program divides by the number of replicas."""
    if not step.of(GivenLosses).scales_by_hand:
        return
    for rank, gradients, _ in step.of(GivenLosses).gradients:
        for given in gradients:
            part = getattr(given, "values", given)
            value = step.analysis(rank).value(part) if is_of_graph(part) else None
            if value is not None and value.of_share and value.by_hand:
                step.suspicions.add(SCALED_BY_HAND, "changed")
