"""Pictures of a training run."""

from tfdp.report.learning_curve import write_learning_curve

__all__ = ["write_learning_curve"]
