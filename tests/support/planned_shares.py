"""Shares of a batch that change with each step, in the place of those by speed.

What hosts measure depends on the machine, and shares would rarely change.
"""

import itertools

import numpy as np


def take():
    """In strategies made from now on hosts take turns in being four times slower.

    Returns the set of the shares that there were, to which steps add.
    """
    from tfdp.plan import balance  # no module of a run without it

    seen = set()
    balance.FEWEST_STEPS = balance.MOST_STEPS = 1
    balance.STALE_STEPS = 0
    note = balance.SpeedBalance.note
    turns = itertools.count()

    def note_planned(self, seconds, rows):
        # The first steps have no times; all hosts have those of all others.
        hosts = len(seconds)
        assert all(time >= 0 for time in seconds) and hosts == len(self.shares)
        slow = next(turns) % hosts
        planned = np.where(np.arange(hosts) == slow, 4.0, 1.0) * self.shares
        changed = note(self, planned.tolist(), rows)
        seen.add(self.shares)
        return changed

    balance.SpeedBalance.note = note_planned
    return seen
