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

from tfdp.tools.planning.step_graph import Op, StepGraph, StoredVariable

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
    """What `dry_run` found.

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


def dry_run(
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
    >>> dry_run(StepGraph(ops)).peak_bytes
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


# Who holds which memory while a step runs: buffers, counted by those who hold them.


def readers_of(graph: StepGraph) -> collections.Counter[tuple[int, int]]:
    """How many ops, or the end of the step, wait for each output."""
    readers: collections.Counter[tuple[int, int]] = collections.Counter(graph.results)
    for op in graph.ops:
        readers.update(op.inputs)
    return readers


@dataclasses.dataclass(slots=True)
class Buffer:
    """Memory of one tensor, or of several that share it."""

    size_bytes: int
    part: str
    holders: int = 0


class Memory:
    """The buffers of a step that runs, and the most that there were at once.

    A tensor is held by each op that has yet to read it; a variable holds its own.
    TensorFlow counts alike: memory is free when the last reader has run.

    Args:
      graph: the step.
      readers: `readers_of` it.
    """

    def __init__(self, graph: StepGraph, readers: collections.Counter[tuple[int, int]]):
        self._graph = graph
        self.live_bytes = 0
        self.peak_bytes = 0
        self.by_part: collections.Counter[str] = collections.Counter()
        self.peak_by_part: dict[str, int] = {}
        self.peak_op = ""
        self._readers = readers
        self._tensors: dict[tuple[int, int], Buffer] = {}
        self._variables = [
            self._take(Buffer(variable.size_bytes, variable.part))
            for variable in graph.variables
        ]
        for buffer in self._variables:
            buffer.holders = 1
        self._put_where_the_link_did()
        self._note_peak("")

    def _put_where_the_link_did(self) -> None:
        """Variables that share what a link wrote in the step before, and keeps."""
        written: dict[int, Buffer] = {}
        for place, kept in self._graph.lies_in.items():
            own = self._variables[place]
            if kept not in written:
                size_bytes = self._variables[kept].size_bytes
                written[kept] = self._take(Buffer(size_bytes, own.part, holders=1))
            self._let_go(own)
            written[kept].holders += 1
            self._variables[place] = written[kept]

    def begin(self, place: int) -> None:
        """The op at `place` begins: its outputs and its scratch memory are there."""
        op = self._graph.ops[place]
        outputs = self._outputs(op)
        self.live_bytes += op.scratch_bytes
        self.by_part["scratch"] += op.scratch_bytes
        self._note_peak(op.name or op.kind)
        for number, buffer in enumerate(outputs):
            buffer.holders += self._readers[place, number]
            self._tensors[place, number] = buffer

    def end(self, place: int) -> None:
        """The op at `place` has run: what only it needed is free."""
        op = self._graph.ops[place]
        self.live_bytes -= op.scratch_bytes
        self.by_part["scratch"] -= op.scratch_bytes
        if op.variable is not None and op.access == "assign" and op.inputs:
            old = self._variables[op.variable]
            new = self._tensors[op.inputs[-1]]
            if new is not old:
                new.holders += 1
                self._relabel(new, old.part)
                self._variables[op.variable] = new
                self._let_go(old)
        for tensor in op.inputs:
            self._let_go(self._tensors[tensor])
        for number in range(len(op.output_bytes)):
            buffer = self._tensors[place, number]
            if not buffer.holders:
                self._free(buffer)

    def _outputs(self, op: Op) -> list[Buffer]:
        if op.variable is not None and op.access == "add":
            self._write(op)
        free = [
            self._tensors[op.inputs[i]]
            for i in op.reuses
            if self._tensors[op.inputs[i]].holders == 1
        ]
        made = []
        for number, size_bytes in enumerate(op.output_bytes):
            shared = op.shares[number] if op.shares else None
            if op.access == "read" and op.variable is not None:
                made.append(self._variables[op.variable])
            elif shared is not None:
                made.append(self._tensors[op.inputs[shared]])
            else:
                taken = next((b for b in free if b.size_bytes == size_bytes), None)
                if taken is not None and size_bytes:
                    free.remove(taken)
                    self._relabel(taken, op.part)
                    made.append(taken)
                else:
                    made.append(self._take(Buffer(size_bytes, op.part)))
        return made

    def _write(self, op: Op) -> None:
        """Adds to a variable: in a copy where somebody still holds what it was."""
        place = op.variable or 0
        old = self._variables[place]
        if old.holders > 1:
            new = self._take(Buffer(old.size_bytes, old.part, holders=1))
            self._variables[place] = new
            self._relabel(old, op.part)
            self._let_go(old)

    def _take(self, buffer: Buffer) -> Buffer:
        self.live_bytes += buffer.size_bytes
        self.by_part[buffer.part] += buffer.size_bytes
        return buffer

    def _relabel(self, buffer: Buffer, part: str) -> None:
        self.by_part[buffer.part] -= buffer.size_bytes
        self.by_part[part] += buffer.size_bytes
        buffer.part = part

    def _let_go(self, buffer: Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        self.live_bytes -= buffer.size_bytes
        self.by_part[buffer.part] -= buffer.size_bytes
        buffer.size_bytes = 0

    def _note_peak(self, name: str) -> None:
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_by_part = {p: n for p, n in self.by_part.items() if n}
            self.peak_op = name


# Weights that a link has gathered lie in its own memory, once for all replicas.


#: The part of what links keep for the next step.
OF_LINKS = "exchange"


def lying_in_what_links_keep(
    ops: Sequence[Op], variables: Sequence[StoredVariable]
) -> dict[int, int]:
    """The variables that are assigned what a link hands on, as it lies.

    TensorFlow takes an array over where it lies, and hands it to other replicas
    without a copy: after a step their variables are one and the same memory.

    Args:
      ops: of a step.
      variables: of it.

    Returns:
      For each such variable the place of what the link keeps.

    >>> of_link = Op("EagerPyFunc", (), (), (8,), variable=1, access="read")
    >>> row = Op("StridedSlice", ((0, 0),), (), (4,), shares=(0,))
    >>> assign = Op("AssignVariableOp", ((1, 0),), variable=0, access="assign")
    >>> stored = [StoredVariable(4, "weights"), StoredVariable(8, "exchange")]
    >>> lying_in_what_links_keep([of_link, row, assign], stored)
    {0: 1}
    """
    found: dict[int, int] = {}
    for op in ops:
        if op.access != "assign" or op.variable is None or not op.inputs:
            continue
        kept = _variable_of(op.inputs[-1], ops)
        if kept is not None and variables[kept].part == OF_LINKS:
            found[op.variable] = kept
        else:
            found.pop(op.variable, None)
    return found


def _variable_of(tensor: tuple[int, int], ops: Sequence[Op]) -> int | None:
    """The variable whose memory a tensor is; None: it has memory of its own."""
    place, number = tensor
    while ops[place].shares and ops[place].shares[number] is not None:
        shared = ops[place].shares[number]
        place, number = ops[place].inputs[shared or 0]
    op = ops[place]
    return op.variable if op.access == "read" else None
