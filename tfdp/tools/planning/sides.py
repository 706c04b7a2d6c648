"""A step of which the host takes a part (`offload=`), as each of the two sees it."""

from __future__ import annotations

import dataclasses

from tfdp.tools.planning.step_graph import Op, StepGraph

__all__ = ["side_of"]


def side_of(graph: StepGraph, on_host: bool) -> StepGraph:
    """The step with the memory of one side alone; the other side's takes none.

    What crosses has memory on both: it counts from when it is made until its last
    reader has run, which is a little longer than the copy lives.

    Args:
      graph: the step.
      on_host: the side.

    >>> from tfdp.tools.planning.liveness import run_in_thought
    >>> of_host = Op("Neg", ((0, 0),), (), (4,), on_host=True)
    >>> graph = StepGraph((Op("Made", output_bytes=(8,)), of_host))
    >>> [run_in_thought(side_of(graph, side)).peak_bytes for side in (False, True)]
    [8, 12]
    """
    read_here = {
        tensor for op in graph.ops if op.on_host == on_host for tensor in op.inputs
    }
    ops = tuple(
        op if op.on_host == on_host else _crossing(op, place, read_here)
        for place, op in enumerate(graph.ops)
    )
    variables = tuple(
        each if each.on_host == on_host else dataclasses.replace(each, size_bytes=0)
        for each in graph.variables
    )
    return dataclasses.replace(graph, ops=ops, variables=variables)


def _crossing(op: Op, place: int, read_here: set[tuple[int, int]]) -> Op:
    """An op of the other side: what it makes is here where it is read here."""
    return dataclasses.replace(
        op,
        output_bytes=tuple(
            size if (place, number) in read_here else 0
            for number, size in enumerate(op.output_bytes)
        ),
        # A copy, not the memory of the other side.
        shares=(),
        reuses=(),
        variable=None if op.access == "read" else op.variable,
        access="" if op.access == "read" else op.access,
        scratch_bytes=0,
    )
