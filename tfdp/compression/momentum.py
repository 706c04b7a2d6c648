"""`MomentumCompression`: what an optimizer says that sends its momentum, made small."""

from __future__ import annotations

import dataclasses

from tfdp.compression.method import Method
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import ACROSS

__all__ = ["MomentumCompression"]


@dataclasses.dataclass(frozen=True)
class MomentumCompression:
    """How the momentum m of an optimizer is sent, and from which update on.

    Args:
      method: what makes it small.
      across: "hosts" or "replicas"; see `Communication.compression_across`.
      beta_1: how much of m stays in an update.
      warmup_steps: the first updates, which send gradients as they are.

    Raises:
      ConfigurationError: when the method or `across` cannot be.
    """

    method: Method
    across: str
    beta_1: float
    warmup_steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigurationError(
                "compression must be a value of tfdp.compression, such as "
                f"tfdp.compression.SignSGD(). Received: {self.method!r}."
            )
        has_momentum = getattr(self.method, "momentum_correction", None)
        if self.method.plain_steps or has_momentum:
            raise ConfigurationError(
                "compression of a momentum cannot begin later by itself (start_step; "
                "warmup_steps says when) nor bring another momentum "
                "(momentum_correction). Pass PowerSGD(..., start_step=0), or TopK "
                f"without it. Received: {self.method!r}."
            )
        if self.across not in ACROSS:
            raise ConfigurationError(
                "across must be 'hosts' (one momentum of each host is sent) or "
                f"'replicas' (that of each). Received: {self.across!r}."
            )
