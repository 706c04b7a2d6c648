"""Private hooks of Keras' optimizers, under public names for tfdp's subclasses.

The base optimizer calls or offers these. Checked against Keras 3.12 to 3.16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.seams.replace import replace

# The methods that `apply` calls, in this order.
REDUCE = "_all_reduce_sum_gradients"
CLIP = "_clip_gradients"
DECAY = "_apply_weight_decay"
APPLY_GRADIENTS = "_backend_apply_gradients"
UPDATE_STEP = "_backend_update_step"
UPDATE_OF_STRATEGY = "_distributed_tf_update_step"
AVERAGE = "_update_model_variables_moving_average"
OVERWRITE_WITH_AVERAGE = "_overwrite_model_variables_with_average_value"
# Methods that see gradients before, and after, accumulation.
BEFORE_ACCUMULATION = (
    *("apply", "apply_gradients", "_filter_empty_gradients", APPLY_GRADIENTS),
    *(UPDATE_STEP, "_backend_increment_gradient_accumulators"),
)
AFTER_ACCUMULATION = (
    *(CLIP, "_overwrite_variables_directly_with_gradients", UPDATE_OF_STRATEGY),
    *("assign", "assign_add", "assign_sub"),
)
# The options by which an optimizer clips.
CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
# Keras and DistributedOptimizer both use this name for their accumulators.
ACCUMULATOR_NAME = "gradient_accumulator"
# The weight of the accumulated batches of all replicas; equal on each of them.
WEIGHT_NAME = "accumulated_weight"


def rate_of(optimizer: keras.optimizers.Optimizer) -> float | None:
    """The current learning rate; None for a callable, which may count its calls."""
    rate = getattr(optimizer, "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if rate is None or (callable(rate) and not is_schedule):
        return None
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def last_rate_of(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate of the step before: `learning_rate` is that of the next."""
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = rate(keras.ops.maximum(optimizer._iterations - 1, 0))
    else:
        rate = optimizer.learning_rate
    return float(keras.ops.convert_to_numpy(rate))


def rate_variable(optimizer: keras.optimizers.Optimizer) -> Any:
    """The variable that holds the learning rate; None: a schedule, or a callable."""
    rate = getattr(optimizer, "_learning_rate", None)
    return rate.value if isinstance(rate, keras.Variable) else None


def by_keras(optimizer: keras.optimizers.Optimizer, method: str) -> Callable[..., Any]:
    """A method above as the optimizer's class defines it, without overrides."""
    return functools.partial(getattr(type(optimizer), method), optimizer)


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """The strategy of the scope in which `optimizer` was created."""
    return optimizer._distribution_strategy


def momentum_compression_of(optimizer: Any) -> Any:
    """The `MomentumCompression` of `optimizer`, or of its inner one; or None."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "momentum_compression", None)


def find_gradient_hook(
    optimizer: keras.optimizers.Optimizer, methods: Sequence[str]
) -> str | None:
    """The first of `methods` that a user class defines, unless it is elementwise."""
    if getattr(optimizer, "is_elementwise", False):
        return None
    return next((name for name in methods if is_own(optimizer, name)), None)


def is_own(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    """Whether a class that is neither Keras' nor tfdp's defines `method`."""
    owner = next((c for c in type(optimizer).__mro__ if method in vars(c)), None)
    return owner is not None and not owner.__module__.startswith(("keras.", "tfdp."))


def is_set_by_user(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    """Whether `method` was set on the instance, and not by tfdp for a step."""
    value = vars(optimizer).get(method)
    module = getattr(getattr(value, "func", value), "__module__", None) or ""
    return value is not None and not module.startswith("tfdp.")


def put_under(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Sets the strategy that `strategy_of` returns."""
    replace(optimizer, "_distribution_strategy", strategy)


def variables_built_with(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables that `optimizer` updates by default."""
    return optimizer._trainable_variables


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """The index of `variable` among those that `optimizer` was built with."""
    return int(optimizer._get_variable_index(variable))


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The moving average of each of those variables, or None."""
    return optimizer._model_variables_moving_average


# Lists of Keras' base class: of all variables, and of what holds no state of an update.
_NOT_STATE = ("_variables", "_trainable_variables", "_accumulated_gradients")


def states_by_weight(
    optimizer: keras.optimizers.Optimizer, weights: int
) -> dict[str, list[Any]]:
    """The lists of `optimizer` that hold a state variable, or None, for each weight."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) == weights and name not in _NOT_STATE
    }


def states_of_updates(
    optimizer: keras.optimizers.Optimizer, weights: int
) -> dict[str, list[Any]]:
    """The lists of `states_by_weight`, without moving averages of the weights."""
    return {
        name: value
        for name, value in states_by_weight(optimizer, weights).items()
        # TensorFlow's lists of what it tracks may be as long.
        if all(one is None or isinstance(one, keras.Variable) for one in value)
        and name != "_model_variables_moving_average"
    }


# These update each element independently.
ELEMENTWISE = (
    "SGD RMSprop Adam Adadelta Adagrad Adamax Nadam Ftrl Lion ScheduleFreeAdamW"
).split()


def definer_of(optimizer: keras.optimizers.Optimizer, method: str) -> type:
    """The class that defines `method` of `optimizer`."""
    return next(c for c in type(optimizer).__mro__ if method in vars(c))


def elementwise_of_keras(optimizer: keras.optimizers.Optimizer) -> str | None:
    """The class of Keras' with this optimizer's update, if that is elementwise."""
    owner = definer_of(optimizer, "update_step")
    is_known = owner.__module__.startswith("keras.") and owner.__name__ in ELEMENTWISE
    return owner.__name__ if is_known else None


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether weight decay of `optimizer`, built or not, acts on `variable`, if any."""
    own = type(optimizer)._use_weight_decay
    if own is not keras.optimizers.Optimizer._use_weight_decay:
        return bool(own(optimizer, variable))
    return _decays_by_keras(optimizer, variable)


def _decays_by_keras(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    # Keras 3.16 decides in `build`, and for the variables that it is given there.
    excludes = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    if excludes is not None:
        return not excludes(variable)
    return bool(keras.optimizers.Optimizer._use_weight_decay(optimizer, variable))


def is_between_updates(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether `optimizer` holds accumulated gradients."""
    own = getattr(optimizer, "has_accumulated", None)
    if own is not None:
        return bool(own)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = inner.gradient_accumulation_steps
    return bool(steps) and int(inner._iterations.numpy()) % steps != 0


def orthogonalizes(muon: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether Keras' Muon updates `variable` by Newton-Schulz; else by AdamW."""
    return not muon._should_use_adamw(variable)


def decay_by_muon(muon: keras.optimizers.Optimizer, variable: Any) -> float | None:
    """The weight decay of `variable` by Keras' Muon; None: it does not decay."""
    if not decays(muon, variable):
        return None
    by_newton_schulz = orthogonalizes(muon, variable)
    return muon.weight_decay if by_newton_schulz else muon.adam_weight_decay


class DecayHooks(keras.optimizers.Optimizer):
    """A Keras optimizer with hooks for which variables decay, and when."""

    def decays(self, variable: Any) -> bool:
        """Whether `variable` decays; for subclasses to override."""
        return self.decays_by_keras(variable)

    def decays_before_update(self) -> bool:
        """Whether weights decay before the update (decoupled decay)."""
        return True

    def decays_by_keras(self, variable: Any) -> bool:
        """Keras' default: not excluded by `exclude_from_weight_decay()`."""
        return _decays_by_keras(self, variable)

    def _use_weight_decay(self, variable: Any) -> bool:
        return self.decays(variable)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        if self.decays_before_update():
            super()._apply_weight_decay(variables)


class LossScaleHooks(keras.optimizers.LossScaleOptimizer):
    """Keras' loss scaler, with its decision separate from `apply`."""

    def update_if_finite(
        self, gradients: list[Any], variables: list[Any], is_finite: Any
    ) -> None:
        """Updates if every gradient is finite, else only halves the scale."""

        def update() -> None:
            self._stateful_handle_finite_grads(gradients, variables)

        keras.ops.cond(is_finite, update, self._stateful_handle_non_finite_grads)
