"""The stages of one `strategy.run`, which `ReplicaContextStrategy.run` calls in
order."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.functions import (
    as_replicas_run_it,
    as_the_caller_is,
    python_function_of,
)
from tfdp.chain.finite_guard import FiniteGuard
from tfdp.chain.reduction import Stage
from tfdp.chain.shards import refuse_own_scaling
from tfdp.chain.table_rows import read_in_place
from tfdp.data.keras_input import with_none
from tfdp.data.split import in_parts
from tfdp.seams.replace import Override, overridden
from tfdp.step.batch_first import batch_first
from tfdp.step.buffer_synchronization import (
    warn_about_stored,
    warn_about_written,
    with_synchronized_buffers,
)
from tfdp.step.dummy_rows import (
    add_dummy_rows,
    drop_dummy_rows,
    dummy_row_overrides,
    with_real_gathers,
    with_unified_shapes,
)
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.jit import jitted_train_step
from tfdp.step.losses import added_loss_overrides, reduction_overrides
from tfdp.step.metric_state import warn_if_rows_counted, warn_if_steps_counted
from tfdp.step.observers import StepMeter, observers_of
from tfdp.step.optimizers import optimizer_overrides, warn_about_draws
from tfdp.step.padding import padding_overrides, step_on_padded_batch
from tfdp.step.reports import NotedResults, recorded, report_overrides
from tfdp.tracing.effect_order import operations
from tfdp.tracing.keras_steps import is_predict_step, name_of_step
from tfdp.tracing.loss_checks import find_faults_of_losses
from tfdp.tracing.padded_batch import find_padded, trim_rows, without_padding
from tfdp.tracing.run import ReplicaRun
from tfdp.tracing.sample_counts import sample_counts


class StepCall:
    """A call of `strategy.run`: function, arguments, and facts about them."""

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
        #: `fn` identifies the step, `step` runs; they differ for a `tf.function`.
        self.fn, self.step = python_function_of(fn), as_replicas_run_it(fn)
        self.args, self.kwargs = with_none(args), with_none(kwargs)
        self.model = getattr(self.fn, "__self__", None)
        self.optimizers = optimizers_of(self.model)
        self.is_step = bool(name_of_step(self.fn))
        self.is_prediction = is_predict_step(self.fn)
        #: Whether results are combined over replicas, those of other hosts included.
        self.is_reported = is_reported and self.is_step and not is_compiled
        self._devices, self._is_compiled = devices, is_compiled
        self._hosts = hosts
        self._padded_rows: Any = None
        self._has_dynamic_rows = False

    @property
    def rows_here(self) -> Any:
        """The rows of this process's replicas without padding; None: unknown."""
        counts = self.run.counts
        if self._padded_rows is not None:
            parts = getattr(self._padded_rows, "values", [self._padded_rows])
            counts = [tf.reduce_sum(tf.cast(part > 0, tf.int32)) for part in parts]
        if counts is None or all(isinstance(n, int) for n in counts):
            return None if counts is None else sum(counts)
        return tf.add_n([tf.cast(n, tf.int32) for n in counts])

    def meter(self) -> None:
        """Lets attached meters count the step, if it trains their model."""
        for meter in self._observers_of(StepMeter):
            meter.note(self.rows_here, (self.args, self.kwargs))

    def compile_replicas(self) -> None:
        if getattr(self.fn, "__func__", None) is keras.Model.train_step:
            self.step = functools.partial(jitted_train_step, self.model)

    def take_batch(self) -> ReplicaRun:
        """Reads the rows of each replica, and gives each of them at least one."""
        if self.is_reported and len(self._devices) > 1:
            self.args = in_parts(self.args, self._devices)
        arguments = (self.args, self.kwargs or {})
        self.run = run = sample_counts(arguments, len(self._devices))
        run.is_of_one = len(self._devices) == self._hosts == 1
        padded = find_padded((self.args, self.kwargs))
        if padded is not None:
            padded.set_shapes()
            if tf.nest.flatten(padded.rows):
                self._padded_rows = padded.rows
                self.step = step_on_padded_batch(self.fn, self.step, self.model, run)
            else:
                self.args = without_padding(self.args)
                self.kwargs = without_padding(self.kwargs)
        elif not self._is_compiled and (self.is_step or self.is_prediction):
            arguments = (self.args, self.kwargs)
            self.args, self.kwargs = add_dummy_rows(
                arguments, run, self._devices, self._hosts
            )
            self._has_dynamic_rows = True
        elif any(isinstance(count, int) and not count for count in run.counts or ()):
            # With static zero rows Keras builds less than on other replicas.
            self._has_dynamic_rows = True
        return run

    def unify_shapes(self) -> None:
        """Makes row counts dynamic where replicas or hosts have different ones."""
        if self._has_dynamic_rows:
            arguments = (self.args, self.kwargs)
            self.args, self.kwargs = with_unified_shapes(arguments, self.run)

    @contextlib.contextmanager
    def leading(
        self,
        optimizers: Sequence[Optimizer],
        made_metrics: Sequence[keras.metrics.Metric],
    ) -> Iterator[Any]:
        """Within this, optimizers reduce first, and losses are weighted by rows; yields
        the recorded reports, see `reports.reduce_logs`."""
        arguments = (self.args, self.kwargs)
        step = as_the_caller_is(self.step)
        built_before = 0 if tf.executing_eagerly() else len(operations())
        if not self._is_compiled:
            step = with_real_gathers(
                with_synchronized_buffers(step, self.run), self.run
            )
        noted, model, run = NotedResults(), self.model, self.run
        # Each calls the ones before it: a guard checks a loss that is 0 for dummy rows,
        # and all others get the weights that padding sets.
        overrides = [
            optimizer_overrides(optimizers, run),
            report_overrides(model, run, made_metrics, noted),
            reduction_overrides(model, run, self.fn),
            dummy_row_overrides(self.fn, optimizers, run),
            added_loss_overrides(model, run),
            loss_overrides(model, run.guard),
        ]
        if self._padded_rows is not None:
            overrides.append(padding_overrides(model, run, made_metrics))
        with (
            overridden(itertools.chain(*overrides)),
            batch_first(step, None if self._is_compiled else arguments) as step,
        ):
            self.step = recorded(step, self.run) if tf.executing_eagerly() else step
            yield noted
        if not (self._is_compiled or tf.executing_eagerly()):
            read_in_place(operations()[built_before:])
            warn_about_written(self.run, operations()[built_before:])
        if self.run.given_shards:
            refuse_own_scaling(self.run)
        warn_about_draws(self.run)
        find_faults_of_losses(self.run, self.model, self.fn)
        warn_about_stored(self.run, self.model)
        warn_if_rows_counted(self.run)
        warn_if_steps_counted(self.run, made_metrics)

    def observe(self) -> None:
        stages = self._observers_of(Stage)
        guards = [stage for stage in stages if isinstance(stage, FiniteGuard)]
        self.run.stages = [stage for stage in stages if stage not in guards[:-1]]
        for guard in guards[-1:]:
            self.run.guard = guard
            self.step = guard.around_step(self.step)

    def _observers_of(self, kind: type) -> list[Any]:
        is_training = name_of_step(self.fn) == "train_step"
        return observers_of(self.model, kind) if is_training else []

    def own_rows_of(self, result: Any) -> Any:
        if not self.is_prediction:
            return result
        if self.run.padding:
            result = trim_rows(result, self._padded_rows)
        return drop_dummy_rows(result, self.run)


def loss_overrides(model: Any, guard: FiniteGuard | None) -> Iterator[Override]:
    """With these, a guard checks the loss."""
    if guard is not None:
        yield Override(model, "compute_loss", guard.checks_loss)
