"""`DistributedOptimizer`: what Keras has no words for, around any Keras optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp import compression
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import (
    LossScaleHooks,
    strategy_of,
    variable_index,
    variables_built_with,
)
from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.optimizers.apart import (
    averages_wait,
    make_rounds,
    refuse_outside_of_fit,
    refuse_with_sync,
)
from tfdp.sharding.updates import ACCUMULATOR_NAME, shards_of
from tfdp.step.buffer_synchronization import bring_layers_together
from tfdp.step.finite_guard import update_if_finite
from tfdp.step.local_run import has_no_effect
from tfdp.step.local_sgd import Rounds
from tfdp.step.local_values import LocalValues
from tfdp.step.optimizers import refuse_overwritten, takes_reduced
from tfdp.step.sums import agree_finite, reduce_gradients
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.local_sgd import LocalSGD
from tfdp.sync.rounds import Sync
from tfdp.tracing.assigned_terms import as_tensors
from tfdp.tracing.batch_weight import batch_weight
from tfdp.tracing.run import current_run


# A LossScaleOptimizer, so that Keras does not wrap it in another under float16.
@keras.saving.register_keras_serializable("tfdp")
class DistributedOptimizer(LossScaleHooks):
    """Accumulates locally, reduces once, tests, clips and updates, in this order.

    For K micro-steps with global batches of weight W_k (samples, or unmasked tokens)
    and gradients g_kr of replica r, one update uses

        g = sum_k W_k sum_r g_kr / sum_k W_k

    which is the gradient of one step on all K batches together. Of compiled losses with
    `reduction="sum"`, in Keras' own `train_step`, it is sum_k sum_r g_kr. A step of
    one's own may divide its sums, so these are weighed as means. Without a strategy
    nobody counts rows or knows of sums, and batches weigh alike: the mean. `iterations`
    counts updates, so schedules mean what they say.

    Stock optimizers are exact under `DataParallelStrategy` as they are, in `model.fit`
    and in custom loops; this wrapper is for accumulation weighted by samples or tokens.

    Args:
      optimizer: any Keras optimizer, with its own clipping, decay, EMA, schedule and
        `loss_scale_factor`; without `gradient_accumulation_steps`.
      accumulate_steps: micro-steps per update, an integer of at least 1.
      dynamic_loss_scale: True scales the loss up and skips updates with gradients that
        are not finite on any replica; None does so when the dtype policy is
        `mixed_float16` at this moment.
      initial_scale: the first loss scale, above 0.
      dynamic_growth_steps: finite updates until the scale doubles.
      sync: `tfdp.sync.LocalSGD` or `tfdp.sync.DiLoCo`: replicas make many updates on
        their own before they meet; see docs/communication.md. None: in every update.
      name: the optimizer's name.

    Raises:
      ConfigurationError: when an argument is not as above.
      ScopeError: at the first update, under a strategy other than tfdp's.

    Cost: one reduction of the gradients per `accumulate_steps` micro-steps; one
    accumulator per variable when that is above 1.

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
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        sync: Sync | None = None,
        name: str | None = None,
    ):
        check_arguments(optimizer, accumulate_steps, initial_scale)
        # Keras' base class takes it away from the inner optimizer.
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
        self._given_sync = self.sync = checked_sync(sync)
        if self.sync is not None:
            refuse_with_sync(optimizer)
        self._rounds: Rounds | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the accumulators; see `keras.optimizers.Optimizer.build`."""
        # Keras' base class would build it without noting the variables that it makes
        # besides its slots (Nadam, Adafactor): they would be in no file.
        self.inner_optimizer.build(variables)
        super().build(variables)
        if self.accumulate_steps > 1:
            self._accumulators = [
                self.add_variable_from_reference(v, name=ACCUMULATOR_NAME)
                for v in variables
            ]
            self._weight_sum = self.add_variable(shape=(), name="accumulated_weight")
            self._micro_step = self.add_variable(
                shape=(), dtype="int", name="micro_step"
            )
        if self.sync is not None and has_no_effect(self.sync, strategy_of(self)):
            self.sync = None
        if self.sync is not None:
            self._rounds = make_rounds(self, self.sync, variables)
            # Tracked, so that checkpoints hold it.
            self._local_values = self._rounds and self._rounds.values.stored

    def train_apart(self, layer_state: Sequence[Any]) -> None:
        """Before the replicas of a training step run; see `tfdp.step.local_run`.

        Args:
          layer_state: variables of the model that no optimizer updates.
        """
        if self._rounds is None:
            raise ConfigurationError(
                f"The optimizer {self.name!r} has sync={self.sync!r} and is not built, "
                "and a step that reads the weights before would not see the replicas' "
                "own. Call optimizer.build(model.trainable_variables) under the "
                "strategy's scope first."
            )
        self._rounds.keep_layer_state(layer_state)
        self._rounds.before_step()

    @property
    def rounds(self) -> Rounds | None:
        """Those of replicas that train apart; None: they do not, or it is not built."""
        return self._rounds

    def local_values(self, layer_state: Sequence[Any]) -> LocalValues | None:
        """What replicas that train apart have of their own; None: they do not.

        Args:
          layer_state: see `train_apart`.
        """
        if self._rounds is None:
            return None
        self._rounds.keep_layer_state(layer_state)
        return self._rounds.values

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Gives the model the average of its weights, where it has one (`use_ema`)."""
        if self._rounds is None or self._rounds.have_synchronized():
            super().finalize_variable_values(var_list)

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Multiplies the loss before the gradient is taken; `apply` divides."""
        if self.dynamic_loss_scale:
            loss = super().scale_loss(loss)
        return loss if self.static_scale is None else loss * self.static_scale

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """One micro-step; every `accumulate_steps`-th updates the variables."""
        if not self.built:
            self.build(list(trainable_variables))
            self.built = True
        check_place(self)
        if self.sync is not None:
            refuse_outside_of_fit(self)
        variables = list(trainable_variables or variables_built_with(self))
        refuse_overwritten(variables, type(self).__name__)
        gradients = as_tensors(grads)
        if self.static_scale is not None:
            gradients = [
                g if g is None else keras.ops.divide(g, self.static_scale)
                for g in gradients
            ]
        if self.accumulate_steps == 1:
            weighs = self.sync is not None and self.sync.start_step > 0
            found = current_run() if weighs else None
            weight = None if found is None else batch_weight(*found)
            reduced = self._reduced(gradients, variables, weight)
            self._update_weights(reduced, variables)
        else:
            update_if_finite(
                self,
                gradients,
                variables,
                lambda: self._accumulate(gradients, variables),
            )

    @property
    def has_accumulated(self) -> bool:
        """Whether there were micro-steps since the last update."""
        return self.accumulate_steps > 1 and int(self._micro_step.numpy()) != 0

    def get_config(self) -> dict[str, Any]:
        """The arguments, for serialisation."""
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
        """The inverse of `get_config`."""
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
        found = current_run()
        known = None if found is None else batch_weight(*found)
        are_sums = found is not None and known is None
        kept = weight_to_keep(
            tf.ones([]) if are_sums else known,
            tf.convert_to_tensor(self._weight_sum),
            tf.convert_to_tensor(self._micro_step),
        )
        weight = tf.abs(kept)
        indices = [variable_index(self, variable) for variable in variables]
        if self._accumulates_shards():
            gradients = self._reduced(gradients, variables, weight)
        elif found is not None:
            rounds = self._rounds
            bring = rounds.bring_layers_together if rounds else bring_layers_together
            bring(*found)
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                dense = tf.convert_to_tensor(gradient)
                self._add(
                    self._accumulators[index], dense * tf.cast(weight, dense.dtype)
                )
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
            if not self._accumulates_shards():
                weighs = None if are_sums else total
                means = self._reduced(means, variables, weighs)
            self._update_weights(means, variables)
            for spent in (*self._accumulators, self._weight_sum, self._micro_step):
                self._set(spent, tf.zeros_like(tf.convert_to_tensor(spent)))

        is_last = tf.convert_to_tensor(self._micro_step) >= self.accumulate_steps
        keras.ops.cond(is_last, update, lambda: None)

    def _accumulates_shards(self) -> bool:
        """Whether every micro-step is reduced, so that accumulators can be shards."""
        shards = shards_of(self)
        return shards is not None and shards.stage > 1

    def _reduced(
        self, gradients: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """The sums over those who step together.

        `weight` is that of their batches; None: they have none, being sums.
        """
        found = current_run()
        if found is None:
            return gradients
        run, rank = found
        places = [i for i, g in enumerate(gradients) if g is not None]
        own = [gradients[i] for i in places]
        if self._rounds is None:
            of = [variables[i] for i in places]
            reduced = reduce_gradients(own, run, of, self)
        else:
            reduced = self._rounds.reduced(own, weight, run, rank)
        results = list(gradients)
        for place, gradient in zip(places, reduced, strict=True):
            results[place] = gradient
        return results

    def _update_weights(self, gradients: list[Any], variables: list[Any]) -> None:
        """Tests, clips and updates, with gradients that are reduced already."""

        def update() -> None:
            self._update_tested(gradients, variables)

        if self._rounds is not None:
            with averages_wait(self.inner_optimizer):
                update_if_finite(self, gradients, variables, update)
            # Counted by all, also by those who leave this update out.
            self._rounds.after_update(current_rank())
        else:
            update_if_finite(self, gradients, variables, update)

    def _update_tested(self, gradients: list[Any], variables: list[Any]) -> None:
        with takes_reduced(self.inner_optimizer):
            if not self.dynamic_loss_scale:
                self.inner_optimizer.apply(gradients, variables)
                return
            if shards_of(self) is None:
                is_finite = self.check_finite(gradients)
            else:  # each replica tests its own shards
                is_finite = agree_finite(self, gradients)
            self.update_if_finite(gradients, variables, is_finite)

    def _add(self, variable: keras.Variable, value: tf.Tensor) -> None:
        self._on_this_replica(variable, lambda own, v: own.assign_add(v), value)

    def _set(self, variable: keras.Variable, value: tf.Tensor) -> None:
        self._on_this_replica(variable, lambda own, v: own.assign(v), value)

    def _on_this_replica(self, variable: keras.Variable, fn: Any, value: Any) -> None:
        """Updates this replica's own copy: accumulators differ between replicas."""
        if current_run() is None:
            fn(variable.value, value)
        else:
            extended = tf.distribute.get_strategy().extended
            extended.update_own_copy(variable.value, fn, value)


# What `DistributedOptimizer` cannot be made of, and where it cannot update.


def check_arguments(optimizer: Any, accumulate_steps: Any, initial_scale: Any) -> None:
    """Refuses what `DistributedOptimizer` cannot be made of.

    Raises:
      ConfigurationError: naming the argument.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            "DistributedOptimizer wraps a keras.optimizers.Optimizer, such as "
            "keras.optimizers.Adam(1e-3). Received: "
            f"{_what_it_is(optimizer)}."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "DistributedOptimizer scales the loss itself: pass the optimizer inside "
            f"{optimizer.name!r} (its inner_optimizer) instead."
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigurationError(
            "Accumulation is asked for twice: use DistributedOptimizer("
            f"accumulate_steps={optimizer.gradient_accumulation_steps}) and leave "
            "gradient_accumulation_steps of the inner optimizer out."
        )
    if not is_whole(accumulate_steps, least=1):
        raise ConfigurationError(
            "accumulate_steps must be an integer of at least 1. Received: "
            f"{accumulate_steps!r}."
        )
    if not is_number(initial_scale) or not 0 < initial_scale < math.inf:
        raise ConfigurationError(
            f"initial_scale must be a number above 0. Received: {initial_scale!r}."
        )


def _what_it_is(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}; call it: {given.__name__}()"
    if isinstance(given, str):
        return f"{given!r}; pass keras.optimizers.get({given!r})"
    return repr(given)


def check_place(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an update where `optimizer`, a distributed one, would not do it alone.

    Raises:
      ScopeError: under a stock strategy.
      ConfigurationError: another optimizer holds it.
    """
    strategy, found = tf.distribute.get_strategy(), current_run()
    if found is None and strategy.num_replicas_in_sync > 1:
        raise ScopeError(
            f"DistributedOptimizer {optimizer.name!r} is used under "
            f"{type(strategy).__name__}, which stops all replicas at every "
            "reduction and so cannot accumulate or test within one. Use "
            "tfdp.DataParallelStrategy() in its place."
        )
    if found is not None and found[0].replicas > 1 and found[0].is_updating:
        raise ConfigurationError(
            f"DistributedOptimizer {optimizer.name!r} is held by another optimizer, "
            "whose gradients are added up over the replicas already: it would add them "
            "once more. Wrap the other way round, the optimizer that does the update "
            "innermost; a loss is scaled by "
            "DistributedOptimizer(optimizer, dynamic_loss_scale=True)."
        )


# What a batch of an accumulation weighs beside the others of it.
#
# A strategy counts the rows of every global batch (or its tokens); without one nobody
# does, and all batches weigh alike. What those of an accumulation weigh together is one
# variable, and goes into files: its sign says in which of the two units.
#
#     so far                      under a strategy      without one
#     nothing                     its rows              1, kept as -1
#     rows (above 0)              its rows              the mean of those before
#     batches (below 0)           1, kept as -1         1, kept as -1
#
# So who reads a file in the middle of an accumulation goes on in its unit.


def weight_to_keep(
    known: tf.Tensor | None, so_far: tf.Tensor, batches: tf.Tensor
) -> tf.Tensor:
    """What the next batch adds to `so_far`; without its sign that is its weight.

    Args:
      known: its rows, or tokens; None: nobody knows.
      so_far: a float scalar, the sum of what this has returned.
      batches: an integer scalar, of how many batches.

    >>> so_far, batches = tf.constant(-2.0), tf.constant(2)
    >>> float(weight_to_keep(tf.constant(12.0), so_far, batches))
    -1.0
    """
    mean = tf.math.divide_no_nan(so_far, tf.cast(batches, so_far.dtype))
    if known is None:
        return tf.where(so_far == 0, -tf.ones_like(so_far), mean)
    return tf.where(so_far < 0, mean, tf.cast(known, so_far.dtype))


# What the argument `sync` of a `DistributedOptimizer` can be.


METHODS: dict[str, type[Sync]] = {"DiLoCo": DiLoCo, "LocalSGD": LocalSGD}


def checked_sync(sync: Any) -> Sync | None:
    """`sync`, when it can be that argument; made anew from what `get_config` told.

    Raises:
      ConfigurationError: when it is something else.
    """
    if isinstance(sync, dict) and sync.get("method") in METHODS:
        values = dict(sync)
        return METHODS[values.pop("method")](**values)
    if sync is None or type(sync) in METHODS.values():
        return sync  # type: ignore[no-any-return]
    names = " or ".join(f"tfdp.sync.{name}(...)" for name in sorted(METHODS))
    raise ConfigurationError(
        f"sync must be {names}, or None to meet in every step. Received: {sync!r}."
    )
