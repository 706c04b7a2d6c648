"""The most memory that a step has at once: it is run without computing anything.

What lives at the same time depends on the order in which ops run, which TensorFlow does
not fix: an op runs when its inputs are there and a thread is free. So its executor is
played: a thread that has run an op goes on with the cheap ones that it made ready and
with the last of the dear ones, puts the others in front of its own queue, and a thread
without work takes from the end of another's.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Sequence

from tfdp.tools.planning.memory import Memory, readers_of
from tfdp.tools.planning.step_graph import Op, StepGraph

__all__ = ["TURNS", "StepMemory", "run_in_thought"]

# How fast ops run beside each other, which only the order depends on. A thread of a
# machine of today, by order of magnitude.
FLOPS_PER_SECOND = 2e10
BYTES_PER_SECOND = 5e9
OP_SECONDS = 1e-6
# TensorFlow hands an op to another thread when it takes more than 8,000 cycles.
DEAR_SECONDS = 3e-6
# By how much a turn of the play takes an op to be slower or faster: the same op on a
# machine with other work, or a replica behind the others.
SPREAD = 3.0
#: In how many orders a step is played.
TURNS = 6


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What `run_in_thought` found.

    Args:
      peak_bytes: the most at once, variables included.
      parts: what that was: "weights", "slots", "activations" ... to bytes.
      peak_op: the op that ran then.
      turn: in which order of ops, a number of those that were tried.
    """

    peak_bytes: int
    parts: dict[str, int]
    peak_op: str
    turn: int = 0


def run_in_thought(
    graph: StepGraph, threads: int = 2, turns: Sequence[int] = range(TURNS)
) -> StepMemory:
    """The peak of a step: the largest of several turns.

    A training makes thousands of steps, in each of which ops run in another order. The
    first turn takes every op to be as fast as its size says; in the others each of them
    is up to `SPREAD` times slower or faster, by numbers that are always the same.

    Args:
      graph: the step.
      threads: which run ops beside each other, at least 1.
      turns: the numbers of the orders that are tried, at least one; 0 is the first.

    Returns:
      The peak, and what it was made of.

    Raises:
      ValueError: when ops wait for each other.

    >>> from tfdp.tools.planning.step_graph import Op
    >>> ops = (Op("Made", output_bytes=(8,)), Op("MatMul", ((0, 0),), (), (4,)))
    >>> run_in_thought(StepGraph(ops)).peak_bytes
    12
    """
    wiring = _Wiring(graph)
    found = [_Executor(graph, wiring, threads, turn).run() for turn in turns]
    return max(found, key=lambda memory: memory.peak_bytes)


class _Wiring:
    """What is the same in all turns: who waits for whom, and how long."""

    def __init__(self, graph: StepGraph):
        self.followers: list[list[int]] = [[] for _ in graph.ops]
        self.waits = [0] * len(graph.ops)
        for place, op in enumerate(graph.ops):
            for source in [*(i for i, _ in op.inputs), *op.controls]:
                self.followers[source].append(place)
                self.waits[place] += 1
        self.seconds = [_seconds_of(graph, op) for op in graph.ops]
        self.readers = readers_of(graph)


class _Executor:
    """TensorFlow's, as `tensorflow/core/common_runtime/executor.cc` describes it."""

    def __init__(self, graph: StepGraph, wiring: _Wiring, threads: int, turn: int = 0):
        self._graph = graph
        self._turn = turn
        self._memory = Memory(graph, wiring.readers)
        self._followers = wiring.followers
        self._waits = list(wiring.waits)
        self._seconds = wiring.seconds
        if turn:
            chance = random.Random(turn)
            self._seconds = [
                seconds * SPREAD ** chance.uniform(-1.0, 1.0)
                for seconds in self._seconds
            ]
        self._inline: list[collections.deque[int]] = [
            collections.deque() for _ in range(threads)
        ]
        self._queues: list[collections.deque[int]] = [
            collections.deque() for _ in range(threads)
        ]

    def run(self) -> StepMemory:
        roots = (place for place, waits in enumerate(self._waits) if not waits)
        for number, place in enumerate(roots):
            self._queues[number % len(self._queues)].append(place)
        events: list[tuple[float, int, int, int]] = []
        idle = set(range(len(self._queues)))
        now, ended, begun = 0.0, 0, 0
        while True:
            for thread in sorted(idle):
                taken = self._next_of(thread)
                if taken is not None:
                    idle.discard(thread)
                    self._memory.begin(taken)
                    finish = now + self._seconds[taken]
                    heapq.heappush(events, (finish, begun, thread, taken))
                    begun += 1
            if not events:
                break
            now, _, thread, place = heapq.heappop(events)
            self._memory.end(place)
            ended += 1
            self._hand_on(thread, place)
            idle.add(thread)
        if ended < len(self._graph.ops):
            raise ValueError(
                f"{len(self._graph.ops) - ended} ops of the step wait for each other"
            )
        memory = self._memory
        return StepMemory(
            memory.peak_bytes, memory.peak_by_part, memory.peak_op, self._turn
        )

    def _next_of(self, thread: int) -> int | None:
        if self._inline[thread]:
            return self._inline[thread].popleft()
        if self._queues[thread]:
            return self._queues[thread].popleft()
        for other in range(1, len(self._queues)):
            queue = self._queues[(thread + other) % len(self._queues)]
            if queue:
                return queue.pop()
        return None

    def _hand_on(self, thread: int, place: int) -> None:
        """Those that can run now: inline the cheap ones, and the last dear one."""
        inline, dear = self._inline[thread], None
        for follower in self._followers[place]:
            self._waits[follower] -= 1
            if self._waits[follower]:
                continue
            if self._seconds[follower] < DEAR_SECONDS:
                inline.append(follower)
                continue
            if dear is not None:
                self._queues[thread].appendleft(dear)
            dear = follower
        if dear is not None and inline:
            self._queues[thread].appendleft(dear)
        elif dear is not None:
            inline.append(dear)


def _seconds_of(graph: StepGraph, op: Op) -> float:
    if op.variable is not None and op.access == "read":
        return OP_SECONDS
    own = [
        size
        for number, size in enumerate(op.output_bytes)
        if not op.shares or op.shares[number] is None
    ]
    if not own and op.access != "add":
        return OP_SECONDS
    read = sum(graph.ops[i].output_bytes[n] for i, n in op.inputs)
    moved = sum(own) + read
    return OP_SECONDS + op.flops / FLOPS_PER_SECOND + moved / BYTES_PER_SECOND
