"""Keras callbacks."""

from tfdp.callbacks.learning_rate import LearningRateLogger

__all__ = ["LearningRateLogger"]
