"""Keras callbacks."""

from tfdp.callbacks.input_watch import InputWatch
from tfdp.callbacks.learning_rate import LearningRateLogger
from tfdp.callbacks.step_timeline import StepTimeline
from tfdp.callbacks.traffic import Traffic

__all__ = ["InputWatch", "LearningRateLogger", "StepTimeline", "Traffic"]
