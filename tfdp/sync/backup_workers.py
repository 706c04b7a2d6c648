"""`BackupWorkers`: each step takes the first gradients that come."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdp.sync.policy import Policy, check_whole


@dataclasses.dataclass(frozen=True)
class BackupWorkers(Policy):
    """Synchronous steps that do not wait for the `spare` slowest hosts.

    Of H = N + b hosts, with gradients g_i of the mean over n_i rows, the first N that
    come in step t count:

        g = sum over these i of n_i g_i / sum over these i of n_i

    and all hosts make the same update with g. A gradient that comes later is dropped by
    its step number. Its host applies the updates that it missed, and goes on with the
    step in which the others are, and with the next batch of its own.

    If a step takes t0 and each host is late by an exponential time of mean mu, with
    H_n = 1 + 1/2 + ... + 1/n, a step takes on average

        t0 + mu (H_(N+b) - H_b)             all of them t0 + mu H_(N+b)

    where all hosts begin each step together. A host that came late begins its next step
    late: for mu up to 0.3 t0 this adds 1% to 9% (simulated: 4 hosts of which 1 is
    spare, 8 of which 2 are, 100 of which 4 are), for mu = t0 3% to 16%.

    Args:
      spare: b, from 0 to below the number of hosts. 0: plain training, bit for bit.

    Raises:
      ConfigurationError: when the value is out of its range, and when training begins:
        without `Communication(min_hosts=...)` of at most H - b.

    Cost: the rows of b hosts in each step, so that the mean is over fewer: choose batch
    size and learning rate for N hosts. All gradients pass through one host: H n bytes
    to it and from it for n bytes of gradients, and 8 n bytes of host memory. One sum
    of all gradients follows the whole backward pass. It gives nothing where all hosts
    are late together (a slow network), and harms where always the same host is late:
    its rows then hardly ever count, and the model does not learn from them. Shuffle
    rows over hosts in each epoch, or give that host fewer rows.

    >>> BackupWorkers(spare=1).spare
    1

    Source: Chen, Pan, Monga, Bengio, Jozefowicz 2016, "Revisiting distributed
    synchronous SGD", Algorithms 3 and 4 (96 workers and 4 spare ones).

    Differs from the paper: a late host skips a batch of its own for each further step
    that it missed, and these rows, as those of dropped gradients, do not return in the
    epoch. There are no parameter servers, so late hosts make the updates that they
    missed. The mean is over rows, not over workers.
    """

    spare: int = 1
    #: All hosts have the same weights.
    trains_locally: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole(self, "spare", 0)

    @property
    def is_plain(self) -> bool:
        return self.spare == 0
