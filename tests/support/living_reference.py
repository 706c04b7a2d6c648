"""What hosts that die and come back must have come to: "mean over those present".

The trainings of `tests.support.living_training` write down who took part in which
meeting; here one process in NumPy makes the same meetings over again.
"""

import collections
import json

import numpy as np

from tests.support import living_training as training
from tests.support.apart import MOMENTUM, RATE, linear_model, regression_data, vector_of


def lines_of(folder):
    """Each process' lines, by (rank, number of the process)."""
    return {
        tuple(map(int, path.name.split(".")[:2])): [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in sorted(folder.glob("*.jsonl"))
    }


def collectives_of(folder):
    """By update: the line of each rank that took part in the meeting after it.

    A host that was left out notes that update, too, with the epoch that it knew.
    """
    found = collections.defaultdict(dict)
    for (rank, _), lines in lines_of(folder).items():
        for line in lines:
            if line["update"] and line["update"] % training.EVERY == 0:
                found[line["update"]][rank] = line
    for by_rank in found.values():
        newest = max(line["epoch"] for line in by_rank.values())
        for rank in [r for r in by_rank if by_rank[r]["epoch"] < newest]:
            del by_rank[rank]
    return dict(sorted(found.items()))


def check_meetings(folder, workers, sync):
    """All present hosts have the same bits after every meeting, and the right ones.

    Returns:
      By update, who took part.
    """
    meetings = collectives_of(folder)
    reference = Reference(sync, workers)
    batches = batches_of(folder)
    for update, by_rank in meetings.items():
        hashes = {line["hash"] for line in by_rank.values()}
        assert len(hashes) == 1, (update, by_rank)
        presents = {tuple(line["present"]) for line in by_rank.values()}
        assert len(presents) == 1, (update, presents)
        reference.round(sorted(by_rank), update, batches)
        (present,) = presents
        reference.let_in(sorted(by_rank), present)
        got = np.array(next(iter(by_rank.values()))["outer"])
        error = np.max(np.abs(got - reference.outer))
        assert error < BOUND, (update, error)
    return {update: tuple(sorted(by_rank)) for update, by_rank in meetings.items()}


def batches_of(folder):
    """Which batch of its epoch a host read for an update; (rank, update) -> batch.

    Of several processes of a rank the last one that made it, but for those left out.
    """
    found = {}
    for (rank, _), lines in lines_of(folder).items():
        for line in lines:
            key, known = (rank, line["update"]), found.get((rank, line["update"]))
            if known is None or known["epoch"] <= line["epoch"]:
                found[key] = line
    return {key: line["batch"] for key, line in found.items()}


# float32 in the place of float64. An outer step adds up 7 products of numbers below 4
# (6e-8 each, relative), four inner ones for each of 2 or 3 hosts 24 rows: less than
# 1e-6 a meeting, which the outer momentum (0.9) carries on ten times at the most, and
# the model, a contraction, forgets. A host left out, or counted twice, moves the
# weights by 1e-3 and more.
BOUND = 4e-5


class Reference:
    """The outer weights, and each host's momentum, in float64.

    Args:
      sync: how they meet.
      workers: how many places there are.
    """

    def __init__(self, sync, workers):
        self.sync, self.workers = sync, workers
        self.outer = vector_of(linear_model().get_weights()).astype("float64")
        self.momentum = np.zeros_like(self.outer)
        self.velocity = [np.zeros_like(self.outer) for _ in range(workers)]
        self.x, self.y = regression_data(training.ROWS)

    def round(self, present, update, batches, starts=None):
        """The updates up to a meeting, by those who take part in it.

        Args:
          starts: by rank the update from which it trained, if not the last meeting's;
            hosts count by the updates that they made.
        """
        firsts = [(starts or {}).get(r, update - self.sync.every) for r in present]
        ends = [
            self._train(rank, range(first + 1, update + 1), batches)
            for rank, first in zip(present, firsts, strict=True)
        ]
        weights = [update - first for first in firsts]
        mean = np.average(ends, axis=0, weights=weights)
        if not hasattr(self.sync, "outer_momentum"):
            self.outer = mean
            return
        moved = self.outer - mean
        mu = self.sync.outer_momentum
        self.momentum = mu * self.momentum + moved
        step = self.sync.outer_learning_rate * (moved + mu * self.momentum)
        self.outer = self.outer - step

    def let_in(self, present, following):
        """Who comes in has the momentum of the one that leads."""
        for rank in set(following) - set(present):
            self.velocity[rank] = self.velocity[min(present)].copy()

    def _train(self, rank, updates, batches):
        w = self.outer.copy()
        for update in updates:
            start = batches[rank, update] * training.BATCH
            share = training.BATCH // self.workers
            mine = slice(start + share * rank, start + share * (rank + 1))
            x, y = self.x[mine].astype("float64"), self.y[mine].astype("float64")
            error = x @ w[:-1, None] + w[-1] - y
            gradient = np.append(2 * x.T @ error, 2 * np.sum(error)) / len(x)
            self.velocity[rank] = MOMENTUM * self.velocity[rank] - RATE * gradient
            w = w + self.velocity[rank]
        return w
