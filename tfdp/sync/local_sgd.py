"""`LocalSGD`: local training, with a mean of the weights now and then."""

from __future__ import annotations

import dataclasses

from tfdp.sync.rounds import Sync


@dataclasses.dataclass(frozen=True)
class LocalSGD(Sync):
    """Groups of replicas train independently; after each round weights are averaged.

    With groups i = 1 .. G (hosts, or single replicas), each on its part of the batch,

        w_i <- optimizer(w_i, g_i)          in every update
        w_i <- w = mean over i of w_i       after every `every`-th

    The optimizer's own state (momentum) stays with its group and is never averaged.

    Args:
      every: updates in a round, at least 1.
      start_step: plain synchronous updates before the first round, at least 0
        (post-local SGD; the paper's is the first decay of the learning rate).
      across: see `DiLoCo`.

    Raises:
      ConfigurationError: when a value is out of its range.

    Cost: for n bytes of weights on H hosts 2 n (H - 1) / H bytes on the wire per host
    and round, nothing in between; n bytes more memory on each device.

    >>> LocalSGD(every=16, start_step=1000).every
    16

    Sources: Stich 2018, "Local SGD converges fast and communicates little",
    Algorithm 1. Lin, Stich, Patel, Jaggi 2018, "Don't use large mini-batches, use
    local SGD", section 3 (`start_step`).
    """

    every: int
    start_step: int = 0
    across: str = "hosts"
