"""`OneBitLAMB`: LAMB that sends signs of its momentum after a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdp._private.optimizer_hooks import variable_index
from tfdp.compression.method import Method
from tfdp.errors import ConfigurationError
from tfdp.optimizers.lamb import LAMB
from tfdp.optimizers.layerwise import (
    as_compute_tensor,
    check_number,
    ratio_or_one,
    sum_of_squares,
)
from tfdp.optimizers.sent_momentum import SentMomentum, refuse_keras_arguments


@keras.saving.register_keras_serializable("tfdp")
class OneBitLAMB(SentMomentum, LAMB):
    """LAMB for slow links: after a warm-up, sends one bit for each number.

    In the first T = `warmup_steps` updates it is LAMB, and averages each variable's
    trust ratio. Then the variance v is frozen, and replicas send what they add to the
    momentum m, compressed as in `OneBitAdam` (p_r and e_r there). With b1 = beta_1,
    b2 = beta_2, b3 = ratio_momentum, d = weight_decay, lr = learning_rate, t the number
    of the update, from 1, s = min(t, T), and g the gradient, after T the one implied by
    the m that arrived:

        v' = b2 v' + (1 - b2) g^2           v = v' up to T, then as it was
        a = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^s)) + epsilon)
        u = a + d w

        up to T:
        c = |w| / |u|, from least_ratio to most_ratio
        C = b3 C + (1 - b3) c               r = 1
        w = w - lr c u

        then, with the frozen variance v and the current one v':
        q = max over the elements of
              (sqrt(v / (1 - b2^T)) + epsilon) / (sqrt(v' / (1 - b2^t)) + epsilon)
        k = min(1, |a| / |u|)               q = q k + 1 - k
        r = q, from least_factor to most_factor, and within 1 -+ factor_step of r before
        w = w - lr r (C / (1 - b3^T)) u

    c is 1 where |w| or |u| is 0. a is 0 where v is: a sign would give a gradient to
    weights that never had one.

    Args:
      learning_rate: a number of at least 0, a Keras schedule or a function.
      warmup_steps: T, updates, at least 1. The paper: until v and c have settled, an
        eighth to a fifth of all.
      beta_1: b1, from 0 to below 1.
      beta_2: b2, from 0 to below 1.
      epsilon: at least 0.
      weight_decay: d, at least 0; None is 0.
      exclude_from_weight_decay: regular expressions, as of `LAMB`.
      exclude_from_layer_adaptation: regular expressions, as of `LAMB`; r C is 1 there.
      least_ratio: of c, at least 0.
      most_ratio: of c, at least `least_ratio`. For BERT the authors have 0.3.
      ratio_momentum: b3, from 0 to below 1.
      least_factor: of r, at least 0, at most 1.
      most_factor: of r, at least 1.
      factor_step: the most that r changes in an update, relative to itself, at least 0.
      compression: as in `OneBitAdam`.
      across: as in `OneBitAdam`.
      **keras_arguments: `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
        `loss_scale_factor` and `name`.

    Raises:
      ConfigurationError: as `OneBitAdam`, and for a bad argument.
      ScopeError: as `OneBitAdam`.

    Cost: as `OneBitAdam`, with one more copy of the weights (v') and two numbers for
    each variable.

    ```python
    import keras
    import tfdp

    weights = keras.Variable([[3.0, 4.0]])
    optimizer = tfdp.optimizers.OneBitLAMB(0.1, warmup_steps=1)
    optimizer.apply([keras.ops.array([[0.0, 7.0]])], [weights])
    print(weights.numpy())  # as of LAMB: the norm is 5, so the step is 0.5
    ```

    Source: Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch
    Training with LAMB's Convergence Speed", algorithm 1; its bounds and k are those of
    DeepSpeed's `OnebitLamb`. Differs from both: bias corrections as in LAMB, and one of
    C, for short warm-ups; no scales unified between variables, since no block spans
    two; elements with v = 0 do not change; biases and norm scales have no ratio by
    default.
    """

    adds_repeated_rows = True  # see tfdp.chain.table_rows

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        warmup_steps: int,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        least_ratio: float = 0.01,
        most_ratio: float = 10.0,
        ratio_momentum: float = 0.9,
        least_factor: float = 0.5,
        most_factor: float = 4.0,
        factor_step: float = 0.1,
        compression: Method | dict[str, Any] | None = None,
        across: str = "hosts",
        **keras_arguments: Any,
    ) -> None:
        refuse_keras_arguments("OneBitLAMB", keras_arguments)
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            exclude_from_weight_decay=exclude_from_weight_decay,
            exclude_from_layer_adaptation=exclude_from_layer_adaptation,
            **{"name": "one_bit_lamb", **keras_arguments},
        )
        self.least_ratio = check_number("OneBitLAMB.least_ratio", least_ratio)
        self.most_ratio = check_number("OneBitLAMB.most_ratio", most_ratio)
        self.ratio_momentum = check_number(
            "OneBitLAMB.ratio_momentum", ratio_momentum, below=1.0
        )
        self.least_factor = check_number("OneBitLAMB.least_factor", least_factor)
        self.most_factor = check_number("OneBitLAMB.most_factor", most_factor)
        self.factor_step = check_number("OneBitLAMB.factor_step", factor_step)
        if self.most_ratio < self.least_ratio:
            raise ConfigurationError(
                "OneBitLAMB.most_ratio must be at least least_ratio. Received: "
                f"least_ratio={least_ratio!r}, most_ratio={most_ratio!r}."
            )
        if not self.least_factor <= 1.0 <= self.most_factor:
            raise ConfigurationError(
                "OneBitLAMB.least_factor must be at most 1 and most_factor at least 1: "
                "the factor starts from 1, the ratio of the warm-up. Received: "
                f"least_factor={least_factor!r}, most_factor={most_factor!r}."
            )
        self.send_momentum(warmup_steps, self.beta_1, compression, across)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        (self._fresh_velocities,) = self.add_optimizer_variables(
            variables, ["fresh_velocity"]
        )
        places = range(len(variables))
        self._ratios = [
            self.add_variable((), "zeros", "float32", name=f"ratio_{place}")
            for place in places
        ]
        self._factors = [
            self.add_variable((), "ones", "float32", name=f"factor_{place}")
            for place in places
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        weights = as_compute_tensor(variable)
        gradient = as_compute_tensor(gradient, weights.dtype)
        is_warm = self.iterations < self.warmup_steps
        direction, drift = self._direction(gradient, variable, is_warm)
        decay = self.decay_of(variable)
        update = direction + decay * weights if decay else direction
        rate = ops.cast(learning_rate, weights.dtype)
        if self.adapts(variable):
            norms = [ops.sqrt(sum_of_squares(v)) for v in (weights, update, direction)]
            rate = rate * self._ratio(variable, norms, drift, is_warm)
        self.assign_sub(variable, ops.cast(rate * update, variable.dtype))

    def _direction(self, gradient: Any, variable: Any, is_warm: Any) -> tuple[Any, Any]:
        """a of the class docstring, and the largest quotient q."""
        index, dtype = variable_index(self, variable), gradient.dtype
        slots = [
            of_all[index]
            for of_all in (self._momentums, self._velocities, self._fresh_velocities)
        ]
        momentum, velocity, fresh = (as_compute_tensor(slot) for slot in slots)
        momentum = momentum + (gradient - momentum) * (1 - self.beta_1)
        fresh = fresh + (ops.square(gradient) - fresh) * (1 - self.beta_2)
        velocity = ops.where(is_warm, fresh, velocity)
        for slot, value in zip(slots, (momentum, velocity, fresh), strict=True):
            self.assign(slot, value)
        step = ops.cast(self.iterations + 1, dtype)
        settled = ops.minimum(step, ops.cast(self.warmup_steps, dtype))
        momentum_hat = momentum / (1.0 - ops.power(ops.cast(self.beta_1, dtype), step))
        beta_2 = ops.cast(self.beta_2, dtype)
        root = ops.sqrt(velocity / (1.0 - ops.power(beta_2, settled))) + self.epsilon
        now = ops.sqrt(fresh / (1.0 - ops.power(beta_2, step))) + self.epsilon
        has_moved = velocity > 0
        zeros = ops.zeros_like(root)
        # With epsilon=0 a root may be 0, where v is 0.
        direction = momentum_hat / ops.where(has_moved, root, ops.ones_like(root))
        quotient = root / ops.where(now > 0, now, ops.ones_like(now))
        drift = ops.max(ops.where(has_moved, quotient, zeros))
        return ops.where(has_moved, direction, zeros), drift

    def _ratio(self, variable: Any, norms: Any, drift: Any, is_warm: Any) -> Any:
        """c in the warm-up, then r C; updates the stored ratio and factor."""
        index = variable_index(self, variable)
        weight_norm, update_norm, direction_norm = norms
        dtype = weight_norm.dtype
        kept = self._ratios[index], self._factors[index]
        average, before = (ops.cast(of_all, dtype) for of_all in kept)

        ratio = ratio_or_one(weight_norm, update_norm, update_norm)
        both = ops.logical_and(weight_norm > 0, update_norm > 0)
        clipped = ops.clip(ratio, self.least_ratio, self.most_ratio)
        ratio = ops.where(both, clipped, ratio)
        moved = average + (ratio - average) * (1 - self.ratio_momentum)
        average = ops.where(is_warm, moved, average)

        safe = ops.where(update_norm > 0, update_norm, ops.ones_like(update_norm))
        share = ops.minimum(ops.ones_like(safe), direction_norm / safe)
        factor = ops.clip(
            drift * share + 1 - share, self.least_factor, self.most_factor
        )
        factor = ops.minimum(factor, before * (1 + self.factor_step))
        factor = ops.maximum(factor, before * (1 - self.factor_step))
        factor = ops.where(is_warm, ops.ones_like(factor), factor)

        for variable_of_one, value in zip(kept, (average, factor), strict=True):
            self.assign(variable_of_one, ops.cast(value, "float32"))
        frozen = average / (1 - self.ratio_momentum**self.warmup_steps)
        return ops.where(is_warm, ratio, factor * frozen)

    def get_config(self) -> dict[str, Any]:
        config = {
            **super().get_config(),
            "least_ratio": self.least_ratio,
            "most_ratio": self.most_ratio,
            "ratio_momentum": self.ratio_momentum,
            "least_factor": self.least_factor,
            "most_factor": self.most_factor,
            "factor_step": self.factor_step,
        }
        del config["form"]  # not an argument of this class
        return config
