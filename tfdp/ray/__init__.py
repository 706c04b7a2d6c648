"""Ray Train: what a `fit` in one of its workers reports to it."""

from tfdp.ray.report import ReportCallback

__all__ = ["ReportCallback"]
