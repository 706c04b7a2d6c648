"""Weights that a link has gathered lie in its own memory, once for all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.tools.planning.step_graph import Op, StoredVariable

__all__ = ["OF_LINKS", "lying_in_what_links_keep"]

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
