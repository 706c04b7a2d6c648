"""What optimizers share that send their momentum, made small, after a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp import compression as methods
from tfdp._private.optimizer_hooks import DecayHooks, variable_index
from tfdp.checks import is_whole
from tfdp.compression.method import Method, MomentumCompression
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.step.table_rows import CLIPPING
from tfdp.tracing.run import ReplicaRun, current_run


class SentMomentum(DecayHooks):
    """A Keras optimizer whose momentum is made small on its way, after a warm-up.

    Subclasses call `send_momentum` when they are made, and make `_momentums` when they
    are built. Where gradients are summed (`tfdp.step.compression`), they are then
    given the gradient by which their momentum comes to the sum that arrived.
    """

    #: By variable; made when the optimizer is built.
    _momentums: Sequence[Any] = ()

    def send_momentum(
        self,
        warmup_steps: int,
        beta_1: float,
        compression: Method | dict[str, Any] | None,
        across: str,
    ) -> None:
        """Takes over, checked, what says how the momentum is sent.

        Raises:
          ConfigurationError: when it cannot be sent so.
        """
        if not is_whole(warmup_steps, least=1):
            raise ConfigurationError(
                f"{type(self).__name__}.warmup_steps must be an integer of at least 1: "
                "without one update there is no variance to keep. Received: "
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
        """The momentum of one of the variables."""
        return self._momentums[variable_index(self, variable)]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """One update; see `keras.optimizers.Optimizer.apply`.

        Raises:
          ScopeError: under several replicas of a strategy that is not tfdp's.
          ConfigurationError: another optimizer holds it, which had gradients added up.
        """
        strategy, found = tf.distribute.get_strategy(), current_run()
        if found is not None and found[0].replicas > 1 and found[0].is_updating:
            self._refuse_gradients_sent(found[0])
        if strategy.num_replicas_in_sync > 1 and found is None:
            raise ScopeError(
                f"{type(self).__name__} is used under {type(strategy).__name__}, which "
                "would send its gradients as they are. Use tfdp.DataParallelStrategy "
                "or tfdp.MultiHostDataParallelStrategy."
            )
        return super().apply(grads, trainable_variables)

    def _refuse_gradients_sent(self, run: ReplicaRun) -> None:
        if id(self) not in run.sent_momentum:
            raise ConfigurationError(
                f"{type(self).__name__} is held by another optimizer, for which "
                "gradients were added up as they are: its momentum would not be sent, "
                "and nothing made small. Give it to compile, alone or in "
                "keras.optimizers.LossScaleOptimizer or tfdp.DistributedOptimizer."
            )

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain data."""
        return {
            **super().get_config(),
            "warmup_steps": self.warmup_steps,
            "compression": self.momentum_compression.method.get_config(),
            "across": self.momentum_compression.across,
        }


def refuse_keras_arguments(owner: str, keras_arguments: dict[str, Any]) -> None:
    """Refuses what would see the gradients that rounding has made.

    Raises:
      ConfigurationError: naming `owner`, whose arguments they are.
    """
    for name in CLIPPING:
        if keras_arguments.get(name) is not None:
            raise ConfigurationError(
                f"{owner}({name}=...) would clip what rounding made of the "
                "gradients, which is far from them. Leave it out. Received: "
                f"{name}={keras_arguments[name]!r}."
            )
    if keras_arguments.get("gradient_accumulation_steps"):
        raise ConfigurationError(
            f"{owner} sends in every update. Accumulate with "
            "tfdp.DistributedOptimizer(optimizer, accumulate_steps=...) and leave "
            "gradient_accumulation_steps out."
        )
