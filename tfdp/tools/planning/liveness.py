"""Peak memory of a step, by a dry run that simulates TensorFlow's executor.

What is live at once depends on the order of ops, which TensorFlow does not fix: an op
runs when its inputs are ready and a thread is free. A thread that has run an op
continues with the cheap ops it made ready and the last expensive one, puts the others
at the front of its own queue, and an idle thread steals from the end of another's.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Sequence

from tfdp.tools.planning.step_graph import Op, StepGraph, StoredVariable

# Speeds that only influence the order of ops: magnitudes of a current CPU thread.
FLOPS_PER_SECOND = 2e10
BYTES_PER_SECOND = 5e9
OP_SECONDS = 1e-6
# TensorFlow gives an op to another thread if it takes more than 8,000 cycles.
EXPENSIVE_SECONDS = 3e-6
# Factor by which a dry run varies an op's time: other load, a replica that is behind.
SPREAD = 3.0
#: How many orders of ops are simulated.
ORDERS = 6


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Memory that `dry_run` found: the peak, by part, and the order of ops."""

    peak_bytes: int
    parts: dict[str, int]
    order: int = 0


def dry_run(
    graph: StepGraph, threads: int = 2, orders: Sequence[int] = range(ORDERS)
) -> StepMemory:
    """The largest peak of a step over several orders of ops, on `threads` threads.

    Order 0 takes every op's time from its size; in the others each op is up to `SPREAD`
    times slower or faster, by fixed random numbers.

    Raises:
      ValueError: ops depend on each other in a cycle.

    >>> from tfdp.tools.planning.step_graph import Op
    >>> ops = (Op("Made", output_bytes=(8,)), Op("MatMul", ((0, 0),), (), (4,)))
    >>> dry_run(StepGraph(ops)).peak_bytes
    12
    """
    dependencies = _Dependencies(graph)
    found = [_Executor(graph, dependencies, threads, order).run() for order in orders]
    return max(found, key=lambda memory: memory.peak_bytes)


class _Dependencies:
    """Dependencies and times of ops, which all orders share."""

    def __init__(self, graph: StepGraph):
        self.followers: list[list[int]] = [[] for _ in graph.ops]
        self.unmet = [0] * len(graph.ops)
        for place, op in enumerate(graph.ops):
            for source in [*(i for i, _ in op.inputs), *op.controls]:
                self.followers[source].append(place)
                self.unmet[place] += 1
        self.seconds = [_seconds_of(graph, op) for op in graph.ops]
        self.readers = readers_of(graph)


class _Executor:
    """TensorFlow's, as `tensorflow/core/common_runtime/executor.cc` describes it."""

    def __init__(
        self,
        graph: StepGraph,
        dependencies: _Dependencies,
        threads: int,
        order: int = 0,
    ):
        self._graph = graph
        self._order = order
        self._memory = Memory(graph, dependencies.readers)
        self._followers = dependencies.followers
        self._unmet = list(dependencies.unmet)
        self._seconds = dependencies.seconds
        if order:
            chance = random.Random(order)
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
        roots = (place for place, unmet in enumerate(self._unmet) if not unmet)
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
            self._release_followers(thread, place)
            idle.add(thread)
        if ended < len(self._graph.ops):
            raise ValueError(
                f"{len(self._graph.ops) - ended} ops of the step wait for each other"
            )
        memory = self._memory
        return StepMemory(memory.peak_bytes, memory.peak_by_part, self._order)

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

    def _release_followers(self, thread: int, place: int) -> None:
        """Schedules ready ops: inline the cheap ones and the last expensive one."""
        inline, expensive = self._inline[thread], None
        for follower in self._followers[place]:
            self._unmet[follower] -= 1
            if self._unmet[follower]:
                continue
            if self._seconds[follower] < EXPENSIVE_SECONDS:
                inline.append(follower)
                continue
            if expensive is not None:
                self._queues[thread].appendleft(expensive)
            expensive = follower
        if expensive is not None and inline:
            self._queues[thread].appendleft(expensive)
        elif expensive is not None:
            inline.append(expensive)


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


def readers_of(graph: StepGraph) -> collections.Counter[tuple[int, int]]:
    """How many ops, or the end of the step, read each output."""
    readers: collections.Counter[tuple[int, int]] = collections.Counter(graph.results)
    for op in graph.ops:
        readers.update(op.inputs)
    return readers


@dataclasses.dataclass(slots=True)
class Buffer:
    """Memory of one tensor, or of several that share it, with its reference count."""

    size_bytes: int
    part: str
    references: int = 0


class Memory:
    """The live buffers of a step, and the most bytes that were live at once.

    Each op that has yet to read a tensor holds a reference, as does a variable on its
    own buffer; as in TensorFlow, memory is freed after the last reader.
    """

    def __init__(self, graph: StepGraph, readers: collections.Counter[tuple[int, int]]):
        self._graph = graph
        self.live_bytes = 0
        self.peak_bytes = 0
        self.by_part: collections.Counter[str] = collections.Counter()
        self.peak_by_part: dict[str, int] = {}
        self._readers = readers
        self._tensors: dict[tuple[int, int], Buffer] = {}
        self._variables = [
            self._allocate(Buffer(variable.size_bytes, variable.part))
            for variable in graph.variables
        ]
        for buffer in self._variables:
            buffer.references = 1
        self._share_link_buffers()
        self._note_peak()

    def _share_link_buffers(self) -> None:
        """Variables that share a buffer a link wrote in the previous step and keeps."""
        written: dict[int, Buffer] = {}
        for place, kept in self._graph.in_link_buffer.items():
            own = self._variables[place]
            if kept not in written:
                size_bytes = self._variables[kept].size_bytes
                written[kept] = self._allocate(Buffer(size_bytes, own.part, 1))
            self._release(own)
            written[kept].references += 1
            self._variables[place] = written[kept]

    def begin(self, place: int) -> None:
        """Starts the op at `place`: allocates its outputs and scratch memory."""
        op = self._graph.ops[place]
        outputs = self._outputs(op)
        self.live_bytes += op.scratch_bytes
        self.by_part["scratch"] += op.scratch_bytes
        self._note_peak()
        for number, buffer in enumerate(outputs):
            buffer.references += self._readers[place, number]
            self._tensors[place, number] = buffer

    def end(self, place: int) -> None:
        """Ends the op at `place`: releases what only it needed."""
        op = self._graph.ops[place]
        self.live_bytes -= op.scratch_bytes
        self.by_part["scratch"] -= op.scratch_bytes
        if op.variable is not None and op.access == "assign" and op.inputs:
            old = self._variables[op.variable]
            new = self._tensors[op.inputs[-1]]
            if new is not old:
                new.references += 1
                self._relabel(new, old.part)
                self._variables[op.variable] = new
                self._release(old)
        for tensor in op.inputs:
            self._release(self._tensors[tensor])
        for number in range(len(op.output_bytes)):
            buffer = self._tensors[place, number]
            if not buffer.references:
                self._free(buffer)

    def _outputs(self, op: Op) -> list[Buffer]:
        if op.variable is not None and op.access == "add":
            self._write(op)
        free = [
            self._tensors[op.inputs[i]]
            for i in op.reuses
            if self._tensors[op.inputs[i]].references == 1
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
                    made.append(self._allocate(Buffer(size_bytes, op.part)))
        return made

    def _write(self, op: Op) -> None:
        """Adds to a variable: in a copy if its old value still has readers."""
        place = op.variable or 0
        old = self._variables[place]
        if old.references > 1:
            new = self._allocate(Buffer(old.size_bytes, old.part, 1))
            self._variables[place] = new
            self._relabel(old, op.part)
            self._release(old)

    def _allocate(self, buffer: Buffer) -> Buffer:
        self.live_bytes += buffer.size_bytes
        self.by_part[buffer.part] += buffer.size_bytes
        return buffer

    def _relabel(self, buffer: Buffer, part: str) -> None:
        self.by_part[buffer.part] -= buffer.size_bytes
        self.by_part[part] += buffer.size_bytes
        buffer.part = part

    def _release(self, buffer: Buffer) -> None:
        buffer.references -= 1
        if not buffer.references:
            self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        self.live_bytes -= buffer.size_bytes
        self.by_part[buffer.part] -= buffer.size_bytes
        buffer.size_bytes = 0

    def _note_peak(self) -> None:
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_by_part = {p: n for p, n in self.by_part.items() if n}


#: The part under which buffers of links are counted.
OF_LINKS = "exchange"


def variables_in_link_buffers(
    ops: Sequence[Op], variables: Sequence[StoredVariable]
) -> dict[int, int]:
    """Variables that are assigned a link's output without a copy -> the link's buffer.

    TensorFlow adopts the array and passes it to other replicas without a copy: after a
    step their variables are one buffer. Values are places in `variables`.
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
    """The variable whose memory a tensor shares; None: it has its own."""
    place, number = tensor
    while ops[place].shares and ops[place].shares[number] is not None:
        shared = ops[place].shares[number]
        place, number = ops[place].inputs[shared or 0]
    op = ops[place]
    return op.variable if op.access == "read" else None
