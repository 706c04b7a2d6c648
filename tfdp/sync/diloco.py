"""`DiLoCo`: replicas train apart for long, and an outer optimizer moves the weights."""

from __future__ import annotations

import dataclasses

from tfdp.errors import ConfigurationError
from tfdp.plan.compression import Compression
from tfdp.sync.rounds import Sync, check_fraction, check_whole

__all__ = ["DiLoCo"]


@dataclasses.dataclass(frozen=True)
class DiLoCo(Sync):
    """After each round an outer SGD with Nesterov momentum follows the mean movement.

    In round t every group i = 1 .. G of replicas starts from the outer weights w_t and
    makes `every` updates with the optimizer that is wrapped (the inner one), to w_i.
    Then, with lr the outer learning rate and mu the outer momentum,

        d = mean over i of (w_t - w_i)
        b <- mu b + d
        w_(t+1) = w_t - lr (d + mu b)       where all groups start again

    The state of the inner optimizer stays with its group and is never averaged.

    Args:
      every: updates in a round, at least 1.
      outer_learning_rate: lr, at least 0.
      outer_momentum: mu, from 0 to below 1.
      fragments: parts of the weights, as even in bytes as whole variables can be, that
        meet in turn: part p of P after (p + 1) every / P updates and then after every
        `every` (streaming DiLoCo). `every` must be a multiple; the most that a step
        sends falls to about 1 / P. No more than there are variables.
      overlap_steps: updates that go on while a part travels. Only 0 for now.
      mixing: the share of the local weights in what comes back late. Only 0.5, its
        default, for now.
      compression: of the outer gradients d: one of `tfdp.compression`, such as
        `Int8()` or `Int4()`; None for none.
      across: "hosts": replicas of a host exchange gradients in every step, hosts meet
        once in a round. "replicas": each replica trains apart, also within a host.
      start_step: plain synchronous updates before the first round, at least 0.

    Raises:
      ConfigurationError: when a value is out of its range.

    Cost: for n bytes of weights on H hosts 2 n (H - 1) / H bytes on the wire per host
    and round, in `fragments` exchanges, and nothing in between; 2 n bytes more memory
    on each device.

    >>> DiLoCo(every=50, start_step=500).outer_momentum
    0.9

    Sources: Douillard et al. 2023, "DiLoCo: distributed low-communication training of
    language models", Algorithm 1, with its outer values 0.7 and 0.9. Douillard et al.
    2025, "Streaming DiLoCo with overlapping communication", section 2.1 (fragments; its
    outer learning rate is 0.4).

    Differs from the papers: `start_step` makes the synchronous updates that they have
    done before, in the same training. Fragments are of variables and not of transformer
    blocks, and training waits for each of them, so that what comes back replaces the
    local weights.
    """

    every: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.5
    compression: Compression | None = None
    across: str = "hosts"
    start_step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, "outer_learning_rate", below_one=False)
        check_fraction(self, "outer_momentum", below_one=True)
        check_fraction(self, "mixing", below_one=True)
        check_whole(self, "fragments", 1)
        check_whole(self, "overlap_steps", 0)
        if self.every % self.fragments:
            raise ConfigurationError(
                "DiLoCo.every must be a multiple of fragments, which meet at even "
                f"distances. Received: every={self.every}, "
                f"fragments={self.fragments}."
            )
        if self.overlap_steps > 0 or self.mixing != 0.5:
            raise ConfigurationError(
                "DiLoCo with overlap_steps above 0, or a mixing of its own, is not "
                "there yet: training waits for what is on the way, and takes it as it "
                "comes. Leave both out (fragments make a step's exchange smaller). "
                f"Received: overlap_steps={self.overlap_steps}, "
                f"mixing={self.mixing}."
            )
        self._check_compression()

    def _check_compression(self) -> None:
        method = self.compression
        if method is not None and not isinstance(method, Compression):
            raise ConfigurationError(
                "DiLoCo.compression must be None or a value of tfdp.compression, such "
                f"as tfdp.compression.Int8(). Received: {method!r}."
            )
        has_momentum = getattr(method, "momentum_correction", None)
        if method is not None and (method.plain_steps or has_momentum):
            raise ConfigurationError(
                "DiLoCo.compression cannot begin later (start_step) nor bring a "
                "momentum of its own (momentum_correction): outer gradients are few, "
                "and have outer_momentum. Pass PowerSGD(..., start_step=0), or TopK "
                f"without it. Received: {method!r}."
            )
