"""How long workers wait for slow ones, and what each policy of `tfdp` changes.

A worker computes a step in `step_seconds`, times its factor, plus an exponential tail,
plus pauses at random times. Policies differ in what the next step waits for:

    synchronous, balanced      the sum of all gradients of this step
    Delayed, BoundedStaleness  the sum of the step `steps` before
    BackupWorkers              the first workers - spare gradients of this step
    DiLoCo                     the first `quorum` workers, once per round
    Asynchronous               nothing

Events are simulated with random numbers of a fixed seed. A late worker's computation is
not stopped, as in tfdp. Chen et al. (2016), "Revisiting distributed synchronous SGD",
stop it: then a step of N workers, b of them spare, takes t0 + mu (H_N - H_b) for a tail
of mean mu, with H_n = 1 + ... + 1 / n. Here four workers take 4% more for mu = t0 / 10,
11% for mu = t0 / 2.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Sequence

from tfdp.tools.simulator.machine import at_least_zero, positive, whole

STEPS = 2_000
SEED = 1
MOST_WORKERS = 1024
#: Updates of a round of `DiLoCo` in `compare_policies`.
ROUND = 50


@dataclasses.dataclass(frozen=True)
class Delays:
    """Delays that make workers slow.

    Args:
      slow_factor: how many times longer worker 0 computes, above 0; 1: as the others.
      tail_seconds: the mean of an exponential time added to each worker's step.
      pause_seconds: of each pause, at least 0; 0: none.
      pause_every_seconds: the mean time between two pauses of a worker, above 0.
    """

    slow_factor: float = 1.0
    tail_seconds: float = 0.0
    pause_seconds: float = 0.0
    pause_every_seconds: float = math.inf

    def __post_init__(self) -> None:
        positive("Delays", "slow_factor", self.slow_factor)
        at_least_zero("Delays", "tail_seconds", self.tail_seconds)
        at_least_zero("Delays", "pause_seconds", self.pause_seconds)
        if not math.isinf(self.pause_every_seconds):
            positive("Delays", "pause_every_seconds", self.pause_every_seconds)


@dataclasses.dataclass(frozen=True)
class WaitingWorkers:
    """The workers, what a step takes them without delays, and their exchange."""

    workers: int
    step_seconds: float
    exchange_seconds: float
    delays: Delays = Delays()

    def __post_init__(self) -> None:
        whole("Cluster", "workers", self.workers, 2, MOST_WORKERS)
        positive("Cluster", "step_seconds", self.step_seconds)
        at_least_zero("Cluster", "exchange_seconds", self.exchange_seconds)

    @property
    def factors(self) -> list[float]:
        return [self.delays.slow_factor] + [1.0] * (self.workers - 1)


@dataclasses.dataclass(frozen=True)
class Waited:
    """A policy's prediction.

    Args:
      update_seconds: between two updates of a worker's weights.
      efficiency: gradients that count per second, relative to workers without delays
        and exchanges.
      dropped: share of the computed gradients that do not count.
      staleness: the mean number of updates between reading weights and changing them.
    """

    policy: str
    update_seconds: float
    efficiency: float
    dropped: float = 0.0
    staleness: float = 0.0


class _Worker:
    """Computes, and pauses at random times."""

    def __init__(self, cluster: WaitingWorkers, number: int, factor: float):
        self._cluster, self._factor = cluster, factor
        self._random = random.Random(SEED * MOST_WORKERS + number)
        self._next_pause = self._until_pause()

    def _until_pause(self) -> float:
        delays = self._cluster.delays
        if not delays.pause_seconds or math.isinf(delays.pause_every_seconds):
            return math.inf
        return self._random.expovariate(1 / delays.pause_every_seconds)

    def end_of(self, start: float, steps: int = 1) -> float:
        """The time at which `steps` steps end that begin at `start`."""
        delays, end = self._cluster.delays, start
        for _ in range(steps):
            end += self._cluster.step_seconds * self._factor
            if delays.tail_seconds:
                end += self._random.expovariate(1 / delays.tail_seconds)
        while self._next_pause < end:
            end += delays.pause_seconds
            self._next_pause += delays.pause_seconds + self._until_pause()
        return end


def _workers(cluster: WaitingWorkers, factors: Sequence[float]) -> list[_Worker]:
    return [_Worker(cluster, place, factor) for place, factor in enumerate(factors)]


def _result(
    cluster: WaitingWorkers,
    policy: str,
    seconds: float,
    *,
    updates: int,
    counted: int,
    dropped: int = 0,
    ages: int = 0,
) -> Waited:
    """Numbers of single workers' gradients, and the updates, in `seconds`."""
    ideal = cluster.workers / cluster.step_seconds
    return Waited(
        policy,
        update_seconds=seconds / updates,
        efficiency=counted / seconds / ideal,
        dropped=dropped / (counted + dropped),
        staleness=ages / counted,
    )


def late_sums(cluster: WaitingWorkers, policy: str, late_steps: int = 0) -> Waited:
    """The next step waits for the sum of the step `late_steps` before; 0: of this."""
    return _late_sums(cluster, policy, late_steps, cluster.factors)


def balanced(cluster: WaitingWorkers, policy: str) -> Waited:
    """Synchronous steps, with rows in proportion to the workers' speeds."""
    speeds = [1 / factor for factor in cluster.factors]
    even = cluster.workers / sum(speeds)
    return _late_sums(cluster, policy, 0, [even] * cluster.workers)


def _late_sums(
    cluster: WaitingWorkers, policy: str, late_steps: int, factors: Sequence[float]
) -> Waited:
    workers = _workers(cluster, factors)
    free = [0.0] * cluster.workers
    complete: list[float] = []
    ages = 0
    for step in range(STEPS):
        for start in free:
            applied = step
            while applied and complete[applied - 1] > start:
                applied -= 1
            ages += step - applied
        ends = [w.end_of(start) for w, start in zip(workers, free, strict=True)]
        complete.append(max(ends) + cluster.exchange_seconds)
        awaited = complete[step - late_steps] if step >= late_steps else 0.0
        free = [max(end, awaited) for end in ends]
    counted = STEPS * cluster.workers
    return _result(
        cluster, policy, max(free), updates=STEPS, counted=counted, ages=ages
    )


def first_ones(
    cluster: WaitingWorkers,
    policy: str,
    *,
    spare: int,
    every: int = 1,
    grace_seconds: float = 0.0,
) -> Waited:
    """Rounds of `every` steps end with the first `workers - spare` workers, and with
    those that come within `grace_seconds` more. A late worker's round is dropped: it
    takes the weights as it comes, and enters the round in which the others are."""
    workers, needed = _workers(cluster, cluster.factors), cluster.workers - spare
    usual_seconds = cluster.step_seconds + cluster.delays.tail_seconds
    rounds = STEPS // every
    # When a worker comes, which, to which round, and after how many steps.
    coming = [(each.end_of(0.0, every), n, 0, every) for n, each in enumerate(workers)]
    heapq.heapify(coming)
    counted = dropped = 0
    ended = last = 0.0
    for current in range(rounds):
        waiting: list[int] = []
        deadline = math.inf
        while coming and coming[0][0] <= deadline:
            now, place, of, steps = heapq.heappop(coming)
            if of < current:  # late
                dropped += steps
                begun = max(now, ended) + cluster.exchange_seconds
                made = int((begun - ended) / usual_seconds)
                left = max(every - made, 1)
                end = workers[place].end_of(begun, left)
                heapq.heappush(coming, (end, place, current, left))
                continue
            waiting.append(place)
            counted += steps
            last = now
            if len(waiting) == needed:
                deadline = now + grace_seconds
        all_came = len(waiting) == cluster.workers
        ended = (last if all_came else deadline) + cluster.exchange_seconds
        for place in waiting:
            end = workers[place].end_of(ended, every)
            heapq.heappush(coming, (end, place, current + 1, every))
    updates = rounds * every
    return _result(
        cluster, policy, ended, updates=updates, counted=counted, dropped=dropped
    )


def asynchronous(cluster: WaitingWorkers, policy: str) -> Waited:
    """Each worker reads weights, computes and pushes at its own pace."""
    workers = _workers(cluster, cluster.factors)
    coming = [(each.end_of(0.0), n, 0) for n, each in enumerate(workers)]
    heapq.heapify(coming)
    ages, now = 0, 0.0
    pushes = STEPS * cluster.workers
    for version in range(pushes):
        now, place, read = heapq.heappop(coming)
        ages += version - read
        begin = now + cluster.exchange_seconds
        heapq.heappush(coming, (workers[place].end_of(begin), place, version + 1))
    return _result(cluster, policy, now, updates=pushes, counted=pushes, ages=ages)


def compare_policies(cluster: WaitingWorkers) -> list[Waited]:
    """The predictions of all policies for one cluster, synchronous training first."""
    one_less = cluster.workers - 1
    rounds: dict[str, Callable[[str], Waited]] = {
        "synchronous": lambda name: late_sums(cluster, name),
        'balance="speed"': lambda name: balanced(cluster, name),
        "Delayed(steps=1)": lambda name: late_sums(cluster, name, 1),
        "BoundedStaleness(steps=2)": lambda name: late_sums(cluster, name, 2),
        "Asynchronous()": lambda name: asynchronous(cluster, name),
        "BackupWorkers(spare=1)": lambda name: first_ones(cluster, name, spare=1),
        f"DiLoCo(every={ROUND})": lambda name: first_ones(
            cluster, name, spare=0, every=ROUND
        ),
        f"DiLoCo(every={ROUND}, quorum={one_less})": lambda name: first_ones(
            cluster, name, spare=1, every=ROUND
        ),
    }
    return [predict(name) for name, predict in rounds.items()]
