"""A step played through: buckets become ready, travel in turn, and slow backprop down.

Backprop goes on at the speed 1 - s, where s is the share that the sums on their way
take of the computing. A bucket goes through its stages in order; each level of links
carries one bucket at a time, first come, first served, so that while one bucket is
between hosts the next one can be summed within them: unless both need the cores, and
more of them than there are.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from tfdp.tools.simulator.sums import Stage

__all__ = ["BucketTimes", "PlayedStep", "play_step"]

# Shares add up to it at most, but for rounding.
ALL_CORES = 1.0 + 1e-9


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """When one bucket was ready, began to travel, and was there; seconds."""

    ready_seconds: float
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class PlayedStep:
    """What came of a step, without the update.

    Args:
      computed_seconds: when backprop had ended, slowed down as it was.
      end_seconds: when backprop and all sums had ended.
      buckets: in the order of the plan.
    """

    computed_seconds: float
    end_seconds: float
    buckets: tuple[BucketTimes, ...]


def play_step(
    compute_seconds: float,
    ready_seconds: Sequence[float],
    stages: Sequence[Sequence[Stage]],
) -> PlayedStep:
    """Plays forward and backward of a step with its sums.

    Args:
      compute_seconds: of forward and backward, undisturbed.
      ready_seconds: by bucket, when its last gradient is there in an undisturbed step;
        at most `compute_seconds`.
      stages: by bucket, what its sum is made of.

    >>> once = [Stage("between", 2.0, 0.0)]
    >>> play_step(3.0, [1.0, 3.0], [once, once]).end_seconds
    5.0
    >>> busy = [Stage("within", 2.0, 1.0)]
    >>> play_step(3.0, [1.0, 3.0], [busy, busy]).end_seconds
    7.0
    """
    return _Player(compute_seconds, ready_seconds, stages).play()


class _Player:
    def __init__(
        self,
        compute_seconds: float,
        ready_seconds: Sequence[float],
        stages: Sequence[Sequence[Stage]],
    ):
        self._compute_seconds = compute_seconds
        self._stages = stages
        self._time = self._computed = 0.0
        # Undisturbed seconds of compute -> the bucket that is ready then.
        self._coming = sorted(
            (min(ready, compute_seconds), number)
            for number, ready in enumerate(ready_seconds)
        )
        self._coming.reverse()
        self._waiting: dict[str, list[tuple[float, int, int]]] = {}
        # Level -> (when it ends, bucket, place of its stage).
        self._travelling: dict[str, tuple[float, int, int]] = {}
        count = len(ready_seconds)
        self._ready, self._start, self._end = (
            [math.nan] * count,
            [math.nan] * count,
            [0.0] * count,
        )

    def play(self) -> PlayedStep:
        computed_at: float | None = None
        while computed_at is None or self._is_travelling():
            self._let_go()
            if self._advance() and computed_at is None:
                computed_at = self._time
        end = max([computed_at, *self._end])
        times = zip(self._ready, self._start, self._end, strict=True)
        return PlayedStep(computed_at, end, tuple(BucketTimes(*each) for each in times))

    def _is_travelling(self) -> bool:
        waits = any(self._waiting.values())
        return bool(self._coming or self._travelling or waits)

    def _advance(self) -> bool:
        """Goes to the next event; returns whether all is computed."""
        speed = self._speed()
        next_computed = self._coming[-1][0] if self._coming else self._compute_seconds
        until_computed = math.inf
        if speed > 0 and self._computed < self._compute_seconds:
            until_computed = max(next_computed - self._computed, 0.0) / speed
        elif next_computed <= self._computed and self._coming:
            until_computed = 0.0
        ends = min((end for end, _, _ in self._travelling.values()), default=math.inf)
        if self._time + until_computed <= ends:
            self._time += until_computed
            self._computed = max(self._computed, next_computed)
            if self._coming:
                _, number = self._coming.pop()
                self._ready[number] = self._time
                self._enter(number, 0)
        else:
            self._computed += speed * (ends - self._time)
            self._computed = min(self._computed, next_computed)
            self._time = ends
            self._arrive()
        return self._computed >= self._compute_seconds

    def _speed(self) -> float:
        return max(1.0 - self._taken(), 0.0)

    def _taken(self) -> float:
        """The part of the cores that the sums on their way have."""
        return sum(
            self._stages[number][place].compute_share
            for _, number, place in self._travelling.values()
        )

    def _enter(self, number: int, place: int) -> None:
        """The bucket waits for the level of its next stage, or is there."""
        stages = self._stages[number]
        if place == len(stages):
            self._end[number] = self._time
            if math.isnan(self._start[number]):
                self._start[number] = self._time
            return
        queue = self._waiting.setdefault(stages[place].level, [])
        heapq.heappush(queue, (self._time, number, place))

    def _let_go(self) -> None:
        # Levels in the order of those who have waited longest.
        for level in sorted(self._waiting, key=lambda name: self._waiting[name][:1]):
            queue = self._waiting[level]
            if not queue or level in self._travelling:
                continue
            _, number, place = queue[0]
            stage = self._stages[number][place]
            if self._travelling and self._taken() + stage.compute_share > ALL_CORES:
                continue
            heapq.heappop(queue)
            if math.isnan(self._start[number]):
                self._start[number] = self._time
            self._travelling[level] = (self._time + stage.seconds, number, place)

    def _arrive(self) -> None:
        for level, (end, number, place) in list(self._travelling.items()):
            if end <= self._time:
                del self._travelling[level]
                self._enter(number, place + 1)
