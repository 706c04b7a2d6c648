"""What every strategy of tfdp shares: `run`, `reduce` and the checks around them.

The replicas' own part of a step stays Keras'; these methods tell it how many samples
each replica has, and lead the model's optimizers (`tfdp._tf.keras_optimizers`).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._tf import keras_batch, names, scope_checks
from tfdp._tf.jit_step import is_stock_train_step, jitted_train_step, take_over_jit
from tfdp._tf.keras_losses import loss_replica_count, why_loss_seems_local
from tfdp._tf.keras_optimizers import led_optimizers, optimizers_of
from tfdp._tf.replica_run import ReplicaRun, sample_counts
from tfdp.errors import LocalMeanWarning

__all__ = ["ReplicaContextStrategy"]


class ReplicaContextStrategy(tf.distribute.Strategy):
    """A strategy whose replicas reduce and update on their own; a mixin.

    It stands before the TensorFlow strategy among the bases. The strategy's extended
    has `current_run` (a `ReplicaRun`) and reduces in replica context.
    """

    #: Whether the strategy compiles the replicas' steps itself, all of them.
    compiles_steps = False

    @functools.cached_property
    def _jit_models(self) -> weakref.WeakSet[Any]:
        """The models whose steps are compiled replica by replica."""
        return weakref.WeakSet()

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
            if (self._replicas > 1 or self.compiles_steps) and take_over_jit(model):
                if not self.compiles_steps:
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

    def _sum_scalar(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
