"""What a training will need, before it is launched: `tfdp.planning.plan`."""

from tfdp.planning.plan import MemoryPlan, plan

__all__ = ["MemoryPlan", "plan"]
