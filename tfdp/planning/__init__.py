"""What a training will need, before it is launched: `tfdp.planning.plan`."""

from tfdp.planning.memory_plan import MemoryPlan
from tfdp.planning.one_plan import plan

__all__ = ["MemoryPlan", "plan"]
