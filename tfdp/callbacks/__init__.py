"""Keras callbacks."""

from tfdp.callbacks.ada_scale import AdaScale
from tfdp.callbacks.autotune import Autotune
from tfdp.callbacks.checkpoint import Checkpoint
from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.input_watch import InputWatch
from tfdp.callbacks.learning_rate import LearningRateLogger
from tfdp.callbacks.nan_guard import NaNGuard
from tfdp.callbacks.replica_check import ReplicaCheck
from tfdp.callbacks.run_record import RunRecord
from tfdp.callbacks.step_timeline import StepTimeline
from tfdp.callbacks.traffic import Traffic

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
