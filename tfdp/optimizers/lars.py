"""`LARS`: SGD with momentum, in steps relative to each layer's weight norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdp._private.optimizer_hooks import variable_index
from tfdp.optimizers.layerwise import (
    LayerwiseOptimizer,
    Phases,
    as_compute_tensor,
    check_number,
    ratio_or_one,
    sum_of_squares,
)

# In the reference epsilon 0 means "not given" and becomes this value.
_MLPERF_EPSILON = 1e-7


@keras.saving.register_keras_serializable("tfdp")
class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling: SGD with momentum for very large batches.

    With w a variable, g its gradient, d = weight_decay, m = momentum, eta =
    trust_coefficient, lr = learning_rate, and r the trust ratio of the variable:

        form        r                                      step
        classic     eta |w| / (|g + d w| + epsilon)        v = m v + lr r (g + d w)
                                                           w = w - v
        unscaled    eta |w| / (|g + d w| + epsilon)        v = m v + (g + d w)
                                                           w = w - lr r v
        mlperf      eta |w| / (|g| + d |w| + epsilon)      as classic

    With `nesterov`, classic and mlperf subtract m v + lr r (g + d w) instead of v, and
    unscaled lr r (m v + g + d w), both with the new v. A variable excluded from weight
    decay has d = 0, in the ratio too; one excluded from layer adaptation has r = 1.

    r = 1 also where |w| or the norm of the update (|g + d w|; for mlperf |g|) is 0, as
    in the references: a variable that starts at zero makes its first step with lr g,
    and lr is 10 to 30 in large-batch recipes, so start from a learning rate of 0
    (`PolynomialDecay` does) or from small non-zero weights.

    Args:
      learning_rate: a number of at least 0, a Keras schedule or a function. At 1 each
        adapted layer moves by `trust_coefficient` of its norm in the first step.
      momentum: m, from 0 to below 1.
      trust_coefficient: eta, above 0.
      form: `"classic"`, `"unscaled"` or `"mlperf"`. The first two are equal while lr r
        is constant.
      epsilon: added to the denominator, at least 0. None: 0, and 1e-7 for mlperf.
      nesterov: whether to look ahead by one momentum step.
      weight_decay: d, at least 0; None is 0. It is added to the gradient (L2, not
        decoupled). The paper has 5e-4, MLPerf's example 2e-4.
      exclude_from_weight_decay: regular expressions, searched in the paths of variables
        (`block1/conv/kernel`). None: biases and the scales and offsets of normalization
        layers (`bias`, `beta`, `gamma` or `scale` at the path's end). []: nothing.
      exclude_from_layer_adaptation: the same, independently, for the trust ratio.
      **keras_arguments: those of every Keras optimizer, such as `clipnorm`, `use_ema`,
        `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
      ConfigurationError: for an argument out of its range, or a bad pattern.

    Float16 and bfloat16 variables: norms and updates are computed in float32.

    ```python
    import keras
    from tfdp.optimizers import LARS
    from tfdp.schedules import PolynomialDecay

    schedule = PolynomialDecay(10.0, total_steps=28_000, warmup_steps=1_560)
    optimizer = LARS(schedule, form="mlperf", weight_decay=2e-4)
    kernel = keras.Variable([[3.0, 4.0]], name="kernel")
    plain = LARS(1.0, momentum=0.0, trust_coefficient=0.1)
    plain.apply([keras.ops.array([[0.0, 7.0]])], [kernel])
    print(kernel.numpy())  # the norm of the weights is 5, so the step is 0.5
    ```

    Source: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional
    Networks", 2017, arXiv 1708.03888, algorithm 1. `unscaled`: S. Kumar et al.,
    "Scale MLPerf-0.6 models on Google TPU-v3 Pods", 2019, arXiv 1909.09756. `mlperf`:
    MLCommons reference, image classification for TensorFlow 2, `LARSOptimizer`.

    Differs from the paper: `classic` and `unscaled` divide by |g + d w|, as
    `optax.lars` and the TensorFlow Model Garden do, not |g| + d |w|; biases and norm
    scales are excluded by default; zero norms are defined. Differs from MLPerf:
    `epsilon=0.0` means 0, not 1e-7; two lists of exclusions. Differs from the Model
    Garden: the ratio of `unscaled` uses |g + d w|, not |v|. Differs from `optax.lars`:
    default exclusions.
    """

    forms = ("classic", "unscaled", "mlperf")
    adds_repeated_rows = True  # see tfdp.chain.table_rows

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        *,
        form: str = "classic",
        epsilon: float | None = None,
        nesterov: bool = False,
        weight_decay: float | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        **keras_arguments: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            form=form,
            weight_decay=weight_decay,
            exclude_from_weight_decay=exclude_from_weight_decay,
            exclude_from_layer_adaptation=exclude_from_layer_adaptation,
            **keras_arguments,
        )
        self.momentum = check_number("LARS.momentum", momentum, below=1.0)
        self.trust_coefficient = check_number(
            "LARS.trust_coefficient", trust_coefficient, above_zero=True
        )
        if epsilon is None:
            epsilon = _MLPERF_EPSILON if form == "mlperf" else 0.0
        self.epsilon = check_number("LARS.epsilon", epsilon)
        self.nesterov = bool(nesterov)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_phases(self, gradient: Any, variable: Any, learning_rate: Any) -> Phases:
        weights = as_compute_tensor(variable)
        gradient = as_compute_tensor(gradient, weights.dtype)
        decay = self.decay_of(variable)
        decayed = gradient + decay * weights if decay else gradient
        rate = ops.cast(learning_rate, weights.dtype)
        if not self.adapts(variable):
            yield ()
        else:
            slope = gradient if self.form == "mlperf" else decayed
            squares = yield sum_of_squares(weights), sum_of_squares(slope)
            weight_norm, slope_norm = map(ops.sqrt, squares)
            rate = rate * self._trust_ratio(weight_norm, slope_norm, decay)

        slot = self._momentums[variable_index(self, variable)]
        previous = self.momentum * as_compute_tensor(slot)
        if self.form == "unscaled":
            velocity = previous + decayed
            ahead = decayed + self.momentum * velocity if self.nesterov else velocity
            update = rate * ahead
        else:
            scaled = rate * decayed
            velocity = previous + scaled
            update = scaled + self.momentum * velocity if self.nesterov else velocity
        self.assign(slot, velocity)
        self.assign_sub(variable, update)

    def _trust_ratio(self, weight_norm: Any, slope_norm: Any, decay: float) -> Any:
        denominator = slope_norm + self.epsilon
        if self.form == "mlperf":
            denominator = slope_norm + decay * weight_norm + self.epsilon
        return ratio_or_one(
            weight_norm, slope_norm, denominator / self.trust_coefficient
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "nesterov": self.nesterov,
        }
