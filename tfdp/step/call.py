"""One `strategy.run`, stage by stage; `ReplicaContextStrategy.run` is the list of them.

take_batch   the rows of each replica: parts, counts, filling or borrowed rows
unify_shapes  of static shapes, what all replicas and hosts have alike
leading      while replicas run: the batch comes first; optimizers, reports, losses
own_rows_of  of what a prediction returns, the rows that came in
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.functions import (
    as_replicas_run_it,
    as_the_caller_is,
    python_function_of,
)
from tfdp._private.instance_attributes import instance_attributes
from tfdp.data.keras_input import with_none
from tfdp.data.split import in_parts
from tfdp.step.batch_first import batch_first
from tfdp.step.buffer_synchronization import (
    suspect_stored,
    suspect_written,
    with_late_state,
)
from tfdp.step.dummy_rows import (
    add_dummy_rows,
    drop_dummy_rows,
    ignores_dummy_rows,
    with_own_gathers,
    with_unified_shapes,
)
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.finite_guard import FiniteGuard
from tfdp.step.jit import jitted_train_step
from tfdp.step.losses import overridden_reductions, own_losses
from tfdp.step.metric_state import warn_if_rows_counted, warn_if_steps_counted
from tfdp.step.observers import NoiseProbe, StepMeter, observers_of
from tfdp.step.optimizers import overridden_optimizers
from tfdp.step.padding import leaves_filling_out, step_without_filling
from tfdp.step.reports import overridden_reports, recorded
from tfdp.step.table_rows import read_in_place
from tfdp.tracing.effect_order import operations
from tfdp.tracing.keras_steps import (
    is_predict_step,
    is_stock_train_step,
    name_of_step,
)
from tfdp.tracing.padded_batch import find_padded, trim_rows, without_padding
from tfdp.tracing.row_means import suspect_pairs
from tfdp.tracing.run import ReplicaRun
from tfdp.tracing.sample_counts import sample_counts


class StepCall:
    """What runs on every replica, on which batch, and what is known of it.

    Args:
      fn: what the program, or Keras, runs on every replica.
      args, kwargs: what `fn` is called with: per-replica values.
      devices: of this process's replicas.
      is_compiled: whether XLA compiles the step as a whole, as on TPUs.
      is_reported: whether Keras' loop reports what `fn` returns.
    """

    def __init__(
        self,
        fn: Callable,
        args: Any,
        kwargs: Any,
        devices: Sequence[str],
        *,
        is_compiled: bool,
        is_reported: bool,
        hosts: int,
    ):
        #: As what the step is known, and what runs: of a `tf.function` the one in it.
        self.fn, self.step = python_function_of(fn), as_replicas_run_it(fn)
        self.args, self.kwargs = with_none(args), with_none(kwargs)
        self.model = getattr(self.fn, "__self__", None)
        self.optimizers = optimizers_of(self.model)
        self.is_step = bool(name_of_step(self.fn))
        self.is_prediction = is_predict_step(self.fn)
        #: Whether replicas are reported together, those of other hosts too.
        self.is_reported = is_reported and self.is_step and not is_compiled
        self._devices, self._is_compiled = devices, is_compiled
        self._hosts = hosts
        self._filled_rows: Any = None
        self._has_own_shapes = False

    @property
    def rows_here(self) -> Any:
        """The rows of this process's replicas, filling left out; None: not known."""
        counts = self.run.counts
        if self._filled_rows is not None:
            parts = getattr(self._filled_rows, "values", [self._filled_rows])
            counts = [tf.reduce_sum(tf.cast(part > 0, tf.int32)) for part in parts]
        if counts is None or all(isinstance(n, int) for n in counts):
            return None if counts is None else sum(counts)
        return tf.add_n([tf.cast(n, tf.int32) for n in counts])

    def meter(self) -> None:
        """Lets meters count the step, where it is one of training."""
        for meter in self._observers_of(StepMeter):
            meter.note(self.rows_here, (self.args, self.kwargs))

    def compile_replicas(self) -> None:
        """Lets XLA compile what each replica computes, where the step is Keras' own."""
        if is_stock_train_step(self.fn):
            self.step = functools.partial(jitted_train_step, self.model)

    def take_batch(self) -> ReplicaRun:
        """Sees to it that every replica has rows; and what is known of them."""
        if self.is_reported and len(self._devices) > 1:
            self.args = in_parts(self.args, self._devices)
        arguments = (self.args, self.kwargs or {})
        self.run = run = sample_counts(arguments, len(self._devices))
        run.is_of_one = len(self._devices) == self._hosts == 1
        padded = find_padded((self.args, self.kwargs))
        if padded is not None:
            padded.set_shapes()
            if tf.nest.flatten(padded.rows):
                self._filled_rows = padded.rows
                self.step = step_without_filling(self.fn, self.step, self.model, run)
            else:
                self.args = without_padding(self.args)
                self.kwargs = without_padding(self.kwargs)
        elif not self._is_compiled and (self.is_step or self.is_prediction):
            arguments = add_dummy_rows(
                (self.args, self.kwargs), run, self._devices, self._hosts
            )
            self.args, self.kwargs = arguments
            self._has_own_shapes = True
        elif any(isinstance(count, int) and not count for count in run.counts or ()):
            # Where it is known that there are none, Keras does less than elsewhere.
            self._has_own_shapes = True
        return run

    def unify_shapes(self) -> None:
        """Forgets how many rows are known, where replicas or hosts have others."""
        if self._has_own_shapes:
            arguments = (self.args, self.kwargs)
            self.args, self.kwargs = with_unified_shapes(arguments, self.run)

    @contextlib.contextmanager
    def leading(
        self,
        optimizers: Sequence[keras.optimizers.Optimizer],
        made_metrics: Sequence[keras.metrics.Metric],
    ) -> Iterator[Any]:
        """While this lasts, optimizers reduce first, and losses count by their rows.

        Args:
          optimizers: all that the step may use.
          made_metrics: those made in the strategy's scope, by any model or by none.

        Yields:
          What the replicas report is noted here; see `reports.whole_logs`.
        """
        arguments = (self.args, self.kwargs)
        step = as_the_caller_is(self.step)
        built_before = 0 if tf.executing_eagerly() else len(operations())
        if not self._is_compiled:
            step = with_own_gathers(with_late_state(step, self.run), self.run)
        with (
            overridden_optimizers(optimizers, self.run),
            overridden_reports(self.model, self.run, made_metrics) as noted,
            overridden_reductions(self.model, self.run, self.fn),
            ignores_dummy_rows(self.fn, optimizers, self.run),
            own_losses(self.model, self.run),
            _looking_at_loss(self.model, self.run.guard),
            self._leaving_filling_out(made_metrics),
            batch_first(step, None if self._is_compiled else arguments) as step,
        ):
            self.step = recorded(step, self.run) if tf.executing_eagerly() else step
            yield noted
        if not (self._is_compiled or tf.executing_eagerly()):
            read_in_place(operations()[built_before:])
            suspect_written(self.run, operations()[built_before:])
        suspect_pairs(self.run)
        suspect_stored(self.run, self.model)
        warn_if_rows_counted(self.run)
        warn_if_steps_counted(self.run, made_metrics)

    def _leaving_filling_out(
        self, made_metrics: Sequence[keras.metrics.Metric]
    ) -> contextlib.AbstractContextManager[None]:
        if self._filled_rows is None:
            return contextlib.nullcontext()
        return leaves_filling_out(self.model, self.run, made_metrics)

    def observe(self) -> None:
        """Lets guards and probes see the step, where it is one of training."""
        self.run.probes = self._observers_of(NoiseProbe)
        for guard in self._observers_of(FiniteGuard)[-1:]:
            self.run.guard = guard
            self.step = guard.around(self.step)

    def _observers_of(self, kind: type) -> list[Any]:
        is_training = name_of_step(self.fn) == "train_step"
        return observers_of(self.model, kind) if is_training else []

    def own_rows_of(self, result: Any) -> Any:
        """`result` without what was computed of filling and of borrowed rows."""
        if not self.is_prediction:
            return result
        if self.run.padding:
            result = trim_rows(result, self._filled_rows)
        return drop_dummy_rows(result, self.run)


def _looking_at_loss(
    model: Any, guard: FiniteGuard | None
) -> contextlib.AbstractContextManager[None]:
    if guard is None:
        return contextlib.nullcontext()
    # What leads it already comes first: of a borrowed row the loss is 0 by then.
    led = {"compute_loss": guard.loss_noting(model.compute_loss)}
    return instance_attributes(model, led)
