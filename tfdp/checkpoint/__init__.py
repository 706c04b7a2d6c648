"""Checkpoint files: trainings to resume, and models in parts to merge."""

from tfdp.checkpoint.checkpoint import Checkpoint, Restored
from tfdp.checkpoint.merge import merge_parts
from tfdp.checkpoint.parts import save_parts

__all__ = ["Checkpoint", "Restored", "merge_parts", "save_parts"]


def __dir__() -> list[str]:
    return [*__all__]
