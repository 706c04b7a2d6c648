"""Keras callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp._private.lazy_names import lazy_names

if TYPE_CHECKING:
    from tfdp.callbacks.ada_scale import AdaScale
    from tfdp.callbacks.checkpoint import Checkpoint
    from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
    from tfdp.callbacks.input_watch import InputWatch
    from tfdp.callbacks.learning_rate import LearningRateLogger
    from tfdp.callbacks.nan_guard import NaNGuard
    from tfdp.callbacks.prometheus import Prometheus
    from tfdp.callbacks.replica_check import ReplicaCheck
    from tfdp.callbacks.stragglers import Stragglers
    from tfdp.callbacks.traffic import Traffic
    from tfdp.tools.callbacks.autotune import Autotune
    from tfdp.tools.callbacks.run_record import RunRecord
    from tfdp.tools.callbacks.step_timeline import StepTimeline

# Imported when first used: public name -> defining module.
_PUBLIC = {
    "AdaScale": "tfdp.callbacks.ada_scale",
    "Autotune": "tfdp.tools.callbacks.autotune",
    "Checkpoint": "tfdp.callbacks.checkpoint",
    "GradientNoiseScale": "tfdp.callbacks.gradient_noise_scale",
    "InputWatch": "tfdp.callbacks.input_watch",
    "LearningRateLogger": "tfdp.callbacks.learning_rate",
    "NaNGuard": "tfdp.callbacks.nan_guard",
    "Prometheus": "tfdp.callbacks.prometheus",
    "ReplicaCheck": "tfdp.callbacks.replica_check",
    "RunRecord": "tfdp.tools.callbacks.run_record",
    "StepTimeline": "tfdp.tools.callbacks.step_timeline",
    "Stragglers": "tfdp.callbacks.stragglers",
    "Traffic": "tfdp.callbacks.traffic",
}

__all__ = [
    "AdaScale",
    "Autotune",
    "Checkpoint",
    "GradientNoiseScale",
    "InputWatch",
    "LearningRateLogger",
    "NaNGuard",
    "Prometheus",
    "ReplicaCheck",
    "RunRecord",
    "StepTimeline",
    "Stragglers",
    "Traffic",
]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
