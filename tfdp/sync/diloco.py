"""`DiLoCo`: long rounds of local training, and an outer optimizer for the weights."""

from __future__ import annotations

import dataclasses

from tfdp.errors import ConfigurationError
from tfdp.plan.compression import Compression
from tfdp.sync.policy import check_fraction, check_whole
from tfdp.sync.rounds import Sync


@dataclasses.dataclass(frozen=True)
class DiLoCo(Sync):
    """Outer SGD with Nesterov momentum after each round of local training.

    In round t every group i = 1 .. G of replicas starts from the outer weights w_t and
    makes `every` updates with the wrapped (inner) optimizer, to w_i. Then, with lr the
    outer learning rate and mu the outer momentum,

        d = mean over i of (w_t - w_i)
        b <- mu b + d
        w_(t+1) = w_t - lr (d + mu b)       from which all groups continue

    The state of the inner optimizer stays with its group and is never averaged.

    With `overlap_steps` tau the d of update t is in flight while the groups continue,
    and is applied after update t + tau:

        w_i <- alpha w_i + (1 - alpha) w_(t+1)

    With `quorum` a round does not wait for late hosts; see below.

    Args:
      every: updates in a round, at least 1.
      outer_learning_rate: lr, at least 0.
      outer_momentum: mu, from 0 to below 1.
      fragments: parts of the weights, whole variables of about equal bytes, that
        synchronize in turn: part p of P after (p + 1) every / P updates and then after
        every `every` (streaming DiLoCo). `every` must be a multiple; the most that a
        step sends falls to about 1 / P. At most the number of variables.
      overlap_steps: tau, updates during which d is in flight, from 0 to below `every`.
      mixing: alpha, the share of the local weights after d is applied, from 0 to below
        1. None: 0.5 with `overlap_steps`, as in the paper, else 0.
      compression: of the outer gradients d: one of `tfdp.compression`, such as
        `Int8()` or `Int4()`; None for none.
      across: "hosts": replicas of a host exchange gradients in every step, hosts
        synchronize once per round. "replicas": each replica trains independently.
      start_step: plain synchronous updates before the first round, at least 0.
      quorum: K, how many of the H hosts a round waits for, from
        `Communication(min_hosts=...)`, which it needs, to H. None, or H: for all. If
        fewer than K are alive, for those.
      grace_seconds: how long a round then waits for the other hosts, from 0 to below
        `Communication(timeout_seconds=...)`; 0 with a quorum of H.

    With a quorum below H only hosts that come in time count, each by the rows n_i that
    it has read since its last round:

        d = sum over i of n_i (w_t - w_i) / sum over i of n_i

    A late host loses its updates of that round. It starts from the outer weights that
    the others have by then, with its own inner optimizer, and skips as many updates as
    they have made since, so that it is in time for their next round. One that missed
    more than two rounds gets the state of a peer, as a host that joins.

    A host that is always slower than the others by more than `grace_seconds` in a round
    counts little: it comes after each round, skips to where the others are, and counts
    by the few rows it then reads before the next one; if it needs twice as long as they
    do, it may be late each time and never count. Give such a host smaller batches (a
    host counts by its rows), or raise `grace_seconds` to what it needs longer, or leave
    `quorum` out.

    Raises:
      ConfigurationError: when a value is out of its range; when training begins, if it
        does not fit the hosts.

    Cost: for n bytes of weights on H hosts 2 n (H - 1) / H bytes on the wire per host
    and round, in `fragments` exchanges, and nothing in between; 2 n bytes more memory
    on each device, with `overlap_steps` 3 n. These hide an exchange between hosts,
    except for that of `compression`, for which training waits. With a quorum, 3 n bytes
    more host memory, and all traffic passes through one host: H n bytes there.

    >>> DiLoCo(every=50, start_step=500).outer_momentum
    0.9

    Sources: Douillard et al. 2023, "DiLoCo: distributed low-communication training of
    language models", Algorithm 1, with its outer values 0.7 and 0.9. Douillard et al.
    2025, "Streaming DiLoCo with overlapping communication", Algorithm 2 (fragments,
    tau and alpha; its outer learning rate is 0.4). Douillard et al. 2026, "Decoupled
    DiLoCo" (arXiv 2604.21428: quorum, grace window, weights).

    Differs from the papers: `start_step` makes their earlier synchronous updates in the
    same training. Fragments are of variables, not of transformer blocks. Layers' state
    (moving statistics) travels with the last fragment, and is mixed as weights are.
    """

    every: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None
    compression: Compression | None = None
    across: str = "hosts"
    start_step: int = 0
    quorum: int | None = None
    grace_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, "outer_learning_rate", below_one=False)
        check_fraction(self, "outer_momentum", below_one=True)
        if self.mixing is not None:
            check_fraction(self, "mixing", below_one=True)
        check_whole(self, "fragments", 1)
        check_whole(self, "overlap_steps", 0)
        if self.every % self.fragments:
            raise ConfigurationError(
                "DiLoCo.every must be a multiple of fragments, which synchronize at "
                f"even distances. Received: every={self.every}, "
                f"fragments={self.fragments}."
            )
        if self.overlap_steps >= self.every:
            raise ConfigurationError(
                "DiLoCo.overlap_steps must be below every: an exchange must end before "
                "the same weights synchronize again. Received: "
                f"overlap_steps={self.overlap_steps}, every={self.every}."
            )
        self._check_compression()
        self._check_quorum()

    def _check_quorum(self) -> None:
        if self.quorum is not None:
            check_whole(self, "quorum", 1)
        check_fraction(self, "grace_seconds", below_one=False)
        if self.grace_seconds and self.quorum is None:
            raise ConfigurationError(
                "DiLoCo.grace_seconds is how long a round waits after its quorum, and "
                "quorum=None waits for all hosts. Give a quorum, or leave "
                f"grace_seconds out. Received: grace_seconds={self.grace_seconds:g}."
            )

    @property
    def local_share(self) -> float:
        """The share alpha that a host keeps of its own weights; see `mixing`."""
        if self.mixing is None:
            return 0.5 if self.overlap_steps else 0.0
        return self.mixing

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
