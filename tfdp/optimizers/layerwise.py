"""What LARS and LAMB share: forms, exclusions and where weight decay happens."""

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

UpdatePhases: TypeAlias = Generator[tuple[Any, ...], tuple[Any, ...], None]


class LayerwiseOptimizer(DecayHooks):
    """A Keras optimizer that scales each variable's update by its own ratio.

    Which variables decay and which adapt is decided once, in `build`, from the paths
    of the Keras variables: under `tf.distribute` an update sees one replica's part of
    a variable, which has no path, and only its index leads back.

    Subclasses set `forms` and `decoupled_forms`, make their slots in `build` and write
    `update_phases` with `decay_of` and `adapts`.
    """

    # The values that `form` may take.
    forms: tuple[str, ...] = ()
    # The forms in which Keras decays the weights before the update, and in which
    # `None` excludes nothing: those that copy an optimizer of Keras.
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
        super().__init__(
            learning_rate=check_learning_rate(f"{owner}.learning_rate", learning_rate),
            weight_decay=weight_decay,
            **keras_arguments,
        )
        self.form = check_choice(f"{owner}.form", form, self.forms)
        # The base class has a method called exclude_from_weight_decay, so the list of
        # that name lives under another one.
        self._weight_decay_patterns = check_patterns(
            f"{owner}.exclude_from_weight_decay", exclude_from_weight_decay
        )
        self._layer_adaptation_patterns = check_patterns(
            f"{owner}.exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        self._decays: tuple[bool, ...] = ()
        self._adapts: tuple[bool, ...] = ()

    def build(self, variables: Sequence[Any]) -> None:
        """Decides what decays and what adapts; subclasses add their slots.

        Args:
          variables: the trainable variables, in the order of the gradients.
        """
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

    def update_phases(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> UpdatePhases:
        """Updates one variable in two phases, between which norms are made whole.

        Args:
          gradient: dense or `tf.IndexedSlices`, of the variable's shape; a shard of it
            when the variable is one.
          variable: the variable, or this replica's shard of it.
          learning_rate: a scalar.

        Yields:
          Once: the sums of squares of what it has of the variable, as a tuple; none
          when no norm is needed. It is sent those of the whole variable.
        """
        raise NotImplementedError

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one whole variable."""
        phases = self.update_phases(gradient, variable, learning_rate)
        squares = next(phases)
        with contextlib.suppress(StopIteration):
            phases.send(squares)

    def _patterns_or_default(self, patterns: Sequence[str] | None) -> Sequence[str]:
        if patterns is not None:
            return patterns
        return () if self.form in self.decoupled_forms else BIASES_AND_NORM_SCALES

    def decay_of(self, variable: Any) -> float:
        """The weight decay of this variable: 0 when there is none or it is excluded."""
        if self.weight_decay is None or not self.decays(variable):
            return 0.0
        return self.weight_decay

    def adapts(self, variable: Any) -> bool:
        """Whether this variable's update is scaled by its trust ratio."""
        return self._adapts[variable_index(self, variable)]

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Any = None
    ) -> None:
        """Excludes further variables from weight decay, as in every Keras optimizer.

        Adds to what the constructor's list of this name excludes. As in Keras, these
        variables are not part of the saved configuration.

        Args:
          var_list: variables to exclude.
          var_names: regular expressions searched in the variables' names (not paths).

        Raises:
          ConfigurationError: when the optimizer is built, which is when it decides.
        """
        if self.built:
            raise ConfigurationError(
                f"{type(self).__name__}.exclude_from_weight_decay() must be called "
                "before the optimizer is built. Call it before compile() or fit()."
            )
        super().exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def decays(self, variable: Any) -> bool:
        """Whether this variable decays: neither list nor method excludes it."""
        return self._decays[variable_index(self, variable)]

    def decays_before_update(self) -> bool:
        """Whether the form has Keras' decoupled decay; else it is in the update."""
        return self.form in self.decoupled_forms

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain data."""
        weight_decay = self._weight_decay_patterns
        adaptation = self._layer_adaptation_patterns
        return {
            **super().get_config(),
            "form": self.form,
            "exclude_from_weight_decay": (
                None if weight_decay is None else list(weight_decay)
            ),
            "exclude_from_layer_adaptation": (
                None if adaptation is None else list(adaptation)
            ),
        }


def _matches(
    argument: str, variables: Sequence[Any], patterns: Sequence[str]
) -> list[bool]:
    paths = [variable_path(variable) for variable in variables]
    matched = [is_excluded(path, patterns) for path in paths]
    # The default may well match nothing; a list that was written down should not.
    if patterns and patterns is not BIASES_AND_NORM_SCALES and not any(matched):
        warnings.warn(
            f"{argument}={list(patterns)} matches no variable, so nothing is "
            f"excluded. Paths look like {paths[0]!r} and {paths[-1]!r}.",
            stacklevel=3,
        )
    return matched


# Norms of whole variables, and the ratio that they make.


def as_compute_tensor(value: Any, dtype: Any = None) -> Any:
    """`value` as a dense tensor of `dtype`, by default of float32 or wider.

    The square of a float16 above 255 overflows and one below 2e-4 vanishes, and
    bfloat16 keeps 8 bits, so norms and updates are computed in float32 and only the
    result goes back to the variable's dtype. Sparse gradients (`tf.IndexedSlices`, as
    an embedding makes) become dense: rows that occur twice must be summed before a
    norm is taken of them.
    """
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    dtype = keras.utils.standardize_dtype(dtype or value.dtype)
    return ops.cast(value, "float32" if dtype in ("float16", "bfloat16") else dtype)


def sum_of_squares(tensor: Any) -> Any:
    """The sum of the squares of all elements: a scalar of the tensor's dtype."""
    # `power`, not `square`, as Keras' Lamb has it: run eagerly the two may differ in
    # the last bit. A compiled graph turns this power into a square.
    return ops.sum(ops.power(tensor, 2))


def ratio_or_one(weight_norm: Any, update_norm: Any, denominator: Any) -> Any:
    """`weight_norm / denominator`, but 1 where either norm is 0.

    A zero weight would never leave 0 with a ratio of 0, and a zero update has no
    direction to scale. `where` computes both branches, hence the safe denominator.
    """
    both = ops.logical_and(weight_norm > 0, update_norm > 0)
    safe = ops.where(both, denominator, ops.ones_like(denominator))
    return ops.where(both, weight_norm / safe, ops.ones_like(weight_norm))


# Checks of the numbers and words that the optimizers are made with.


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, refused unless it is one of `choices`."""
    if value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(map(repr, choices))}. "
            f"Received: {value!r}."
        )
    return value


def check_number(
    name: str, value: Any, *, below: float = math.inf, above_zero: bool = False
) -> float:
    """`value` as a float, refused unless 0 <= value < below (0 < value < below)."""
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
    """A number as a float; a schedule or function as it came; anything else refused."""
    if callable(value) or isinstance(
        value, keras.optimizers.schedules.LearningRateSchedule
    ):
        return value
    return check_number(name, value)
