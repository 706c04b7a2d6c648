"""Keras callbacks.

Those that need a tool are resolved when first used, from `tfdp/tools/callbacks`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdp.callbacks.ada_scale import AdaScale
from tfdp.callbacks.checkpoint import Checkpoint
from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.input_watch import InputWatch
from tfdp.callbacks.learning_rate import LearningRateLogger
from tfdp.callbacks.nan_guard import NaNGuard
from tfdp.callbacks.replica_check import ReplicaCheck
from tfdp.callbacks.traffic import Traffic

if TYPE_CHECKING:
    from tfdp.tools.callbacks.autotune import Autotune
    from tfdp.tools.callbacks.run_record import RunRecord
    from tfdp.tools.callbacks.step_timeline import StepTimeline

# Public name -> module that defines it.
_OF_TOOLS = {
    "Autotune": "tfdp.tools.callbacks.autotune",
    "RunRecord": "tfdp.tools.callbacks.run_record",
    "StepTimeline": "tfdp.tools.callbacks.step_timeline",
}

__all__ = [
    "AdaScale",
    "Autotune",
    "Checkpoint",
    "GradientNoiseScale",
    "InputWatch",
    "LearningRateLogger",
    "NaNGuard",
    "ReplicaCheck",
    "RunRecord",
    "StepTimeline",
    "Traffic",
]


def __getattr__(name: str) -> Any:
    if name not in _OF_TOOLS:
        raise AttributeError(f"module 'tfdp.callbacks' has no attribute {name!r}")
    value = getattr(importlib.import_module(_OF_TOOLS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_TOOLS})
