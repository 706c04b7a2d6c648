"""`DataParallelStrategy`: the one line that makes `model.fit` data-parallel."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._tf import keras_batch, names, scope_checks
from tfdp._tf.extended import DataParallelExtended
from tfdp._tf.jit_step import is_stock_train_step, jitted_train_step, take_over_jit
from tfdp._tf.keras_losses import loss_replica_count, why_loss_seems_local
from tfdp._tf.keras_optimizers import led_optimizers, optimizers_of
from tfdp._tf.replica_run import ReplicaRun, sample_counts
from tfdp._tf.shard_updates import Sharding
from tfdp.buckets import Bucket
from tfdp.communication import Communication
from tfdp.devices import find_devices
from tfdp.errors import ConfigurationError, LocalMeanWarning
from tfdp.hierarchical import HierarchicalAllReduce
from tfdp.shards import SHARD_STAGES, shard_stage
from tfdp.topology import Topology

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(tf.distribute.MirroredStrategy):
    """Trains one model on all devices of this host, each on its part of the batch.

    With N replicas and per-replica mean losses L_r, one step computes

        g = (1 / N) sum_r grad L_r(w),    w <- update(w, g)

    on every replica alike. To Keras and TensorFlow it is a
    `tf.distribute.MirroredStrategy`; gradients, though, are reduced and applied
    within each replica, in buckets, while backprop still runs.

    Args:
      devices: names of the devices, one replica each, such as `["GPU:0", "GPU:1"]`;
        None takes all GPUs, or all logical CPUs where there is no GPU.
      communication: how replicas exchange tensors; None for the defaults.
      shard: what each replica holds 1 / N of only: "none" (0), "optimizer" (1: its
        state), "gradients" (2: and gradients), "parameters" (3: and weights). The
        numbers are the stages of ZeRO.
      shard_min_bytes: variables below this size are not sharded.
      draws_per_replica: True: dropout, noise and augmentation layers draw differently
        on every replica, reproducibly from their seed. False: identical draws, as
        stock TensorFlow makes them.

    Raises:
      ConfigurationError: when an argument is not as above.
      DeviceError: when a device does not exist or is named twice.

    Cost: per step and replica about 2 n (N - 1) / N bytes for n bytes of gradients;
    3 n (N - 1) / N with shard="parameters".

    ```python
    import keras
    import tfdp

    strategy = tfdp.DataParallelStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    ```
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        communication: Communication | None = None,
        shard: str | int = "none",
        shard_min_bytes: int = 32 * 1024,
        draws_per_replica: bool = True,
    ):
        self._sharding = _check_sharding(shard, shard_min_bytes)
        self._jit_models: weakref.WeakSet[Any] = weakref.WeakSet()
        cross_device_ops = HierarchicalAllReduce(communication)
        extended = self._make_extended(
            find_devices(devices),
            cross_device_ops.communication,
            cross_device_ops,
            bool(draws_per_replica),
        )
        # MirroredStrategy's own constructor would make a stock extended.
        tf.distribute.Strategy.__init__(self, extended)

    def _make_extended(
        self,
        devices: tuple[str, ...],
        communication: Communication,
        cross_device_ops: HierarchicalAllReduce,
        draws_per_replica: bool,
    ) -> DataParallelExtended:
        self._pipeline = cross_device_ops.pipeline(devices)
        return DataParallelExtended(
            self,
            devices,
            self._pipeline,
            cross_device_ops,
            draws_per_replica=draws_per_replica,
            sharding=self._sharding,
        )

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files: always, on one host."""
        return True

    def barrier(self, label: str = "barrier") -> None:
        """Waits until every host has come here: at once, on one host."""

    @property
    def communication(self) -> Communication:
        """How replicas exchange tensors."""
        return self._pipeline.communication

    @property
    def topology(self) -> Topology:
        """The levels over which gradients are reduced."""
        return self._pipeline.engine.topology

    @property
    def engine_name(self) -> str:
        """The engine that moves tensors: "in_process" or "tensorflow"."""
        return self._pipeline.engine.name

    def plan(self, gradients: Sequence[tf.Tensor]) -> tuple[Bucket, ...]:
        """The buckets in which `gradients` travel.

        Args:
          gradients: tensors in the order of their variables; shapes and types count.

        Returns:
          One `Bucket` for each exchange, in the order of launch.
        """
        return self._pipeline.plan(gradients)

    @property
    def _replicas(self) -> int:
        return len(self.extended.worker_devices)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas.

        Keras' loss functions, which divide by it, get the replica's exact share of
        the global batch instead (see `tfdp._tf.keras_losses`).
        """
        replicas = self._replicas
        if replicas > 1 and not tf.distribute.in_cross_replica_context():
            count = loss_replica_count(
                self.extended.current_run, names.current_rank(), self._sum_scalar
            )
            if count is not None:
                return count  # type: ignore[return-value]
        return replicas

    def run(
        self,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """Runs `fn` on every replica; see `tf.distribute.Strategy.run`.

        Knows how many samples each replica gets, and, when `fn` is a model's method,
        the model's optimizers: gradients are reduced before they are clipped.
        """
        model = getattr(fn, "__self__", None)
        optimizers = optimizers_of(model)
        step = fn
        if model in self._jit_models and is_stock_train_step(fn):
            step = functools.partial(jitted_train_step, model)
        scope_checks.check_model(model, optimizers, self)
        run = sample_counts((args, kwargs or {}), len(self.extended.worker_devices))
        self._complete_run(run)
        outer, self.extended.current_run = self.extended.current_run, run
        try:
            with led_optimizers(optimizers, run):
                result = super().run(step, args, kwargs, options)
        finally:
            self.extended.current_run = outer
        if optimizers:
            self._warn_of_local_mean(model, fn, run)
        return self._complete_result(fn, result)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduces `value` across replicas; see `tf.distribute.Strategy.reduce`.

        Keras asks for the mean of a whole batch to learn its shapes and types. That
        call gets one replica's batch instead: the mean of strings, sparse tensors or
        parts of different length does not exist.
        """
        model = names.model_built_by_caller()
        if model is not None:
            scope_checks.check_model(model, optimizers_of(model), self)
            if self._replicas > 1 and take_over_jit(model):
                self._jit_models.add(model)
            return keras_batch.representative_batch(value)
        return self._reduce_values(reduce_op, value, axis)

    def _reduce_values(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        return super().reduce(reduce_op, value, axis)

    def scope(self) -> contextlib.AbstractContextManager:
        """The scope to make models in; see `tf.distribute.Strategy.scope`."""
        scope_checks.check_not_nested(self)
        return super().scope()

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Splits global batches; see `tf.distribute.Strategy`."""
        scope_checks.check_not_nested(self)
        scope_checks.check_dataset(dataset)
        return super().experimental_distribute_dataset(dataset, options)

    def _complete_run(self, run: ReplicaRun) -> None:
        """Adds what only several hosts together know; before the replicas run."""

    def _complete_result(self, fn: Callable, result: Any) -> Any:
        """Adds what only several hosts together have; after the replicas ran."""
        return result

    def _warn_of_local_mean(self, model: Any, step: Callable, run: ReplicaRun) -> None:
        why = why_loss_seems_local(model, step, run)
        if why is None:
            return
        warnings.warn(
            f"The loss of model {model.name!r} was not brought to its share of the "
            f"global batch: {why}. The gradients of the {run.replicas} replicas are "
            "added, so a mean over the local batch makes each update "
            f"{run.replicas} times too large. If it is such a mean, take the gradient "
            "of tfdp.losses.local_mean(loss); if it is a sum, or already divided by "
            "the global batch, say so with tfdp.losses.local_sum(loss).",
            LocalMeanWarning,
            stacklevel=3,
        )

    @property
    def shard(self) -> str:
        """What is sharded: "none", "optimizer", "gradients" or "parameters"."""
        return SHARD_STAGES[self._sharding.stage]

    def _sum_scalar(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


def _check_sharding(shard: str | int, shard_min_bytes: int) -> Sharding:
    is_size = isinstance(shard_min_bytes, int) and not isinstance(shard_min_bytes, bool)
    if not is_size or shard_min_bytes < 0:
        raise ConfigurationError(
            "shard_min_bytes must be an integer of at least 0. Received: "
            f"{shard_min_bytes!r}."
        )
    return Sharding(shard_stage(shard), shard_min_bytes)
