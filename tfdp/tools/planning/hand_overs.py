"""What one replica hands to another within a step: who receives which tensor.

A replica sends and receives by name, in functions of its own, so that a tensor may be
received, as the graph is read, before it was sent.
"""

from __future__ import annotations

import dataclasses

from tfdp.tools.planning.step_graph import Op, Place

__all__ = ["RECEIVED", "SENT", "HandOvers"]

SENT = frozenset("Send _Send".split())
RECEIVED = frozenset("Recv _Recv".split())


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
