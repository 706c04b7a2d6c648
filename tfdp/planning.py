"""Plans what a training will need before launch: `tfdp.planning.plan`."""

from tfdp.tools.planning.memory_plan import MemoryPlan
from tfdp.tools.planning.one_plan import plan

__all__ = ["MemoryPlan", "plan"]


def __dir__() -> list[str]:
    return [*__all__]
