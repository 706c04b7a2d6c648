"""Which inputs of a conditional are its results, where its first branch is taken."""

from __future__ import annotations

from typing import Any

from tfdp._private.step_ops import called_graph

__all__ = ["BRANCHES", "handed_on"]

#: Conditionals -> the attributes that name their branches.
BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}


def handed_on(op: Any, number: int) -> int | None:
    """The input of `op` that its first branch returns as output `number`.

    TensorFlow runs a conditional as switches, which have no memory of their own.

    Args:
      op: of BRANCHES.
      number: of the output.

    Returns:
      The input's place; None: the branch makes the output itself.
    """
    inner = called_graph(op, BRANCHES[op.type][0])
    if inner is None:
        return None
    tensor = inner.outputs[number]
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    places = [place for place, each in enumerate(inner.inputs) if each is tensor]
    # The first input says which branch.
    return places[0] + 1 if places else None
