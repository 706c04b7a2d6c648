"""Keras callbacks."""

from tfdp.callbacks.ada_scale import AdaScale
from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.input_watch import InputWatch
from tfdp.callbacks.learning_rate import LearningRateLogger
from tfdp.callbacks.step_timeline import StepTimeline
from tfdp.callbacks.traffic import Traffic

__all__ = [
    "AdaScale",
    "GradientNoiseScale",
    "InputWatch",
    "LearningRateLogger",
    "StepTimeline",
    "Traffic",
]
