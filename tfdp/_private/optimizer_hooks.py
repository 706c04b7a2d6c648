"""The private hooks of Keras' optimizers, under public names for tfdp's subclasses.

Checked against Keras 3.12 and 3.15: the base optimizer calls or offers these to every
subclass, its own included, though their names begin with an underscore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

__all__ = ["DecayHooks", "LossScaleHooks", "VariableIndex"]


class VariableIndex:
    """Finds the slots of a variable; a mixin for Keras optimizers."""

    def variable_index(self, variable: Any) -> int:
        """The place of `variable` among those that the optimizer was built with."""
        return int(self._get_variable_index(variable))  # type: ignore[attr-defined]


class DecayHooks(VariableIndex, keras.optimizers.Optimizer):
    """A Keras optimizer whose subclass decides what decays, and where."""

    def decays(self, variable: Any) -> bool:
        """Whether `variable` decays. Keras asks; a subclass may answer."""
        return self.decays_by_keras(variable)

    def decays_before_update(self) -> bool:
        """Whether Keras decays the weights before the update (decoupled decay)."""
        return True

    def decays_by_keras(self, variable: Any) -> bool:
        """Keras' own answer: not excluded by `exclude_from_weight_decay()`."""
        return bool(super()._use_weight_decay(variable))

    def _use_weight_decay(self, variable: Any) -> bool:
        return self.decays(variable)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        if self.decays_before_update():
            super()._apply_weight_decay(variables)


class LossScaleHooks(VariableIndex, keras.optimizers.LossScaleOptimizer):
    """Keras' loss scaler, with its decision apart from its `apply`."""

    def built_variables(self) -> list[keras.Variable]:
        """The variables that the optimizer was built with."""
        return list(self._trainable_variables)

    def update_if_finite(
        self, gradients: list[Any], variables: list[Any], is_finite: Any
    ) -> None:
        """Updates where every gradient is finite, else only halves the scale."""
        keras.ops.cond(
            is_finite,
            lambda: self._stateful_handle_finite_grads(gradients, variables),
            self._stateful_handle_non_finite_grads,
        )
