"""Gradients of a replica that has no rows, and computed on a dummy row."""

from __future__ import annotations

from tfdp.chain.reduction import Reduction, Stage


class MissingRows(Stage):
    """Adds zeros for such a replica, for an optimizer without overrides."""

    def before(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        reduction.gradients[:] = [
            one if one is None else step.parts_to_sum(rank, one)
            for one in reduction.gradients
        ]
