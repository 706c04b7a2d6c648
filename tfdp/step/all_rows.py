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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import mask_of, put_mask
from tfdp._private.names import current_rank, in_compiled_function, run_independently
from tfdp.errors import ConfigurationError
from tfdp.lint.registry import is_of_graph, key_of, register
from tfdp.lint.values import OF_ALL
from tfdp.losses import gathered
from tfdp.seams.replace import Override
from tfdp.tracing.all_rows import WholeLosses, refuse_own_rows, seeing_all_rows
from tfdp.tracing.loss_shares import GivenLosses
from tfdp.tracing.step import Mode, Step

NAME = "tfdp.losses.on_all_rows"
ONE_ENTRY = (
    f"{NAME} needs outputs, targets and weights with one entry along the first axis for "
    "each row of the batch, because the rows of all replicas are joined along it. "
    "Return views of a row as outputs of their own, or stacked along axis 1."
)


def refuse_what_cannot_exchange(call: Any) -> None:
    """Refuses steps in which replicas cannot exchange rows."""
    strategy, step = call.strategy, call.step
    refused = {
        "with jit_compile=True, where XLA compiles each replica alone. Compile the "
        "model with jit_compile=False": strategy.compiles_steps
        or strategy.is_jitted(call.model),
        "on a batch that was padded to a fixed size. Leave out pad_batches, or give "
        "batches of one size (drop_remainder=True)": step.mode is Mode.PADDED,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ConfigurationError(f"{NAME} cannot act {what}.")


def all_rows_overrides(model: keras.Model, step: Step) -> Iterator[Override]:
    """Overrides that give `compute_loss` and `compute_metrics` the rows of all."""
    if step.is_local:
        raise ConfigurationError(
            f"{NAME} cannot act with sync=..., where groups of replicas step by "
            "themselves. Leave one of the two out."
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
        if in_compiled_function():
            raise ConfigurationError(
                f"{NAME} cannot act in a function that XLA compiles (jit_compile=True), "
                f"in which {type(model).__name__}.{name} was called."
            )
        given = inspect.signature(compute).bind(*args, **kwargs)
        rows = _RowsOfAll(step, current_rank())
        # Keras' own methods do not look at the inputs.
        rows.take(v for k, v in given.arguments.items() if is_own or k != "x")
        given.arguments.update((k, rows.of(v)) for k, v in given.arguments.items())
        step.here.of(WholeLosses).are_computed = True
        what = f"{type(model).__name__}.{name}"
        return method(compute, step, what, *given.args, **given.kwargs)

    return compute_on_all


def _loss(compute: Callable, step: Step, what: str, *args: Any, **kwargs: Any) -> Any:
    rank = current_rank()
    with seeing_all_rows(step, rank):
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
    with seeing_all_rows(step, current_rank()):
        return compute(*args, **kwargs)


class _Gathered(dict[Any, tuple[tf.Tensor, tf.Tensor]]):
    """Own tensors and the rows of all, by the own one's key: gathered once for losses
    and metrics."""


class _RowsOfAll:
    """The rows of all replicas, in the place of a replica's own."""

    def __init__(self, step: Step, rank: int):
        self._step, self._rank, self._trace = step, rank, step.trace(rank)
        self._known = self._trace.of(_Gathered)

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
            # A layer whose rows see each other has been told of, or is to be.
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
