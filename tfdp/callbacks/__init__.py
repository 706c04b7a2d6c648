"""Keras callbacks."""

from tfdp.callbacks.input_watch import InputWatch
from tfdp.callbacks.learning_rate import LearningRateLogger

__all__ = ["InputWatch", "LearningRateLogger"]
