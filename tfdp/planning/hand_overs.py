"""What one replica hands to another within a step: who receives which tensor.

A replica sends and receives by name, in functions of its own, so that a tensor may be
received, as the graph is read, before it was sent. And several tensors may go as one:
a list, which has no memory and holds on to that of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdp.planning.step_graph import Op, Place

__all__ = ["AS_ONE", "RECEIVED", "SENT", "HandOvers", "with_lists_apart"]

SENT = frozenset("Send _Send".split())
RECEIVED = frozenset("Recv _Recv".split())
AS_ONE = "CompositeTensorVariantFromComponents"
APART = "CompositeTensorVariantToComponents"


class HandOvers:
    """Sources of what is received, by the names under which it is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Place] = {}
        self._awaited: list[tuple[int, str]] = []

    def send(self, name: str, source: Place) -> None:
        """Notes what is sent."""
        self._sent[name] = source

    def receive(self, name: str, place: int) -> Place | None:
        """What the op at `place` receives; None: it was not sent yet, see `connect`."""
        if name not in self._sent:
            self._awaited.append((place, name))
        return self._sent.get(name)

    def connect(self, ops: list[Op]) -> None:
        """Gives those their tensors who were read before what is sent to them."""
        for place, name in self._awaited:
            source = self._sent.get(name)
            if source is None:
                continue
            size_bytes = ops[source[0]].output_bytes[source[1]]
            ops[place] = dataclasses.replace(
                ops[place],
                inputs=(source,),
                shares=(0,),
                output_bytes=(ops[place].output_bytes[0] or size_bytes,),
            )


def with_lists_apart(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same ops, where whoever has a list has each of its tensors.

    Args:
      ops: of a step; of what they make, only lists become several outputs.

    >>> made = Op("Made", output_bytes=(4, 8))
    >>> ops = [made, Op(AS_ONE, ((0, 0), (0, 1)), (), (0,)),
    ...        Op("Recv", ((1, 0),), (), (0,), shares=(0,)),
    ...        Op(APART, ((2, 0),), (), (4, 8))]
    >>> with_lists_apart(ops)[3].inputs
    ((2, 0), (2, 1))
    >>> with_lists_apart(ops)[3].shares
    (0, 1)
    """
    if not any(op.kind == AS_ONE for op in ops):
        return tuple(ops)
    lists = _Lists(ops)
    return tuple(lists.apart(place) for place in range(len(ops)))


class _Lists:
    """How many tensors each output of an op holds: one, or those of a list."""

    def __init__(self, ops: Sequence[Op]):
        self._ops = ops
        self._sizes: dict[Place, tuple[int, ...] | None] = {}

    def apart(self, place: int) -> Op:
        """The op at `place` with each tensor by itself."""
        op = self._ops[place]
        inputs: list[Place] = []
        # Where among the new inputs those begin that an old one has become.
        begins: list[int] = []
        for tensor in op.inputs:
            begins.append(len(inputs))
            inputs += self._tensors_of(tensor)
        begins.append(len(inputs))
        shares: list[int | None] = []
        sizes: list[int] = []
        for number, size_bytes in enumerate(op.output_bytes):
            held = self._held_by((place, number))
            shared = op.shares[number] if op.shares else None
            if op.kind == APART and len(op.output_bytes) == len(inputs):
                shares.append(number)
                sizes.append(size_bytes)
            elif held is None:
                shares.append(None if shared is None else begins[shared])
                sizes.append(size_bytes)
            else:
                first = begins[shared or 0]
                shares += range(first, first + len(held))
                sizes += held
        return dataclasses.replace(
            op,
            inputs=tuple(inputs),
            output_bytes=tuple(sizes),
            shares=tuple(shares),
            reuses=tuple(begins[i] for i in op.reuses),
        )

    def _tensors_of(self, tensor: Place) -> list[Place]:
        place, number = tensor
        before = sum(len(self._held_by((place, n)) or (0,)) for n in range(number))
        held = self._held_by(tensor)
        return [(place, before + n) for n in range(len(held or (0,)))]

    def _held_by(self, tensor: Place) -> tuple[int, ...] | None:
        """The bytes of each tensor of a list; None: it is no list."""
        way: list[Place] = []
        while tensor not in self._sizes:
            way.append(tensor)
            op = self._ops[tensor[0]]
            shared = op.shares[tensor[1]] if op.shares else None
            if op.kind == AS_ONE:
                self._sizes[tensor] = tuple(
                    self._ops[place].output_bytes[number] for place, number in op.inputs
                )
            elif shared is None or op.output_bytes[tensor[1]]:
                self._sizes[tensor] = None
            else:
                tensor = op.inputs[shared]
        for passed in way:
            self._sizes[passed] = self._sizes[tensor]
        return self._sizes[tensor]
