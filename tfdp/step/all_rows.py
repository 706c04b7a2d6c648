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

from tfdp._private.keras_models import layers_within, mask_of, put_mask
from tfdp._private.names import current_rank, run_independently
from tfdp.errors import ConfigurationError
from tfdp.lint.registry import is_of_graph, key_of, register
from tfdp.lint.values import OF_ALL
from tfdp.losses import ON_ALL_ROWS, gathered, replicas_in_sync
from tfdp.seams.replace import Override
from tfdp.tracing.keras_steps import name_of_step
from tfdp.tracing.loss_shares import GivenLosses
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


def all_rows_overrides(model: keras.Model, step: Step) -> Iterator[Override]:
    """Overrides that give `compute_loss` and `compute_metrics` the rows of all."""
    if step.mode is not Mode.PLAIN:
        raise ConfigurationError(
            f"{NAME} cannot act with sync=..., where groups of replicas step by "
            "themselves, or on batches that were padded to a fixed size (pad_batches). "
            "Leave one of the two out; batches of one size (drop_remainder=True) are "
            "not padded."
        )
    for name, method in (("compute_loss", _loss), ("compute_metrics", _metrics)):
        is_own = getattr(type(model), name) is not getattr(keras.Model, name)
        make = functools.partial(_on_all, method, model, step, name, is_own)
        yield Override(model, name, make)


def _on_all(
    method: Callable, model: Any, step: Step, name: str, is_own: bool, compute: Callable
) -> Callable:
    @functools.wraps(compute)
    def compute_on_all(*args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context() or step.here.sees_all_rows:
            return compute(*args, **kwargs)
        replicas_in_sync(NAME)  # or an error, where they cannot exchange
        if not isinstance(current_rank(), int):
            raise ConfigurationError(
                f"{NAME} cannot act where one program serves all replicas, as on TPUs. "
                "Gather the rows in the loss, tfdp.losses.all_rows(y_pred)."
            )
        given = inspect.signature(compute).bind(*args, **kwargs)
        rows = _RowsOfAll(step, current_rank(), f"self.{name}")
        # Keras' own methods do not look at the inputs.
        rows.take(v for k, v in given.arguments.items() if is_own or k != "x")
        given.arguments.update((k, rows.of(v)) for k, v in given.arguments.items())
        step.here.of(GatheredRows).is_used = True
        ON_ALL_ROWS[model].own_bytes = rows.own_bytes
        what = f"{type(model).__name__}.{name}"
        return method(compute, step, what, *given.args, **given.kwargs)

    return compute_on_all


def _loss(compute: Callable, step: Step, what: str, *args: Any, **kwargs: Any) -> Any:
    rank = current_rank()
    with step.here.seeing_all_rows():
        loss = compute(*args, **kwargs)
    if loss is None:
        return None
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
        raise ConfigurationError(
            f"{NAME} needs a loss that is one number, and {what} returned values of "
            f"shape {loss.shape}. Give losses reduction='sum_over_batch_size' or 'sum'."
        )
    refuse_own_rows(step, rank, loss, f"The loss of {what}")
    step.of(GivenLosses).are_scaled = True
    share = step.share_of(rank)
    return keras.ops.multiply(loss, step.here.shares.factor(share, loss.dtype))


def _metrics(
    compute: Callable, step: Step, what: str, *args: Any, **kwargs: Any
) -> Any:
    with step.here.seeing_all_rows():
        return compute(*args, **kwargs)


class GatheredRows(dict[Any, tuple[tf.Tensor, tf.Tensor]]):
    """A replica's own tensors and the rows of all, by the own one's key: gathered once
    for losses and metrics."""

    is_used = False


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
            if part is not None and not isinstance(part, (bool, int, float, str)):
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
    def own_bytes(self) -> int:
        """The size of the replica's own tensors, as far as shapes are known."""
        return sum(
            own.dtype.size * math.prod(size or 1 for size in own.shape)
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
        value = self._step.analysis(self._rank).value(own)
        if not value.local and not value.of_share:
            return False
        if not own.shape.rank:
            raise ConfigurationError(
                f"{ONE_ENTRY} Received a number that depends on the replica's rows: "
                f"{own}."
            )
        return True

    def _gather(self, own: Sequence[tf.Tensor]) -> None:
        step, trace = self._step, self._trace
        real = [trace.rows.real_rows(self._checked(one)) for one in own]
        count = tf.shape(real[0])[:1]
        given = [count, *(tf.stop_gradient(one) for one in real)]
        counts, *wholes = gathered(NAME, given)
        before = tf.reduce_sum(counts[: self._rank_of_all])
        total = step.batch.total
        length = None if step.batch.spans_hosts or tf.is_tensor(total) else total
        for mine, whole in zip(own, wholes, strict=True):
            whole.set_shape([length, *mine.shape[1:]])
            if mine.dtype.is_floating or mine.dtype.is_complex:
                whole = self._with_gradient(mine, whole, before, count[0])
            value = step.analysis(self._rank).value(mine)
            if value.is_scaled_by_count:
                step.suspicions.add(COUNTED.format(method=self._name), "counted")
            # Rows may have seen each other in a layer.
            register(whole, OF_ALL.but(cross=value.cross, lost=value.lost))
            self._known[key_of(mine)] = mine, whole

    @property
    def _rank_of_all(self) -> int:
        context = tf.distribute.get_replica_context()
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def _with_gradient(
        self, own: tf.Tensor, whole: tf.Tensor, before: tf.Tensor, count: tf.Tensor
    ) -> tf.Tensor:
        """`whole`, of which `count` rows from `before` on have gradients."""
        share = self._step.share_of(self._rank)

        @tf.custom_gradient
        def rows_of_all(own: tf.Tensor) -> Any:
            def gradient(upstream: Any) -> tf.Tensor:
                upstream = tf.convert_to_tensor(upstream)
                part = upstream[before : before + count]
                part *= tf.cast(tf.math.divide_no_nan(1.0, share), part.dtype)
                missing = tf.shape(own)[0] - count  # a dummy row has no gradient
                none = tf.zeros_like(own[:missing])
                return tf.ensure_shape(tf.concat([part, none], 0), own.shape)

            return tf.identity(whole), gradient

        return rows_of_all(own)

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


def refuse_own_rows(step: Step, rank: int, number: Any, what: str) -> None:
    """Refuses a number of all rows that depends on the replica's own as well."""
    # A loss that the number of own rows scales is warned of, as any other.
    if not is_of_graph(number) or not step.analysis(rank).value(number).is_of_replica:
        return
    raise ConfigurationError(
        f"{what} depends on rows that tfdp.losses.on_all_rows cannot give it: those of "
        "one replica, which it reads from elsewhere than its arguments, such as an "
        "attribute that call() has set, or self.losses. Return such tensors from "
        "call(), as outputs with a row for each row of the batch; leave what layers "
        "give add_loss to super().compute_loss."
    )


def refuse_unused(model: Any, step: Step, fn: Any) -> None:
    """Refuses a step in which a mark could not act."""
    name = name_of_step(fn)
    if name not in ("train_step", "test_step") or not isinstance(model, keras.Model):
        return
    if model in ON_ALL_ROWS:
        if not step.traces[0].of(GatheredRows).is_used:
            raise ConfigurationError(
                f"{NAME} was called on {type(model).__name__}, and "
                f"its {name} calls neither self.compute_loss(x=x, y=y, y_pred=y_pred) "
                "nor self.compute_metrics(...), which would get the rows of all "
                "replicas. Call them; or gather the rows there, "
                "tfdp.losses.all_rows(y_pred)."
            )
        return
    inner = [one for one in layers_within(model) if one in ON_ALL_ROWS]
    if inner:
        raise ConfigurationError(
            f"{NAME} was called on {inner[0].name!r}, and the model "
            f"that trains is {model.name!r}, which contains it. Call it on that one."
        )
