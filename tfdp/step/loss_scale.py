"""By what an optimizer's gradients are multiplied when they are summed."""

from __future__ import annotations

from typing import Any

__all__ = ["scale_when_summed"]


def scale_when_summed(optimizer: Any) -> Any:
    """What the gradients of `optimizer` are multiplied by then; None for nothing."""
    if not hasattr(optimizer, "inner_optimizer"):
        return optimizer.loss_scale_factor
    # A DistributedOptimizer undoes the fixed scale before it sums.
    if not getattr(optimizer, "dynamic_loss_scale", True):
        return None
    return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
