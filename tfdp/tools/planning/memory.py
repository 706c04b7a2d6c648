"""Who holds which memory while a step runs: buffers, counted by those who hold them."""

from __future__ import annotations

import collections
import dataclasses

from tfdp.tools.planning.step_graph import Op, StepGraph

__all__ = ["Buffer", "Memory", "readers_of"]


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
