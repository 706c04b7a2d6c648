"""Base of LARS and LAMB: forms, exclusions, weight decay and norms."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras import ops

from tfdp._private.optimizer_hooks import DecayHooks, variable_index
from tfdp.checks import is_number
from tfdp.errors import ConfigurationError
from tfdp.plan.exclusions import (
    BIASES_AND_NORM_SCALES,
    check_patterns,
    is_excluded,
    variable_path,
)

Phases: TypeAlias = Generator[tuple[Any, ...], tuple[Any, ...], None]


class LayerwiseOptimizer(DecayHooks):
    """A Keras optimizer that scales each variable's update by its own ratio.

    `build` decides which variables decay and adapt, from the paths of the Keras
    variables: under `tf.distribute` an update gets a replica's component, which has no
    path. Subclasses set `forms` and `decoupled_forms` and implement `update_phases`.
    """

    # The allowed values of `form`.
    forms: tuple[str, ...] = ()
    # The forms that copy a Keras optimizer: Keras decays the weights before the update,
    # and `None` excludes nothing.
    decoupled_forms: tuple[str, ...] = ()

    def __init__(
        self,
        learning_rate: Any,
        *,
        form: str,
        weight_decay: float | None,
        exclude_from_weight_decay: Sequence[str] | None,
        exclude_from_layer_adaptation: Sequence[str] | None,
        **keras_arguments: Any,
    ) -> None:
        owner = type(self).__name__
        if weight_decay is not None:
            weight_decay = check_number(f"{owner}.weight_decay", weight_decay)
        for name in ("clipnorm", "clipvalue", "global_clipnorm"):
            if keras_arguments.get(name) is not None:
                check_number(f"{owner}.{name}", keras_arguments[name])
        super().__init__(
            learning_rate=check_learning_rate(f"{owner}.learning_rate", learning_rate),
            weight_decay=weight_decay,
            **keras_arguments,
        )
        if form not in self.forms:
            raise ConfigurationError(
                f"{owner}.form must be one of {', '.join(map(repr, self.forms))}. "
                f"Received: {form!r}."
            )
        self.form = form
        # The base class has a method called exclude_from_weight_decay.
        self._weight_decay_patterns = check_patterns(
            f"{owner}.exclude_from_weight_decay", exclude_from_weight_decay
        )
        self._layer_adaptation_patterns = check_patterns(
            f"{owner}.exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        self._decays: tuple[bool, ...] = ()
        self._adapts: tuple[bool, ...] = ()

    def build(self, variables: Sequence[Any]) -> None:
        """Decides which variables decay and adapt; subclasses add their slots."""
        super().build(variables)
        patterns = self._patterns_or_default(self._weight_decay_patterns)
        matched = _matches("exclude_from_weight_decay", variables, patterns)
        self._decays = tuple(
            not excluded and self.decays_by_keras(variable)
            for variable, excluded in zip(variables, matched, strict=True)
        )
        patterns = self._patterns_or_default(self._layer_adaptation_patterns)
        matched = _matches("exclude_from_layer_adaptation", variables, patterns)
        self._adapts = tuple(not excluded for excluded in matched)

    def update_phases(self, gradient: Any, variable: Any, learning_rate: Any) -> Phases:
        """Updates one variable (or shard) in two phases, around the sum of its norms.

        Yields once: a tuple of the sums of squares over this replica's part of the
        variable, empty if it needs no norm. Receives those of the whole variable.
        """
        raise NotImplementedError

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        phases = self.update_phases(gradient, variable, learning_rate)
        squares = next(phases)
        with contextlib.suppress(StopIteration):
            phases.send(squares)

    def _patterns_or_default(self, patterns: Sequence[str] | None) -> Sequence[str]:
        if patterns is not None:
            return patterns
        return () if self.form in self.decoupled_forms else BIASES_AND_NORM_SCALES

    def decay_of(self, variable: Any) -> float:
        """The weight decay of this variable; 0 if there is none or it is excluded."""
        if self.weight_decay is None or not self.decays(variable):
            return 0.0
        return self.weight_decay

    def adapts(self, variable: Any) -> bool:
        return self._adapts[variable_index(self, variable)]

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Any = None
    ) -> None:
        """Excludes further variables, as in Keras; `get_config` does not hold them."""
        if self.built:
            raise ConfigurationError(
                f"{type(self).__name__}.exclude_from_weight_decay() must be called "
                "before the optimizer is built. Call it before compile() or fit()."
            )
        super().exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def decays(self, variable: Any) -> bool:
        return self._decays[variable_index(self, variable)]

    def decays_before_update(self) -> bool:
        return self.form in self.decoupled_forms

    def get_config(self) -> dict[str, Any]:
        decay, adaptation = self._weight_decay_patterns, self._layer_adaptation_patterns
        return {
            **super().get_config(),
            "form": self.form,
            "exclude_from_weight_decay": None if decay is None else list(decay),
            "exclude_from_layer_adaptation": (
                None if adaptation is None else list(adaptation)
            ),
        }


def _matches(
    argument: str, variables: Sequence[Any], patterns: Sequence[str]
) -> list[bool]:
    paths = [variable_path(variable) for variable in variables]
    matched = [is_excluded(path, patterns) for path in paths]
    # The default may match nothing; an explicit list should not.
    if patterns and patterns is not BIASES_AND_NORM_SCALES and not any(matched):
        warnings.warn(
            f"{argument}={list(patterns)} matches no variable, so nothing is "
            f"excluded. Paths look like {paths[0]!r} and {paths[-1]!r}.",
            stacklevel=3,
        )
    return matched


def as_compute_tensor(value: Any, dtype: Any = None) -> Any:
    """`value` as a dense tensor of `dtype`, by default of float32 or wider.

    Squares of float16 overflow above 255 and vanish below 2e-4, and bfloat16 keeps 8
    bits, so norms and updates are float32. Sparse gradients become dense: repeated rows
    must be summed before their norm is taken.
    """
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    dtype = keras.utils.standardize_dtype(dtype or value.dtype)
    return ops.cast(value, "float32" if dtype in ("float16", "bfloat16") else dtype)


def sum_of_squares(tensor: Any) -> Any:
    """The sum of the squares of all elements, in the tensor's dtype."""
    # `power`, as in Keras' Lamb: eagerly, `square` may differ in the last bit.
    return ops.sum(ops.power(tensor, 2))


def ratio_or_one(weight_norm: Any, update_norm: Any, denominator: Any) -> Any:
    """`weight_norm / denominator`, but 1 where either norm is 0.

    A zero weight would never leave 0 with a ratio of 0, and a zero update has no
    direction to scale. `where` computes both branches, hence the safe denominator.
    """
    both = ops.logical_and(weight_norm > 0, update_norm > 0)
    safe = ops.where(both, denominator, ops.ones_like(denominator))
    return ops.where(both, weight_norm / safe, ops.ones_like(weight_norm))


def check_number(
    name: str, value: Any, *, below: float = math.inf, above_zero: bool = False
) -> float:
    """`value` as a float; refuses it unless 0 <= value < below (0 < value < below)."""
    if (
        not is_number(value)
        or not 0 <= float(value) < below
        or (above_zero and value == 0)
    ):
        allowed = "above 0" if above_zero else "of at least 0"
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigurationError(
            f"{name} must be a finite number {allowed}{limit}. Received: {value!r}."
        )
    return float(value)


def check_learning_rate(name: str, value: Any) -> Any:
    """`value`: a number as a float, a schedule or function unchanged."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    is_function = callable(value) or isinstance(value, schedule)
    return value if is_function else check_number(name, value)
