"""`LAMB`: Adam in steps relative to each layer's weight norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdp._private.optimizer_hooks import variable_index
from tfdp.errors import ConfigurationError
from tfdp.optimizers.layerwise import (
    LayerwiseOptimizer,
    Phases,
    as_compute_tensor,
    check_number,
    ratio_or_one,
    sum_of_squares,
)

_EPSILON = {"paper": 1e-6, "nvlamb": 1e-6, "keras": 1e-7}
_NVLAMB_GLOBAL_CLIPNORM = 1.0


@keras.saving.register_keras_serializable("tfdp")
class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments: Adam for very large batches, as used for BERT.

    With w a variable, g its gradient, d = weight_decay, b1 = beta_1, b2 = beta_2,
    lr = learning_rate and t the number of the step, from 1:

        m = b1 m + (1 - b1) g              v = b2 v + (1 - b2) g^2
        a = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

        form      update u     trust ratio r    step
        paper     a + d w      |w| / |u|        w = w - lr r u
        nvlamb    a + d w      |w| / |u|        the same, after g = g / max(1, |G| / c)
        keras     a            |w| / |u|        w = w - lr d w, then w = w - lr r u

    |G| is the norm of all gradients together and c = `global_clipnorm`. A variable
    excluded from weight decay has d = 0; one excluded from layer adaptation has r = 1.
    r = 1 also where |w| or |u| is 0, as in the references.

    Args:
      learning_rate: a number of at least 0, a Keras schedule or a function.
      beta_1: b1, from 0 to below 1.
      beta_2: b2, from 0 to below 1.
      form: `"paper"`, `"nvlamb"` or `"keras"`.
      epsilon: at least 0. None: 1e-6, and 1e-7 for keras.
      weight_decay: d, at least 0; None is 0. The paper and NVIDIA have 0.01.
      exclude_from_weight_decay: regular expressions, searched in the paths of variables
        (`encoder/dense/kernel`). None: biases and the scales and offsets of
        normalization layers (`bias`, `beta`, `gamma` or `scale` at the path's end), but
        nothing in the form keras. []: nothing.
      exclude_from_layer_adaptation: the same, independently, for the trust ratio.
      global_clipnorm: c above. None: no clipping, and 1.0 for nvlamb.
      **keras_arguments: those of every Keras optimizer, such as `clipnorm`, `use_ema`,
        `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
      ConfigurationError: for an argument out of its range, or a bad pattern.

    Float16 and bfloat16 variables: norms and updates are computed in float32.

    ```python
    import keras
    from tfdp.optimizers import LAMB
    from tfdp.schedules import LinearWarmup

    optimizer = LAMB(LinearWarmup(5e-3, warmup_steps=3_125), weight_decay=0.01)
    kernel = keras.Variable([[3.0, 4.0]], name="kernel")
    plain = LAMB(0.1)
    plain.apply([keras.ops.array([[0.0, 7.0]])], [kernel])
    print(kernel.numpy())  # the norm of the weights is 5, so the step is 0.5
    ```

    Source: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT
    in 76 minutes", 2020, arXiv 1904.00962, algorithm 2. `nvlamb`: NVIDIA apex,
    `FusedLAMB`. `keras`: `keras.optimizers.Lamb`, equal bit for bit in float32.

    Differs from the paper: phi, which bounds |w|, is the identity, as in its
    experiments; biases and norm scales are excluded by default. Differs from apex:
    `use_nvlamb=True` is `exclude_from_layer_adaptation=[]`. Differs from TensorFlow
    Addons: an empty `exclude_from_layer_adaptation` does not fall back to the other
    list. Differs from `keras.optimizers.Lamb`, except in the form keras: its decay is
    outside u, so it affects neither |u| nor r. Differs from `optax.lamb`: default
    exclusions.
    """

    forms = ("paper", "nvlamb", "keras")
    adds_repeated_rows = True  # see tfdp.chain.table_rows
    decoupled_forms = ("keras",)

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        *,
        form: str = "paper",
        epsilon: float | None = None,
        weight_decay: float | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        global_clipnorm: float | None = None,
        **keras_arguments: Any,
    ) -> None:
        if form == "nvlamb" and global_clipnorm is None:
            _refuse_other_clipping(keras_arguments)
            global_clipnorm = _NVLAMB_GLOBAL_CLIPNORM
        super().__init__(
            learning_rate,
            form=form,
            weight_decay=weight_decay,
            exclude_from_weight_decay=exclude_from_weight_decay,
            exclude_from_layer_adaptation=exclude_from_layer_adaptation,
            global_clipnorm=global_clipnorm,
            **keras_arguments,
        )
        self.beta_1 = check_number("LAMB.beta_1", beta_1, below=1.0)
        self.beta_2 = check_number("LAMB.beta_2", beta_2, below=1.0)
        if epsilon is None:
            epsilon = _EPSILON[form]
        self.epsilon = check_number("LAMB.epsilon", epsilon)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_phases(self, gradient: Any, variable: Any, learning_rate: Any) -> Phases:
        weights = as_compute_tensor(variable)
        gradient = as_compute_tensor(gradient, weights.dtype)
        update = self._adam_update(gradient, variable)
        decay = self.decay_of(variable)
        # In the form keras the base class has decayed the weights already.
        if decay and self.form not in self.decoupled_forms:
            update = update + decay * weights
        rate = ops.cast(learning_rate, weights.dtype)
        if not self.adapts(variable):
            yield ()
        else:
            squares = yield sum_of_squares(weights), sum_of_squares(update)
            weight_norm, update_norm = map(ops.sqrt, squares)
            ratio = ratio_or_one(weight_norm, update_norm, update_norm)
            # In this order, the form keras equals Keras bit for bit.
            rate = ratio * rate
        self.assign_sub(variable, rate * update)

    def _adam_update(self, gradient: Any, variable: Any) -> Any:
        index = variable_index(self, variable)
        slots = self._momentums[index], self._velocities[index]
        momentum, velocity = (as_compute_tensor(slot) for slot in slots)
        momentum = momentum + (gradient - momentum) * (1 - self.beta_1)
        velocity = velocity + (ops.square(gradient) - velocity) * (1 - self.beta_2)
        self.assign(slots[0], momentum)
        self.assign(slots[1], velocity)

        step = ops.cast(self.iterations + 1, gradient.dtype)
        beta_1_power = ops.power(ops.cast(self.beta_1, gradient.dtype), step)
        beta_2_power = ops.power(ops.cast(self.beta_2, gradient.dtype), step)
        momentum_hat = momentum / (1.0 - beta_1_power)
        velocity_hat = velocity / (1.0 - beta_2_power)
        return momentum_hat / (ops.sqrt(velocity_hat) + self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }


def _refuse_other_clipping(keras_arguments: dict[str, Any]) -> None:
    for name in ("clipnorm", "clipvalue"):
        if keras_arguments.get(name) is not None:
            raise ConfigurationError(
                "LAMB's form nvlamb clips by the global norm, and Keras allows one "
                f"way of clipping. Leave out {name}, or use form='paper'. Received: "
                f"{name}={keras_arguments[name]!r}."
            )
