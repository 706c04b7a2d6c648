"""Every error that tfdp raises on purpose.

Each message says what came, what is allowed and what to do next. All derive from
`TfdpError`; those that also mean a bad value derive from `ValueError` so that code
written for Keras catches them as it always did.
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
    "SlowInputWarning",
    "TPUError",
    "TfdpError",
    "TooLateWarning",
    "UncheckedVersionWarning",
    "WorkerLostError",
]


class TfdpError(Exception):
    """Base of all errors that tfdp raises on purpose."""

    # AutoGraph re-raises an error in its own type only when it has this constructor.
    __init__ = Exception.__init__


class ConfigurationError(TfdpError, ValueError):
    """An argument is out of range, of the wrong kind, or contradicts another."""


class ClusterError(ConfigurationError):
    """What names the cluster of workers is incomplete, wrong or contradictory."""


class DeviceError(TfdpError, RuntimeError):
    """The devices asked for do not exist, or can no longer be set up."""


class TPUError(DeviceError):
    """There is no TPU, or it cannot be used as this process is set up."""


class ScopeError(TfdpError, RuntimeError):
    """Something was made in, or used under, another strategy's scope."""


class CollectiveError(TfdpError, RuntimeError):
    """An exchange between replicas cannot be done as asked."""


class WorkerLostError(CollectiveError):
    """Another worker has ended, is silent, or did not come to an exchange in time."""


class DataError(TfdpError, ValueError):
    """An input file or record is missing, corrupt or not as its index says."""


class MissingDependencyError(TfdpError, ImportError):
    """A package that an optional part of tfdp needs is not installed."""


class ParityError(TfdpError, AssertionError):
    """A model trains differently on N replicas than on one device."""

    def __init__(self, *messages: object, report: object = None):
        super().__init__(*messages)
        self.report = report


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, was not written, or does not tell all."""


class ReplicaDriftError(TfdpError, RuntimeError):
    """Replicas have other values of what they keep alike."""

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
    """Workers on several machines have no key: strangers can join them."""


class LocalMeanWarning(UserWarning):
    """A loss looks like a mean over the local batch that nobody scaled."""


class LocalStateWarning(UserWarning):
    """What a layer stores, or a metric counts, looks like no mean or sum over rows."""


class NotFiniteWarning(UserWarning):
    """A loss or a gradient is infinite or not a number, and its step was left out."""


class ReplicaDriftWarning(UserWarning):
    """Replicas have other values of what they keep alike, and training goes on."""


class RunRecordWarning(UserWarning):
    """What a training does is recorded no further."""


class SameRowsWarning(UserWarning):
    """Every replica trains on the same rows: a dataset was not distributed."""


class SlowInputWarning(UserWarning):
    """Training waits for its input."""


class TooLateWarning(UserWarning):
    """A setting came when what it sets had started already."""


class UncheckedVersionWarning(UserWarning):
    """TensorFlow or Keras is of a version that tfdp was not checked with."""
