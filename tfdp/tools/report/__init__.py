"""HTML pages with charts, and text tables."""

from tfdp.tools.report.learning_curve import write_learning_curve

__all__ = ["write_learning_curve"]
