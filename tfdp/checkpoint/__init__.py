"""Checkpoint files: trainings to resume, or to merge into one Keras file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp._private.lazy_names import lazy_names

if TYPE_CHECKING:
    from tfdp.checkpoint.checkpoint import Checkpoint, Restored
    from tfdp.checkpoint.merge import merge_parts

# Imported when first used: public name -> defining module.
_PUBLIC = {
    "Checkpoint": "tfdp.checkpoint.checkpoint",
    "Restored": "tfdp.checkpoint.checkpoint",
    "merge_parts": "tfdp.checkpoint.merge",
}

__all__ = ["Checkpoint", "Restored", "merge_parts"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
