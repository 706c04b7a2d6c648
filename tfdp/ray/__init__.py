"""Ray Train: reports the metrics and the model of `fit`."""

from tfdp.ray.report import ReportCallback

__all__ = ["ReportCallback"]


def __dir__() -> list[str]:
    return [*__all__]
