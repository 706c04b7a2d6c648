"""Tells a helper process, such as a data loader's worker, from a worker of the cluster.

A helper that `multiprocessing` starts inherits the environment of its worker, and often
imports the script anew, which then makes a strategy there as well.
"""

from __future__ import annotations

import multiprocessing
import os

from tfdp.cluster.description import Cluster

_JOINED = "TFDP_JOINED"  # which worker this process is, for its children


def is_started_by_multiprocessing() -> bool:
    """Whether another Python process started this one to run a function."""
    return multiprocessing.parent_process() is not None or _imports_script()


def _imports_script() -> bool:
    """Whether a new process still imports the script, before it runs its function.

    `multiprocessing` sets this attribute meanwhile, to refuse children of the process.
    So do its server of forks and joblib's processes, which have no parent process.
    """
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def is_helper(cluster: Cluster) -> bool:
    """Whether a process that started this one is the worker that `cluster` names.

    A function may set another cluster's variables: its process is then a worker.
    """
    is_same = os.environ.get(_JOINED) == _identity(cluster)
    return _imports_script() or (is_same and is_started_by_multiprocessing())


def note_joined(cluster: Cluster) -> None:
    """Lets the processes that this one will start know which worker it is."""
    os.environ[_JOINED] = _identity(cluster)


def _identity(cluster: Cluster) -> str:
    return f"{cluster.rank} of {cluster.workers} at {cluster.coordinator}"
