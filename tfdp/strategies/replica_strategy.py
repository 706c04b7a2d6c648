"""Base of all strategies: `run`, `reduce` and the checks around them.

Keras implements the replicas' steps; these methods add the number of samples of each
replica, and override methods of the model's optimizers (`tfdp.step.optimizers`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import keras
import tensorflow as tf

from tfdp._private import frames, keras_calls, names
from tfdp._private.functions import (
    in_functions,
    is_function,
    python_function_of,
    traced_as,
)
from tfdp._private.grain_inputs import grain_input_of
from tfdp._private.keras_loops import raise_instead
from tfdp._private.keras_models import take_over_jit
from tfdp.checks import check_one_of
from tfdp.cluster import Cluster
from tfdp.data.keras_input import keras_input, with_none
from tfdp.data.padding import distribute_padded, global_batch_rows, is_of_one_size
from tfdp.data.split import is_split_by_us, parts, splittable, why_not_split
from tfdp.errors import (
    CollectiveError,
    ConfigurationError,
    LocalMeanWarning,
    LocalStateWarning,
    ScopeError,
)
from tfdp.lint.findings import Findings
from tfdp.plan.options import TPU
from tfdp.plan.shards import WithOptions
from tfdp.step import build, distillation  # noqa: F401 (replace methods of Keras)
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.observers import forget_failed_fit
from tfdp.step.own_branches import refuse_own_branches
from tfdp.step.predictions import joined_outputs, parts_of_one_shape, why_not_joined
from tfdp.step.reports import reduce_logs
from tfdp.strategies import scope
from tfdp.strategies.idle_replicas import warn_of_idle_replicas, warn_of_same_rows
from tfdp.strategies.in_words import FirstFitNotice, describe_strategy
from tfdp.strategies.scope import adopt_state
from tfdp.strategies.unused import note_used
from tfdp.tracing import keras_steps
from tfdp.tracing.loss_shares import GivenLosses
from tfdp.tracing.rows import without_padding
from tfdp.tracing.step import Step
from tfdp.tracing.trace_order import one_trace

if TYPE_CHECKING:
    from tfdp.step.losses import ReplicaLosses


class ReplicaContextStrategy(WithOptions, tf.distribute.Strategy):
    """Mixin, before TensorFlow's strategy, for replicas that reduce by themselves."""

    #: Whether the strategy itself compiles all of the replicas' steps.
    compiles_steps = False
    #: Whether short batches are padded; a number is the size of a whole batch.
    pad_batches: bool | int = False
    #: The workers of this training, and which of them this process is.
    cluster = Cluster(workers=1, rank=0, coordinator=None)
    #: Options without effect that were left out, and why; None: they are refused.
    idle_options: dict[str, str] | None = None

    def __reduce__(self) -> Any:
        """Refuses `pickle`, also of cloudpickle, Ray and multiprocessing."""
        raise ConfigurationError(
            f"{type(self).__name__} cannot be pickled: it holds devices and "
            "connections of this process. Make the strategy, and the model in its "
            "scope, in the function that the other process calls (build(hp) of "
            "KerasTuner, train_loop_per_worker of Ray), and pass settings or files."
        )

    def __repr__(self) -> str:
        try:
            devices = self.extended.worker_devices
        except AttributeError:
            return object.__repr__(self)  # while it is being created
        return describe_strategy(
            type(self).__name__,
            devices,
            hosts=self.hosts,
            engine=self.extended.reducer.transport.in_words,
            options=self.given.in_words(),
        )

    @property
    def hosts(self) -> int:
        """The number of processes that train together."""
        return 1

    @property
    def engine_name(self) -> str:
        """The engine that moves tensors, such as "in_process" or "tensorflow"."""
        return str(self.extended.reducer.transport.name)

    @property
    def _notes(self) -> tuple[str, ...]:
        return self.idle_lines

    @property
    def idle_lines(self) -> tuple[str, ...]:
        """Sentences about `idle_options`."""
        where = "a TPU" if self.given.maker == TPU else "one host"
        return tuple(
            f"{option} has no effect on {where}: {why}"
            for option, why in (self.idle_options or {}).items()
        )

    @functools.cached_property
    def _first_fit(self) -> FirstFitNotice:
        return FirstFitNotice()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files."""
        return self.cluster.rank == 0

    def barrier(self, label: str = "barrier") -> None:
        """Waits until every host has called it."""

    def gather_bytes(self, blob: bytes, label: str) -> list[bytes]:
        """Every host's `blob`, by rank, outside of graphs; all must call it."""
        return [blob]

    @functools.cached_property
    def _jit_models(self) -> weakref.WeakSet[Any]:
        """Models with steps compiled replica by replica."""
        return weakref.WeakSet()

    @property
    def _replicas(self) -> int:
        return len(self.extended.worker_devices)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all hosts."""
        if not tf.distribute.in_cross_replica_context():
            if names.is_one_device() or self.extended.current_step.here.sees_all_rows:
                return 1
            self.extended.current_step.of(GivenLosses).scales_by_hand = True
        return self._replicas

    @property
    def losses_of_replica(self) -> ReplicaLosses:
        """The scaling of Keras' losses on the calling replica (`tfdp.seams.losses`)."""
        from tfdp.step.losses import ReplicaLosses

        step, rank = self.extended.current_step, names.current_rank()
        return ReplicaLosses(step, rank, self._replicas, self._sum_scalar)

    def run(
        self, fn: Callable, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Runs `fn` on every replica; see `tf.distribute.Strategy.run`."""
        note_used()
        scope.check_not_keras_2(self)
        if not callable(fn):
            raise ConfigurationError(
                "strategy.run takes a function and its arguments, as in "
                "strategy.run(step, args=(batch,)). Received: "
                f"{type(fn).__name__}, perhaps what the function returned."
            )
        self._first_fit.look(self, self._notes)
        is_reported = frames.is_called_by_keras_loop()
        if tf.executing_eagerly():
            step = python_function_of(fn)
            if keras_steps.is_predict_step(step) or (
                is_reported and keras_steps.name_of_step(step)
            ):
                return self._run_as_one_device(step, args, kwargs)
            given, seed = (args, kwargs or {}, options, is_reported), None
            if not is_function(fn):
                fn = tf.function(fn)  # traced anew: Python runs at each call
                # As an op outside of graphs draws: else each new graph draws the same.
                seed = tf.compat.v1.get_seed(None)[1]
            with in_functions():
                return self._in_graph(fn, seed)(*given)
        with one_trace():
            return self._run(fn, args, kwargs, options, is_reported)

    def _run_as_one_device(self, step: Callable, args: Any, kwargs: Any) -> Any:
        """A step of Keras' loop outside of graphs: `run_eagerly=True`."""
        from tfdp.step.as_one_device import run_as_one_device

        model = getattr(step, "__self__", None)
        self._adopt_and_check(model, optimizers_of(model))
        return run_as_one_device(step, args, kwargs, self)

    def _run(
        self, fn: Callable, args: Any, kwargs: Any, options: Any, is_reported: bool
    ) -> Any:
        """One step, from its arguments to what one device would return."""
        from tfdp.step.call import StepCall  # with all that only steps need
        from tfdp.step.features import FEATURES

        self._one_thread.check(self.cluster.workers)
        call = StepCall(fn, args, kwargs, self, is_reported=is_reported)
        self._adopt_and_check(call.model, call.optimizers)
        if call.model in self._jit_models:
            call.compile_replicas()

        # The batch: how many rows each replica and host has, and who trains with whom.
        step = call.take_batch(FEATURES)
        call.begin_features()
        self._complete_batch(step)
        call.unify_shapes()
        call.meter()

        # The replicas: TensorFlow calls the step for each of them.
        optimizers = self.extended.made_optimizers.together_with(call.optimizers)
        made_metrics = self.extended.made_metrics.together_with(())
        with self._as_current(step), call.overriding(optimizers, made_metrics):
            result = super().run(call.replica_fn, *call.arguments, options)
            refuse_own_branches(step, self.extended.reducer.transport.order.branches)
        if not is_reported:
            warn_of_same_rows(self, call.arguments, step)

        # What they return: numbers of all rows, and the predictions of real rows.
        if call.is_reported:
            if result is None:
                raise ConfigurationError(
                    "train_step, test_step or predict_step returned None. Return a "
                    'dict of what fit shall report, such as {"loss": loss}; of '
                    "predict_step the outputs."
                )
            parts_of = self.experimental_local_results
            result = reduce_logs(result, step, call.noted, parts_of, self._sum_of_logs)
        self._warn_of_local_mean(call.model, call.fn, step)
        is_split = call.is_prediction and self._replicas > 1
        if is_split and step.batch.counts is not None and not self.compiles_steps:
            all_rows = functools.partial(self._complete_result, call.fn)
            own, of_all_hosts = call.real_rows_of, self._of_all_hosts
            return joined_outputs(result, step, self, of_all_hosts, own, all_rows)
        result = call.real_rows_of(result)
        if is_split and step.batch.counts is None:
            result = keras_steps.rows_of_first_replica(result)
        return self._complete_result(call.fn, result)

    @contextlib.contextmanager
    def _as_current(self, step: Step) -> Iterator[None]:
        outer, self.extended.current_step = self.extended.current_step, step
        try:
            yield
        finally:
            self.extended.current_step = outer

    def _adopt_and_check(self, model: Any, optimizers: list[Any]) -> None:
        adopt_state(model, optimizers, self)
        scope.check_model(model, optimizers, self)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduces `value` across replicas; see `tf.distribute.Strategy.reduce`.

        To build a model, Keras requests the mean of a batch. It gets one replica's
        batch: strings, sparse tensors and parts of different length have no mean.
        """
        model = keras_calls.model_to_build()
        if model is not None:
            self._take_over(model)
            return keras_steps.representative_batch(with_none(without_padding(value)))
        if isinstance(reduce_op, str):
            check_one_of("reduce_op", reduce_op.upper(), ("SUM", "MEAN"))
        if axis is None:
            value = parts_of_one_shape(value, self._replicas)
        return self._reduce_values(reduce_op, value, axis)

    def __enter__(self) -> NoReturn:
        raise ScopeError("A strategy is no context: write `with strategy.scope():`.")

    def __exit__(self, *_: Any) -> None:
        """Makes Python call `__enter__`."""

    def _reduce_values(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        return super().reduce(reduce_op, value, axis)

    def scope(self) -> contextlib.AbstractContextManager:
        """The scope to create models in; see `tf.distribute.Strategy.scope`."""
        note_used()
        scope.check_not_keras_2(self)
        scope.check_not_nested(self)
        model = keras_calls.model_to_build()
        if model is not None:
            self._take_over(model)
        return super().scope()

    def _take_over(self, model: Any) -> None:
        with keras_calls.reading_ended():  # it enters the scope again
            self._adopt_and_check(model, optimizers_of(model))
        is_taken = (self._replicas > 1 or self.compiles_steps) and take_over_jit(model)
        if is_taken and not self.compiles_steps:
            self._jit_models.add(model)

    def is_jitted(self, model: keras.Model) -> bool:
        """Whether XLA compiles the training steps of `model`, or will."""
        return model in self._jit_models or model.jit_compile is True

    def _in_graph(self, fn: Any, seed: int | None) -> Callable:
        """`_run` of `fn`, a `tf.function`, as one graph for all replicas; `seed`: of
        its draws by `tf.random`, None for that of TensorFlow."""
        graphs = self._graphs_of_functions
        if fn not in graphs:
            run, of = self._run, weakref.ref(fn)  # the key of a weak dictionary

            def run_on_all(*given: Any) -> Any:
                if seed is not None:
                    tf.compat.v1.get_default_graph().seed = seed
                with one_trace():
                    return run(of(), *given)  # type: ignore[arg-type]

            traced = traced_as(fn, run_on_all)
            graphs[fn] = tf.function(traced, autograph=False, reduce_retracing=True)
        return graphs[fn]

    @functools.cached_property
    def _graphs_of_functions(self) -> weakref.WeakKeyDictionary[Any, Callable]:
        return weakref.WeakKeyDictionary()

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Splits global batches; see `tf.distribute.Strategy`."""
        self._first_fit.look(self, self._notes)
        fit = frames.training_input_of_caller()
        if fit is not None and len(list(frames.fits_around())) == 1:
            forget_failed_fit(fit["self"])
        scope.check_not_nested(self)
        scope.check_dataset(dataset)
        adapter = keras_calls.adapter_of_caller()
        if grain_input_of(adapter) is not None:
            from tfdp.data.grain import with_own_state

            dataset = with_own_state(dataset, adapter)
        element_spec = dataset.element_spec
        if self._replicas > 1:
            reader = None if adapter is None else type(adapter).__name__
            dataset = splittable(dataset, reader, self._splits_multiples_of())
        self._one_thread.check(self.cluster.workers)
        warn_of_idle_replicas(self, dataset)
        dataset = self._part_of_host(dataset)
        for error_of in (why_not_joined, why_not_split):
            raise_instead(keras_calls.loop_of_caller(), error_of)
        is_odd = not is_of_one_size(dataset, self._replicas)
        if self.pad_batches and (is_odd or self.compiles_steps):
            rows = None if isinstance(self.pad_batches, bool) else self.pad_batches
            rows = global_batch_rows(dataset, rows)
            distributed = distribute_padded(self, dataset, rows)
        else:
            distributed = self._over_replicas(dataset, options)
        return keras_input(element_spec, distributed, dataset)

    def _over_replicas(self, dataset: Any, options: Any) -> Any:
        """Distributes this host's part of each batch over its replicas."""
        if self._replicas == 1 or not is_split_by_us(dataset):
            return super().experimental_distribute_dataset(dataset, options)
        split = parts(dataset, len(self.extended.worker_devices))
        return tf.distribute.Strategy.distribute_datasets_from_function(
            self, lambda _: split, options
        )

    def _part_of_host(self, dataset: Any) -> Any:
        return dataset

    @functools.cached_property
    def _one_thread(self) -> OneThread:
        return OneThread()

    has_fixed_shares = True

    def _splits_multiples_of(self) -> int | None:
        """N if multiples of N are split equally; None: all batches have one size."""
        is_filled = self.pad_batches or self.compiles_steps
        # A grain loader may read a shard on each host, with different batches.
        is_grain = grain_input_of(keras_calls.adapter_of_caller()) is not None
        has_shares = self.has_fixed_shares and not is_filled and not is_grain
        return self._replicas if has_shares else None

    @property
    def _sum_of_logs(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Sums a vector of a step's logs over the hosts; None: there is one host."""
        return None

    def _complete_batch(self, step: Step) -> None:
        """Adds other hosts' sample counts, before the replicas run."""

    def _of_all_hosts(self, vector: tf.Tensor) -> tf.Tensor:
        """The concatenated vectors of all hosts."""
        return vector

    def _complete_result(self, fn: Callable, result: Any) -> Any:
        """Adds other hosts' rows, after the replicas ran."""
        return result

    def _warn_of_local_mean(self, model: Any, called: Any, step: Step) -> None:
        is_model = isinstance(model, keras.Model)
        name = model.name if is_model else None
        fn = model if model is not None else getattr(called, "__func__", called)
        if is_model:
            self.suspicions[model] = step.suspicions
        where = "In a step" if name is None else f"In a step of model {name!r}"
        for category, sentences in (
            (LocalMeanWarning, step.suspicions),
            (LocalStateWarning, step.state_suspicions),
        ):
            for sentence in sentences:
                if name is None:  # a loop's function is traced twice, as a rule
                    told = self._told.setdefault(fn, set())
                    if sentence in told:
                        continue
                    told.add(sentence)
                warnings.warn(f"{where} {sentence}.", category, stacklevel=4)

    #: Findings about each model's last step, for `tfdp check`.
    suspicions: ClassVar = weakref.WeakKeyDictionary[keras.Model, Findings]()

    @functools.cached_property
    def _told(self) -> weakref.WeakKeyDictionary[Any, set[str]]:
        """Warnings already shown, by loop function."""
        return weakref.WeakKeyDictionary()

    def _sum_scalar(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        context, step = tf.distribute.get_replica_context(), self.extended.current_step
        if step.is_local:
            if step.group_size == 1:
                return value
            return self.extended.reducer.within_hosts.all_reduce([value], rank)[0]
        with step.summing_own_parts(rank):
            return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


class OneThread:
    """Refuses a second thread: the hosts' exchanges would come in different orders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: threading.Thread | None = None

    def check(self, hosts: int) -> None:
        if hosts == 1:
            return
        here = threading.current_thread()
        with self._lock:
            first = self._first
            if first is None or not first.is_alive():
                first = self._first = here
        if first is not here:
            raise CollectiveError(
                f"Thread {here.name!r} begins a step, or a fit, evaluate or predict, "
                f"under a strategy of {hosts} hosts that thread {first.name!r} uses: "
                "each host would reach the exchanges of the two in another order. "
                "Train one after the other in one thread, or begin when "
                f"{first.name!r} has ended. On one host, several threads can train."
            )
