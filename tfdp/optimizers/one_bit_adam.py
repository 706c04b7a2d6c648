"""`OneBitAdam`: Adam that sends signs of its momentum after a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdp._private.optimizer_hooks import variable_index
from tfdp.compression.method import Method
from tfdp.optimizers.layerwise import (
    as_compute_tensor,
    check_learning_rate,
    check_number,
)
from tfdp.optimizers.sent_momentum import SentMomentum, refuse_keras_arguments


@keras.saving.register_keras_serializable("tfdp")
class OneBitAdam(SentMomentum):
    """Adam for slow links: after a warm-up, sends one bit for each number.

    In the first T = `warmup_steps` updates it is Adam. Then the variance v is frozen,
    and replicas send what they add to the momentum m, compressed by C with error
    feedback (e_r is the residual of replica r). With g_r (the sum over the R replicas
    is the gradient), b1 = beta_1, b2 = beta_2, lr = learning_rate, t the number of the
    update, from 1, and s = min(t, T):

        p_r = b1 m / R + (1 - b1) g_r + e_r
        m = sum over r of C(p_r)            e_r = p_r - C(p_r)
        w = w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^s)) + epsilon')

    where epsilon' = epsilon / sqrt(1 - b2^s), as in `keras.optimizers.Adam`. w does not
    change where v is 0: a sign would give a gradient to weights that never had one.

    Args:
      learning_rate: a number of at least 0, a Keras schedule or a function.
      warmup_steps: T, updates, at least 1. The paper: until v settles, 15 to 25% of
        all.
      beta_1: b1, from 0 to below 1.
      beta_2: b2, from 0 to below 1.
      epsilon: at least 0.
      compression: C, one of `tfdp.compression`; it leaves biases, small variables and
        `exclude=` uncompressed. None: `SignSGD(block_size=256)`.
      across: "hosts": a host sums its replicas exactly and compresses the sum.
        "replicas": each replica of one process compresses.
      **keras_arguments: `weight_decay` (decoupled, as in AdamW), `use_ema`,
        `ema_momentum`, `ema_overwrite_frequency`, `loss_scale_factor` and `name`.

    Raises:
      ConfigurationError: for a bad argument; with clipping, which would see rounded
        gradients; with `gradient_accumulation_steps` (see `tfdp.DistributedOptimizer`);
        under a strategy with shards, or with a compression or `sync` of its own.
      ScopeError: under several replicas of a strategy other than tfdp's.

    Cost: in the warm-up the bytes of float32, then those of the method (1/28 with the
    default); three copies of the weights (m, v, e). Sums start after the last gradient.

    ```python
    import keras
    import tfdp

    weights = keras.Variable([[1.0, 2.0]])
    optimizer = tfdp.optimizers.OneBitAdam(0.1, warmup_steps=1)
    optimizer.apply([keras.ops.array([[3.0, -4.0]])], [weights])
    print(weights.numpy())  # the first step of Adam is lr in each direction
    ```

    Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training
    with Adam's Convergence Speed", algorithm 1. Differs from the paper: bias
    corrections as in Adam; scales per block; a sum's rounding error stays with the host
    that rounded it (see `tfdp.compression.blocks`); weights with v = 0 do not change.
    As in the paper, where v is tiny and other momenta of the block are not, weights
    take large steps of either sign: choose smaller blocks, or `exclude` such variables.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        warmup_steps: int,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        compression: Method | dict[str, Any] | None = None,
        across: str = "hosts",
        **keras_arguments: Any,
    ) -> None:
        refuse_keras_arguments("OneBitAdam", keras_arguments)
        super().__init__(
            learning_rate=check_learning_rate(
                "OneBitAdam.learning_rate", learning_rate
            ),
            **{"name": "one_bit_adam", **keras_arguments},
        )
        self.beta_1 = check_number("OneBitAdam.beta_1", beta_1, below=1.0)
        self.beta_2 = check_number("OneBitAdam.beta_2", beta_2, below=1.0)
        self.epsilon = check_number("OneBitAdam.epsilon", epsilon)
        self.send_momentum(warmup_steps, self.beta_1, compression, across)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = variable_index(self, variable)
        slots = self._momentums[index], self._velocities[index]
        momentum, velocity = (as_compute_tensor(slot) for slot in slots)
        gradient = as_compute_tensor(gradient, momentum.dtype)
        dtype = momentum.dtype
        is_warm = self.iterations < self.warmup_steps
        step = ops.cast(self.iterations + 1, dtype)
        settled = ops.minimum(step, ops.cast(self.warmup_steps, dtype))
        beta_1_power = ops.power(ops.cast(self.beta_1, dtype), step)
        beta_2_power = ops.power(ops.cast(self.beta_2, dtype), settled)
        rate = ops.cast(learning_rate, dtype)
        rate = rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power)

        momentum = momentum + (gradient - momentum) * (1 - self.beta_1)
        moved = (ops.square(gradient) - velocity) * (1 - self.beta_2)
        velocity = velocity + ops.where(is_warm, moved, ops.zeros_like(moved))
        self.assign(slots[0], momentum)
        self.assign(slots[1], velocity)
        update = momentum * rate / (ops.sqrt(velocity) + self.epsilon)
        # The sign of a momentum of 0 is not 0.
        update = ops.where(velocity > 0, update, ops.zeros_like(update))
        self.assign_sub(variable, ops.cast(update, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }
