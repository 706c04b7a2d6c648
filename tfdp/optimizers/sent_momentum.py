"""Base of optimizers that send their momentum, compressed, after a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp import compression as methods
from tfdp._private.names import replicas_of
from tfdp._private.optimizer_hooks import CLIPPING, DecayHooks, variable_index
from tfdp.checks import is_whole
from tfdp.compression.method import Method, MomentumCompression, SentMomenta
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.tracing.step import current_step


class SentMomentum(DecayHooks):
    """A Keras optimizer that compresses its momentum after a warm-up.

    `tfdp.chain.momentum` gives it the gradient that turns its momentum into the sum
    that arrived.
    """

    #: By variable; created in `build`.
    _momentums: Sequence[Any] = ()

    def send_momentum(
        self,
        warmup_steps: int,
        beta_1: float,
        compression: Method | dict[str, Any] | None,
        across: str,
    ) -> None:
        """Checks and sets how the momentum is sent."""
        if not is_whole(warmup_steps, least=1):
            raise ConfigurationError(
                f"{type(self).__name__}.warmup_steps must be an integer of at least 1: "
                "without an update there is no variance to freeze. Received: "
                f"{warmup_steps!r}."
            )
        self.warmup_steps = warmup_steps
        if isinstance(compression, dict):
            compression = methods.from_config(compression)
        if compression is None:
            compression = methods.SignSGD(block_size=256)
        self.momentum_compression = MomentumCompression(
            compression, across, beta_1, warmup_steps
        )

    def momentum_of(self, variable: Any) -> Any:
        return self._momentums[variable_index(self, variable)]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """One update; see `keras.optimizers.Optimizer.apply`."""
        strategy, found = tf.distribute.get_strategy(), current_step()
        step = None if found is None or found[0].replicas == 1 else found[0]
        if step and step.is_updating and id(self) not in step.of(SentMomenta):
            raise ConfigurationError(
                f"{type(self).__name__} is held by another optimizer, for which "
                "gradients were summed uncompressed: its momentum would not be sent. "
                "Give it to compile, alone or in tfdp.DistributedOptimizer or "
                "keras.optimizers.LossScaleOptimizer."
            )
        if replicas_of(strategy) > 1 and found is None:
            raise ScopeError(
                f"{type(self).__name__} is used under {type(strategy).__name__}, which "
                "would send its gradients uncompressed. Use tfdp.DataParallelStrategy "
                "or tfdp.MultiHostDataParallelStrategy."
            )
        return super().apply(grads, trainable_variables)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "warmup_steps": self.warmup_steps,
            "compression": self.momentum_compression.method.get_config(),
            "across": self.momentum_compression.across,
        }


def refuse_keras_arguments(owner: str, keras_arguments: dict[str, Any]) -> None:
    """Refuses Keras options that would see gradients after rounding."""
    for name in CLIPPING:
        if keras_arguments.get(name) is not None:
            raise ConfigurationError(
                f"{owner}({name}=...) would clip rounded gradients, which "
                "differ from the exact ones. Leave it out. Received: "
                f"{name}={keras_arguments[name]!r}."
            )
    if keras_arguments.get("gradient_accumulation_steps"):
        raise ConfigurationError(
            f"{owner} sends in every update. Accumulate with "
            "tfdp.DistributedOptimizer(optimizer, accumulate_steps=...) and leave out "
            "gradient_accumulation_steps."
        )
