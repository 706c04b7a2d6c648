"""All errors and warnings of tfdp.

Each message says what came, what is allowed and what to do next. Errors derive from
`TfdpError`; those that also mean a bad value derive from `ValueError`, so that code
written for Keras catches them.
"""

from __future__ import annotations

__all__ = [
    "CheckpointWarning",
    "ClusterError",
    "CollectiveError",
    "ConfigurationError",
    "DataError",
    "DeviceError",
    "DeviceWarning",
    "JobKeyWarning",
    "LayoutWarning",
    "LocalMeanWarning",
    "LocalStateWarning",
    "MissingDependencyError",
    "NotFiniteError",
    "NotFiniteWarning",
    "ParityError",
    "ReplicaDriftError",
    "ReplicaDriftWarning",
    "RunRecordWarning",
    "SameRowsWarning",
    "ScopeError",
    "SeamError",
    "SlowInputWarning",
    "TPUError",
    "TfdpError",
    "TooLateWarning",
    "UncheckedVersionWarning",
    "WorkerLostError",
]


def __dir__() -> list[str]:
    return [*__all__]


class TfdpError(Exception):
    """Base of all errors that tfdp raises itself."""

    # AutoGraph re-raises an error with its own type only if it has this constructor.
    __init__ = Exception.__init__


class ConfigurationError(TfdpError, ValueError):
    """An argument is out of range, of the wrong kind, or contradicts another."""


class ClusterError(ConfigurationError):
    """The description of the cluster is incomplete, wrong or contradictory."""


class DeviceError(TfdpError, RuntimeError):
    """The requested devices do not exist, or can no longer be set up."""


class TPUError(DeviceError):
    """There is no TPU, or it cannot be used as this process is set up."""


class ScopeError(TfdpError, RuntimeError):
    """An object was made in, or used under, another strategy's scope."""


class SeamError(TfdpError, ImportError):
    """Keras or TensorFlow has other methods than those that tfdp replaces."""


class CollectiveError(TfdpError, RuntimeError):
    """An exchange between replicas failed or is not possible."""


class WorkerLostError(CollectiveError):
    """Another worker has ended, is silent, or missed an exchange."""


class DataError(TfdpError, ValueError):
    """An input file or record is missing, corrupt or does not match its index."""


class MissingDependencyError(TfdpError, ImportError):
    """A package that an optional part of tfdp needs is not installed."""


class ParityError(TfdpError, AssertionError):
    """A model trains differently on N replicas than on one device."""

    def __init__(self, *messages: object, report: object = None):
        super().__init__(*messages)
        self.report = report


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, was not written, or is incomplete."""


class ReplicaDriftError(TfdpError, RuntimeError):
    """State that should be identical differs between replicas."""

    def __init__(self, *messages: object, drifts: object = ()):
        super().__init__(*messages)
        self.drifts = drifts


class NotFiniteError(TfdpError, ArithmeticError):
    """A loss, a gradient or a weight is infinite or not a number."""

    def __init__(self, *messages: object, findings: object = ()):
        super().__init__(*messages)
        self.findings = findings


class DeviceWarning(UserWarning):
    """A device that this machine has is not used."""


class JobKeyWarning(UserWarning):
    """Workers on several machines have no key: any machine can join them."""


class LayoutWarning(UserWarning):
    """A rule of `layout=` meets no weight."""


class LocalMeanWarning(UserWarning):
    """A loss looks like a mean over the local batch that was not scaled."""


class LocalStateWarning(UserWarning):
    """Layer state or a metric does not look like a mean or sum over rows."""


class NotFiniteWarning(UserWarning):
    """A loss or a gradient is infinite or not a number; its step was skipped."""


class ReplicaDriftWarning(UserWarning):
    """State that should be identical differs between replicas; training goes on."""


class RunRecordWarning(UserWarning):
    """The record of a training run has ended early."""


class SameRowsWarning(UserWarning):
    """Every replica trains on the same rows: a dataset was not distributed."""


class SlowInputWarning(UserWarning):
    """Training waits for its input."""


class TooLateWarning(UserWarning):
    """A setting was made after the point where it takes effect."""


class UncheckedVersionWarning(UserWarning):
    """The TensorFlow or Keras version was not tested with tfdp."""
