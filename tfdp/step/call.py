"""The stages of one `strategy.run`, which `ReplicaContextStrategy.run` calls in
order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.functions import (
    as_replicas_run_it,
    as_the_caller_is,
    library_code,
    python_function_of,
)
from tfdp._private.names import PerReplica
from tfdp.data.keras_input import with_none
from tfdp.data.split import in_parts
from tfdp.seams.replace import Override, overridden
from tfdp.step.batch_first import tensors_of_this_graph, when_batch_is_there
from tfdp.step.buffer_synchronization import with_synchronized_buffers
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.observers import StepMeter, observers_of
from tfdp.step.reports import NotedResults
from tfdp.step.rows import gathering_real_rows, step_on_padded_batch
from tfdp.tracing.effect_order import operations
from tfdp.tracing.keras_steps import is_predict_step, is_stock_step, name_of_step
from tfdp.tracing.rows import (
    Batch,
    add_dummy_rows,
    find_padded,
    real_counts,
    sum_of,
    trim_rows,
    with_unified_shapes,
    without_dummy_rows,
    without_padding,
)
from tfdp.tracing.step import Mode, Step


class StepCall:
    """A call of `strategy.run`: function, arguments, and facts about them."""

    def __init__(
        self,
        fn: Callable,
        args: Any,
        kwargs: Any,
        strategy: Any,
        *,
        is_reported: bool,
    ):
        #: `fn` identifies the step, `replica_fn` runs; they differ for a `tf.function`.
        self.fn, self.replica_fn = python_function_of(fn), as_replicas_run_it(fn)
        self.arguments = with_none(args), with_none(kwargs)
        self.strategy, self.model = strategy, getattr(self.fn, "__self__", None)
        #: Of the model; and while replicas are traced, all that were made in the scope.
        self.optimizers: list[Any] = optimizers_of(self.model)
        self.made_metrics: Sequence[keras.metrics.Metric] = ()
        #: The results of metrics, as they were read, for `reports.reduce_logs`.
        self.noted = NotedResults()
        #: What the replicas have built.
        self.operations: Sequence[tf.Operation] = ()
        self.is_step = bool(name_of_step(self.fn))
        self.is_prediction = is_predict_step(self.fn)
        self._is_compiled = strategy.compiles_steps
        #: Whether results are combined over replicas, those of other hosts included.
        self.is_reported = is_reported and self.is_step and not self._is_compiled
        self._padded_rows: Any = None
        self._has_dynamic_rows = False

    def compile_replicas(self) -> None:
        if getattr(self.fn, "__func__", None) is keras.Model.train_step:
            from tfdp.step.jit import jitted_train_step

            self.replica_fn = functools.partial(jitted_train_step, self.model)

    def take_batch(self, features: Sequence[Any]) -> Step:
        """Reads the rows of each replica, and gives each of them at least one."""
        devices = self.strategy.extended.worker_devices
        hosts = self.strategy.cluster.workers
        replicas = len(devices)
        if self.is_reported and replicas > 1:
            args, kwargs = self.arguments
            self.arguments = in_parts(args, devices), kwargs
        self.step = step = Step(replicas, Batch.of(self.arguments, replicas))
        step.features, step.is_of_one = features, replicas == hosts == 1
        padded = find_padded(self.arguments)
        if padded is not None:
            padded.set_shapes()
            if tf.nest.flatten(padded.rows):
                self._padded_rows, step.mode = padded.rows, Mode.PADDED
                self.replica_fn = step_on_padded_batch(
                    self.fn, self.replica_fn, self.model, step
                )
            else:
                self.arguments = without_padding(self.arguments)
        elif not self._is_compiled and (self.is_step or self.is_prediction):
            self.arguments, rows = add_dummy_rows(
                self.arguments, step.batch.counts, devices, hosts
            )
            for trace, own in zip(step.traces, rows, strict=True):
                trace.rows = own
            self._has_dynamic_rows = True
        else:
            # With static zero rows Keras builds less than on other replicas.
            self._has_dynamic_rows = step.batch.may_have_empty_replicas
        return step

    def begin_features(self) -> None:
        """Lets each feature look at the step, before other hosts' rows are known."""
        for feature in self.step.features:
            feature.begin(self)

    def unify_shapes(self) -> None:
        """Makes row counts dynamic where replicas or hosts have different ones."""
        if self._has_dynamic_rows:
            self.arguments = with_unified_shapes(self.arguments, self.step.batch)
        self.step.note_batch(self.arguments)

    def meter(self) -> None:
        """Lets attached meters count the step, and stages begin it, if it trains their
        model."""
        meters = self.observers_of(StepMeter)
        if not (meters or self.step.stages):
            return
        counts: Any = self.step.batch.counts
        if self._padded_rows is not None:
            counts = real_counts(self._padded_rows)
        rows_here = None if counts is None else sum_of(counts)
        for meter in meters:
            meter.note(rows_here, self.arguments)
        for stage in self.step.stages:
            stage.begin_step(rows_here, tensors_of_this_graph(self.arguments))

    @property
    def drops_gradients(self) -> bool:
        """Whether a replica without rows sets its gradients to 0, not only its loss."""
        return self.step.has_dummy_rows and not is_stock_step(self.fn)

    def model_inputs(self) -> Any:
        """The specs of a model's inputs, for any number of rows, in a step of Keras'.

        Raises `TypeError` for inputs that are no plain tensors.
        """
        [data, *_], _ = self.arguments
        own = tf.nest.map_structure(
            lambda part: part.values[0] if isinstance(part, PerReplica) else part,
            data,
            expand_composites=False,
        )
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(own)

        def spec(part: Any) -> tf.TensorSpec:
            if not isinstance(part, tf.Tensor):
                raise TypeError(f"no plain tensor: {part!r}")
            return tf.TensorSpec([None, *part.shape[1:]], part.dtype)

        return tf.nest.map_structure(spec, inputs, expand_composites=False)

    def observers_of(self, kind: type) -> list[Any]:
        """Observers that callbacks attached to the training steps of the model."""
        is_training = name_of_step(self.fn) == "train_step"
        return observers_of(self.model, kind) if is_training else []

    @contextlib.contextmanager
    def overriding(
        self,
        optimizers: Sequence[Optimizer],
        made_metrics: Sequence[keras.metrics.Metric],
    ) -> Iterator[None]:
        """Makes `replica_fn` what each replica runs within the context, with tfdp's
        methods in Keras' objects: those of the model, and those made in the scope."""
        self.optimizers, self.made_metrics = list(optimizers), made_metrics
        in_graph = not self._is_compiled
        built_before = len(operations()) if in_graph else 0
        self.replica_fn = self._step_of_replica()
        with overridden(self._overrides()):
            yield
        if in_graph:
            self.operations = operations()[built_before:]
        for feature in self.step.features:
            feature.finish(self)

    def _overrides(self) -> Iterator[Override]:
        for feature in self.step.features:
            yield from feature.overrides(self)

    def _step_of_replica(self) -> Callable:
        """The step, which waits for the batch, and synchronizes buffers at its end."""
        step, fn = self.step, as_the_caller_is(self.replica_fn)
        if self._is_compiled:
            from tfdp.step.batch_inside import noting_batch

            return noting_batch(fn, self.arguments, step)
        batch_is_there = when_batch_is_there(self.arguments)
        fn = with_synchronized_buffers(fn, step)

        @library_code
        @functools.wraps(fn)
        def step_of_replica(*args: Any, **kwargs: Any) -> Any:
            # Replicas are traced in threads, which do not inherit control dependencies.
            with tf.control_dependencies(batch_is_there), gathering_real_rows(step):
                return fn(*args, **kwargs)

        return step_of_replica

    def real_rows_of(self, result: Any) -> Any:
        """A prediction without padding and dummy rows."""
        if not self.is_prediction:
            return result
        if self.step.mode is Mode.PADDED:
            result = trim_rows(result, self._padded_rows)
        return without_dummy_rows(result, [one.rows for one in self.step.traces])
