"""A step for any number of rows, from the same step traced for two of them."""

from __future__ import annotations

import dataclasses

from tfdp.tools.planning.step_graph import Op, StepGraph

__all__ = ["StepOfRows"]


class StepOfRows:
    """The step as a line over the rows of a batch.

        bytes(rows) = a + b rows    of each tensor

    Args:
      few: the step for `few_rows`.
      few_rows: fewer than `many_rows`.
      many: the same step for `many_rows`.
      many_rows: see `few_rows`.

    Raises:
      ValueError: when the two are not of the same ops: TensorFlow built another graph
        for another number of rows.
    """

    def __init__(self, few: StepGraph, few_rows: int, many: StepGraph, many_rows: int):
        if [_kept(op) for op in few.ops] != [_kept(op) for op in many.ops]:
            raise ValueError("the two steps are not of the same ops")
        if len(few.variables) != len(many.variables):
            raise ValueError("the two steps do not store the same variables")
        self._few, self._many = few, many
        self._few_rows, self._many_rows = few_rows, many_rows

    def at(self, rows: int) -> StepGraph:
        """The step for `rows` rows, at least 1."""
        part = (rows - self._few_rows) / (self._many_rows - self._few_rows)

        def between(few: float, many: float) -> int:
            return max(0, round(few + part * (many - few)))

        ops = tuple(
            dataclasses.replace(
                a,
                output_bytes=tuple(map(between, a.output_bytes, b.output_bytes)),
                scratch_bytes=between(a.scratch_bytes, b.scratch_bytes),
                flops=float(between(a.flops, b.flops)),
            )
            for a, b in zip(self._few.ops, self._many.ops, strict=True)
        )
        variables = tuple(
            dataclasses.replace(a, size_bytes=between(a.size_bytes, b.size_bytes))
            for a, b in zip(self._few.variables, self._many.variables, strict=True)
        )
        return dataclasses.replace(self._few, ops=ops, variables=variables)


def _kept(op: Op) -> tuple[object, ...]:
    """What is the same for every number of rows."""
    return op.kind, op.inputs, op.controls, len(op.output_bytes), op.variable
