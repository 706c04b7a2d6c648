"""Functions that a step calls: their ops stand in the place of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp._private.step_ops import called_graph, only_called
from tfdp.planning.branches import BRANCHES
from tfdp.planning.step_graph import Op, Place

__all__ = ["add_together", "begin_behind", "put_in_place"]


def put_in_place(op: Any) -> Any:
    """The graph that stands for `op`, which does nothing but call; None: it does more.

    So does a conditional whose other branch only fails (`in_one_call`): nobody has
    traced that one.
    """
    inner = only_called(op)
    if inner is None and op.type == "If":
        taken, never = (called_graph(op, name) for name in BRANCHES["If"])
        return taken if never is None else None
    return inner


def add_together(
    ops: list[Op],
    call: Any,
    tensors: Sequence[Place | None],
    controls: Sequence[int],
    held: Sequence[Place | None] = (),
) -> list[Place | None]:
    """Adds what hands on all that a call takes, or returns: when all of it is there.

    Args:
      ops: of the step so far.
      call: the op that calls.
      tensors: what is handed on.
      controls: places of ops that have run then.
      held: what is free only then.

    Returns:
      In whose place each of `tensors` is now.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    also = [tensor for tensor in held if tensor is not None]
    place, numbers = len(ops), iter(range(len(there)))
    ops.append(
        Op(
            kind=call.type,
            inputs=(*there, *also),
            controls=tuple(controls),
            output_bytes=tuple(ops[i].output_bytes[n] for i, n in there),
            shares=tuple(range(len(there))),
            name=call.name,
        )
    )
    return [None if t is None else (place, next(numbers)) for t in tensors]


def begin_behind(ops: list[Op], first: int, controls: Sequence[int]) -> None:
    """Has those from `first` on that wait for nothing wait for `controls`."""
    for place in range(first, len(ops)) if controls else ():
        op = ops[place]
        if not op.inputs or op.variable is not None:
            ops[place] = dataclasses.replace(op, controls=(*op.controls, *controls))
