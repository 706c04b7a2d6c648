"""`DistributedOptimizer`: accumulation, loss scaling and local training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdp import compression
from tfdp import sync as methods
from tfdp._private import optimizer_hooks as hooks
from tfdp._private.names import replicas_of
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME, WEIGHT_NAME
from tfdp.chain.reduction import Reduction, Stage, update_through
from tfdp.chain.stages import agree_finite, reduce_gradients
from tfdp.checks import check_whole, is_number, what_it_is
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.step.buffer_synchronization import synchronize_layer_state
from tfdp.step.find_optimizers import has_no_effect
from tfdp.step.local_training import LocalTraining
from tfdp.step.local_values import LocalValues
from tfdp.step.make_local_training import (
    make_local_training,
    refuse_outside_of_fit,
    refuse_with_sync,
)
from tfdp.step.optimizers import build_before_step, refuse_overwritten, takes_reduced
from tfdp.sync.policy import Policy
from tfdp.tracing.batch_weight import batch_weight
from tfdp.tracing.keras_steps import as_tensors
from tfdp.tracing.loss_shares import note_gradients
from tfdp.tracing.step import Step, current_step
from tfdp.variables.in_shards import updates_of

INITIAL_SCALE = 2.0**15


# A LossScaleOptimizer, so that Keras does not wrap it in another one under float16.
@keras.saving.register_keras_serializable("tfdp")
class DistributedOptimizer(hooks.LossScaleHooks):
    """Accumulates locally, reduces once, tests, clips and updates, in this order.

    For K micro-steps with global batches of weight W_k (samples, or unmasked tokens)
    and gradients g_kr of replica r, one update uses

        g = sum_k W_k sum_r g_kr / sum_k W_k

    the gradient of one step on all K batches together. For compiled losses with
    `reduction="sum"`, in Keras' own `train_step`, it is sum_k sum_r g_kr; sums in a
    custom step are weighted like means. Without a strategy `accumulate_steps` means
    what Keras' `gradient_accumulation_steps` does, the mean of the K gradients: equal
    to g for means over K batches of equal weight, and g / K for sums.
    `iterations` counts updates. Without accumulation, stock optimizers are exact under
    `DataParallelStrategy` as well.

    Args:
      optimizer: any Keras optimizer, with its own clipping, decay, EMA, schedule and
        `loss_scale_factor`; without `gradient_accumulation_steps`.
      accumulate_steps: micro-steps per update, an integer of at least 1.
      dynamic_loss_scale: True scales the loss up and skips updates with gradients that
        are not finite on any replica; None does so if the current dtype policy is
        `mixed_float16`.
      initial_scale: the first loss scale, above 0.
      dynamic_growth_steps: finite updates until the scale doubles.
      sync: a value of `tfdp.sync`. `LocalSGD` or `DiLoCo`: replicas make many updates
        independently before they synchronize; see docs/local-sgd.md. `Delayed` or
        `BoundedStaleness`: updates are by the gradients of earlier steps.
        `BackupWorkers`: updates do not wait for late hosts. `Asynchronous`: hosts train
        at their own pace. For these four see docs/stragglers.md. None: all replicas
        synchronize in every update.
      name: the optimizer's name.

    Raises:
      ConfigurationError: for a bad argument.
      ScopeError: at the first update, under a strategy other than tfdp's.

    Cost: one reduction of the gradients per `accumulate_steps` micro-steps; above 1,
    also one accumulator per variable.

    ```python
    import keras
    import tfdp

    strategy = tfdp.DataParallelStrategy()
    with strategy.scope():
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.Adam(1e-3, global_clipnorm=1.0), accumulate_steps=4
        )
    ```
    """

    reduces_gradients = True  # see tfdp.step.optimizers
    built: bool

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        *,
        accumulate_steps: int = 1,
        dynamic_loss_scale: bool | None = None,
        initial_scale: float = INITIAL_SCALE,
        dynamic_growth_steps: int = 2000,
        sync: Policy | None = None,
        name: str | None = None,
    ):
        check_arguments(optimizer, accumulate_steps, initial_scale)
        check_whole("dynamic_growth_steps", dynamic_growth_steps, 1)
        if dynamic_loss_scale is False and initial_scale != INITIAL_SCALE:
            raise ConfigurationError(
                f"initial_scale={initial_scale} has no effect with "
                "dynamic_loss_scale=False. Leave it out; a constant scale is "
                "loss_scale_factor of the inner optimizer."
            )
        # Keras' base class removes it from the inner optimizer.
        static_scale = optimizer.loss_scale_factor
        super().__init__(
            optimizer,
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
            name=name,
        )
        self.accumulate_steps = accumulate_steps
        self.static_scale = static_scale
        if dynamic_loss_scale is None:
            dynamic_loss_scale = keras.config.dtype_policy().name == "mixed_float16"
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self._given_sync = checked_sync(sync)
        self.sync = self._given_sync
        if self.sync is not None and self.sync.is_plain:
            self.sync = None
        if self.sync is not None:
            refuse_with_sync(self)
        self._rounds: LocalTraining | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        # Keras' base class would not track the inner optimizer's variables other than
        # slots (Nadam, Adafactor): no file would hold them.
        self.inner_optimizer.build(variables)
        super().build(variables)
        if self.accumulate_steps > 1:
            self._accumulators = [
                self.add_variable_from_reference(v, name=ACCUMULATOR_NAME)
                for v in variables
            ]
            self._weight_sum = self.add_variable(shape=(), name=WEIGHT_NAME)
            self._micro_step = self.add_variable((), dtype="int", name="micro_step")
        if self.sync is not None and has_no_effect(self.sync, hooks.strategy_of(self)):
            self.sync = None
        if self.sync is not None:
            self._rounds = make_local_training(
                self, self.sync, variables, self._update_tested
            )
            if self.sync.keeps_local_values:
                # An attribute, so that checkpoints track it.
                self._local_values = self._rounds and self._rounds.values.stored

    def train_apart(self, layer_state: Sequence[Any], step: Step) -> None:
        """Prepares a local step; `layer_state`: variables without an optimizer."""
        if self._rounds is None:
            raise ConfigurationError(
                f"The optimizer {self.name!r} has sync={self.sync!r} and is not built, "
                "so a step that reads the weights before the update would not see the "
                "replicas' own. Call optimizer.build(model.trainable_variables) under "
                "the strategy's scope first."
            )
        self._rounds.keep_layer_state(layer_state)
        self._rounds.before_step(step)

    @property
    def rounds(self) -> LocalTraining | None:
        return self._rounds

    @property
    def staleness_counts(self) -> dict[int, int]:
        """Number of updates by staleness, of all owners, from the first `fit` to the
        last end of an epoch, with `sync=tfdp.sync.Asynchronous()`."""
        return dict(getattr(self._rounds, "staleness", {}))

    def make_equal(self) -> None:
        """See `LocalTraining.make_equal`."""
        if self._rounds is not None:
            self._rounds.make_equal()

    def local_values(self, layer_state: Sequence[Any]) -> LocalValues | None:
        """The replicas' local values (see `train_apart`); None: no local training."""
        sync = self.sync
        if self._rounds is None or sync is None or not sync.trains_locally:
            return None
        if not sync.keeps_local_values:
            return None
        self._rounds.keep_layer_state(layer_state)
        return self._rounds.values

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        if self._rounds is None or self._rounds.have_synchronized():
            super().finalize_variable_values(var_list)
        if self._rounds is not None:  # Keras calls this at the end of `fit`
            self._rounds.end_fit()

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales the loss before the gradient is taken; `apply` divides."""
        if self.dynamic_loss_scale:
            loss = super().scale_loss(loss)
        return loss if self.static_scale is None else loss * self.static_scale

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """One micro-step; every `accumulate_steps`-th one updates the variables."""
        if not self.built:
            build_before_step(self, list(trainable_variables))
        _check_place(self)
        sync = self.sync
        if sync is not None and (sync.trains_locally or self._rounds is None):
            refuse_outside_of_fit(self)
        variables = list(trainable_variables or hooks.variables_built_with(self))
        refuse_overwritten(variables, type(self).__name__)
        gradients = as_tensors(grads)
        found = current_step()
        if found is not None and not found[0].is_updating:
            note_gradients(*found, gradients, self.name)
        if self.static_scale is not None:
            scale = self.static_scale
            gradients = [g if g is None else ops.divide(g, scale) for g in gradients]
        if self.accumulate_steps == 1:
            weighs = self.sync is not None and self.sync.weighs_batches
            found = current_step() if weighs else None
            weight = None if found is None else batch_weight(*found)
            reduced = self._reduced(gradients, variables, weight)
            self._update_weights(reduced, variables)
        else:
            accumulate = functools.partial(self._accumulate, gradients, variables)
            self._update_through(gradients, variables, accumulate)

    @property
    def has_accumulated(self) -> bool:
        return self.accumulate_steps > 1 and int(self._micro_step.numpy()) != 0

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["optimizer"] = config.pop("inner_optimizer")
        config.update(
            accumulate_steps=self.accumulate_steps,
            dynamic_loss_scale=self.dynamic_loss_scale,
            sync=self._given_sync and self._given_sync.get_config(),
        )
        config["optimizer"]["config"]["loss_scale_factor"] = self.static_scale
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> DistributedOptimizer:
        config = dict(config)
        sync = dict(config.get("sync") or {})
        if sync.get("compression") is not None:
            sync["compression"] = compression.from_config(sync["compression"])
            config["sync"] = sync
        config["optimizer"] = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return cls(**config)

    def _accumulate(self, gradients: list[Any], variables: list[Any]) -> None:
        found = current_step()
        counted = None if found is None else batch_weight(*found)
        are_sums = found is not None and counted is None
        kept = _weight_to_keep(
            tf.ones([]) if are_sums else counted,
            tf.convert_to_tensor(self._weight_sum),
            tf.convert_to_tensor(self._micro_step),
        )
        weight = tf.abs(kept)
        indices = [hooks.variable_index(self, variable) for variable in variables]
        sums_every_batch = updates_of(self).sums_every_batch
        if sums_every_batch:
            gradients = self._reduced(gradients, variables, weight)
        elif found is not None:
            rounds = self._rounds
            bring = (
                rounds.synchronize_layer_state if rounds else synchronize_layer_state
            )
            bring(*found)
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                dense = tf.convert_to_tensor(gradient)
                weighted = dense * tf.cast(weight, dense.dtype)
                self._add(self._accumulators[index], weighted)
        self._add(self._weight_sum, kept)
        self._add(self._micro_step, tf.constant(1, self._micro_step.dtype))

        def update() -> None:
            total = tf.abs(tf.convert_to_tensor(self._weight_sum))
            if are_sums:
                total /= tf.cast(tf.convert_to_tensor(self._micro_step), total.dtype)
            means = [
                None
                if gradient is None
                else tf.math.divide_no_nan(
                    tf.convert_to_tensor(self._accumulators[index]),
                    tf.cast(total, self._accumulators[index].dtype),
                )
                for index, gradient in zip(indices, gradients, strict=True)
            ]
            if not sums_every_batch:
                means = self._reduced(means, variables, None if are_sums else total)
            self._update_weights(means, variables)
            for spent in (*self._accumulators, self._weight_sum, self._micro_step):
                zeros = tf.zeros_like(tf.convert_to_tensor(spent))
                self._on_this_replica(spent, lambda own, v: own.assign(v), zeros)

        is_last = tf.convert_to_tensor(self._micro_step) >= self.accumulate_steps
        ops.cond(is_last, update, lambda: None)

    def _reduced(
        self, gradients: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """Sums over replicas; `weight`: that of their batches, None for sums."""
        found = current_step()
        if found is None:
            return gradients
        step, rank = found
        places = [i for i, g in enumerate(gradients) if g is not None]
        given = [gradients[i] for i in places]
        of = [variables[i] for i in places]
        if self._rounds is None:
            reduced = reduce_gradients(given, step, rank, of, self)
        else:
            own = Reduction(given, of, step, rank, self)
            reduced = self._rounds.reduced(own, weight)
        results = list(gradients)
        for place, gradient in zip(places, reduced, strict=True):
            results[place] = gradient
        return results

    def _update_weights(self, gradients: list[Any], variables: list[Any]) -> None:
        """Tests, clips and updates, with reduced gradients."""
        update = functools.partial(self._update_tested, gradients, variables)
        rounds: list[Stage] = [] if self._rounds is None else [self._rounds]
        self._update_through(gradients, variables, update, rounds)

    def _update_through(
        self,
        gradients: list[Any],
        variables: list[Any],
        update: Callable[[], Any],
        chain: Sequence[Stage] = (),
    ) -> None:
        """Makes an update within the stages around it; `gradients` are its own."""
        found = current_step()
        if found is None:
            update()
            return
        step, rank = found
        reduction = Reduction(gradients, variables, step, rank, self)
        update_through(reduction, update, chain)

    def _update_tested(self, gradients: list[Any], variables: list[Any]) -> None:
        with takes_reduced(self.inner_optimizer):
            if not self.dynamic_loss_scale:
                self.inner_optimizer.apply(gradients, variables)
                return
            found = current_step()
            if found is None or updates_of(self).has_whole_sums:
                is_finite = self.check_finite(gradients)
            else:  # each replica tests its own part
                is_finite = agree_finite(self, gradients, *found)
            self.update_if_finite(gradients, variables, is_finite)

    def _add(self, variable: keras.Variable, value: tf.Tensor) -> None:
        self._on_this_replica(variable, lambda own, v: own.assign_add(v), value)

    def _on_this_replica(self, variable: keras.Variable, fn: Any, value: Any) -> None:
        """Updates this replica's own copy: accumulators differ between replicas."""
        if current_step() is None:
            fn(variable.value, value)
        else:
            extended = tf.distribute.get_strategy().extended
            extended.update_own_copy(variable.value, fn, value)


def check_arguments(optimizer: Any, accumulate_steps: Any, initial_scale: Any) -> None:
    """Refuses bad arguments of `DistributedOptimizer`."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            "DistributedOptimizer wraps a keras.optimizers.Optimizer, such as "
            f"keras.optimizers.Adam(1e-3). Received: {_what_it_is(optimizer)}."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "DistributedOptimizer scales the loss itself: pass the optimizer inside "
            f"{optimizer.name!r} (its inner_optimizer) instead."
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigurationError(
            "Accumulation is set twice: use DistributedOptimizer("
            f"accumulate_steps={optimizer.gradient_accumulation_steps}) and leave out "
            "gradient_accumulation_steps of the inner optimizer."
        )
    check_whole("accumulate_steps", accumulate_steps, 1)
    if not is_number(initial_scale) or not 0 < initial_scale < math.inf:
        raise ConfigurationError(
            f"initial_scale must be a number above 0. Received: {initial_scale!r}."
        )


def _what_it_is(given: Any) -> str:
    if isinstance(given, str):
        return f"{given!r}; pass keras.optimizers.get({given!r})"
    return what_it_is(given)


def _check_place(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses updates under a stock strategy, or inside another optimizer."""
    strategy, found = tf.distribute.get_strategy(), current_step()
    if found is None and replicas_of(strategy) > 1:
        raise ScopeError(
            f"DistributedOptimizer {optimizer.name!r} cannot accumulate or test under "
            f"{type(strategy).__name__}, which stops all replicas at every reduction. "
            "Use tfdp.DataParallelStrategy() instead."
        )
    if found is not None and found[0].replicas > 1 and found[0].is_updating:
        raise ConfigurationError(
            f"DistributedOptimizer {optimizer.name!r} is held by another optimizer, "
            "which has summed the gradients over the replicas already, and would sum "
            "them again. Put DistributedOptimizer outermost, around the optimizer that "
            "does the update; it scales the loss with dynamic_loss_scale=True."
        )


# Weights of the batches of an accumulation. A strategy counts the rows (or tokens) of
# every global batch; without one, batches have equal weights. The total weight is one
# variable, also in files; its sign is the unit, so that an accumulation read from a
# file continues in its unit.
#
#     so far                      under a strategy      without one
#     nothing                     its rows              1, kept as -1
#     rows (above 0)              its rows              the mean of those before
#     batches (below 0)           1, kept as -1         1, kept as -1


def _weight_to_keep(counted: Any, so_far: tf.Tensor, batches: tf.Tensor) -> tf.Tensor:
    """The addend of a batch of `counted` rows or tokens to the weight `so_far`."""
    mean = tf.math.divide_no_nan(so_far, tf.cast(batches, so_far.dtype))
    if counted is None:
        return tf.where(so_far == 0, -tf.ones_like(so_far), mean)
    return tf.where(so_far < 0, mean, tf.cast(counted, so_far.dtype))


def checked_sync(sync: Any) -> Policy | None:
    """`sync`, or the object that its `get_config` described; refuses anything else."""
    if isinstance(sync, dict) and sync.get("method") in methods.__all__:
        values = dict(sync)
        found: Policy = getattr(methods, values.pop("method"))(**values)
        return found
    if sync is None or getattr(methods, type(sync).__name__, None) is type(sync):
        return sync  # type: ignore[no-any-return]
    names = ", ".join(f"tfdp.sync.{name}(...)" for name in methods.__all__)
    raise ConfigurationError(
        f"sync must be one of {names}, or None to synchronize in every step. Received: "
        f"{what_it_is(sync)}."
    )
