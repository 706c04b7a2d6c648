"""How many rows of a batch each host gets, so that all hosts finish together.

Source: Chen, Weng, Wang, Li, Li: "Semi-Dynamic Load Balancing: Efficient Distributed
Learning in Non-Dedicated Environments" (LB-BSP), 2020 (arXiv 1806.02508).
"""

from __future__ import annotations

import collections
import heapq
import math
import statistics
from collections.abc import Sequence

#: A host's rows are a multiple of 1/32 of an equal share, or of one row per replica.
PARTS_OF_EQUAL_SHARE = 32
#: No host gets less than 1/16 of an equal share, or its speed could not be measured.
LEAST_OF_EQUAL_SHARE = 16
#: New shares must shorten a step to this part of its time, or the old ones stay.
LEAST_GAIN = 0.95
#: Steps between two decisions at first; twice as many after each change.
FEWEST_STEPS, MOST_STEPS = 8, 256
#: Steps after a change that may still have been measured with the shares before.
STALE_STEPS = 3


def shares_by_speed(
    shares: Sequence[int], seconds: Sequence[float], parts: int
) -> tuple[int, ...]:
    """Shares of a batch with which all hosts take equally long, or the given ones.

    With speed v_h = shares_h / seconds_h of host h, the result minimizes
    max_h s_h / v_h over all whole s_h >= least with sum_h s_h = parts. The given shares
    stay unless this shortens the step by 5%.

    Args:
      shares: [hosts] what fraction of a batch each host has had: `shares_h / sum`.
      seconds: [hosts] how long each has computed on it, above 0.
      parts: into how many equal parts a batch is cut, at least one for each host.

    >>> shares_by_speed([1, 1], [3.0, 1.0], 64)
    (16, 48)
    >>> shares_by_speed([1, 1], [1.02, 1.0], 64)
    (1, 1)
    """
    whole = sum(shares)
    speeds = [share / whole / time for share, time in zip(shares, seconds, strict=True)]
    least = max(1, parts // (LEAST_OF_EQUAL_SHARE * len(shares)))
    found = [least] * len(shares)
    # The next part goes to the host that is done with it first: no other choice has a
    # shorter step. Of equal hosts the lowest rank comes first, on every host.
    done = [((least + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(parts - sum(found)):
        _, rank = done[0]
        found[rank] += 1
        heapq.heapreplace(done, ((found[rank] + 1) / speeds[rank], rank))
    after = max(s / parts / v for s, v in zip(found, speeds, strict=True))
    return tuple(found if after <= LEAST_GAIN * max(seconds) else shares)


def parts_of_batch_of(rows: int, hosts: int, replicas: int) -> int:
    """The number of equal parts of a batch, of which hosts get whole ones.

    A part has a multiple of `replicas` (of one host) rows where that divides the batch.

    >>> parts_of_batch_of(256, hosts=4, replicas=1)
    128
    >>> parts_of_batch_of(32, hosts=4, replicas=2)
    16
    """
    rows_of_least = replicas * hosts * PARTS_OF_EQUAL_SHARE
    return max(rows // (replicas * math.ceil(rows / rows_of_least)), hosts)


class SpeedBalance:
    """The shares of the hosts, from step to step: the same on hosts that note the same.

    Args:
      hosts: number of hosts.
      replicas: of each host.
    """

    def __init__(self, hosts: int, replicas: int):
        self._hosts, self._replicas = hosts, replicas
        self.shares: tuple[int, ...] = (1,) * hosts
        self._rows = 0
        self._stale, self._needed = STALE_STEPS, FEWEST_STEPS
        self._times: collections.deque[tuple[float, ...]] = collections.deque(
            maxlen=FEWEST_STEPS
        )
        self._since = 0

    def note(self, seconds: Sequence[float], rows: int) -> bool:
        """Records each host's seconds for a step; returns whether the shares change.

        A step in which a host was not measured, or had no rows, has a 0 there.
        """
        # The last batch of an epoch may be shorter.
        self._rows = max(self._rows, rows)
        if self._stale:
            self._stale -= 1
            return False
        if all(math.isfinite(time) and time > 0 for time in seconds):
            self._times.append(tuple(seconds))
            self._since += 1
        if self._since < self._needed:
            return False
        self._since = 0
        typical = [statistics.median(times) for times in zip(*self._times, strict=True)]
        parts = parts_of_batch_of(self._rows, self._hosts, self._replicas)
        found = shares_by_speed(self.shares, typical, parts)
        if found == self.shares:
            return False
        self.shares, self._stale = found, STALE_STEPS
        self._needed = min(2 * self._needed, MOST_STEPS)
        self._times.clear()
        return True
