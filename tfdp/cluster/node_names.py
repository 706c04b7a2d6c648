"""Names of hosts that the name service does not know: Slurm's, and those to come."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from tfdp.cluster.description import Cluster, join_address, split_address

__all__ = ["slurm_address", "unknown_name_seconds", "with_slurm_address"]

# Where names do not appear by and by, one that is unknown for so long stays it. A
# name service that is down comes back within some seconds, or nothing works.
UNKNOWN_NAME_SECONDS = 30.0
SCONTROL_SECONDS = 20.0


def unknown_name_seconds(environment: Mapping[str, str] | None = None) -> float:
    """How long worker 0's name may be unknown before that is an error.

    In a pod without an end: worker 0's pod has a name as soon as it has a place, for
    which it may wait for minutes.
    """
    environment = os.environ if environment is None else environment
    in_a_pod = bool(environment.get("KUBERNETES_SERVICE_HOST"))
    return math.inf if in_a_pod else UNKNOWN_NAME_SECONDS


def with_slurm_address(cluster: Cluster) -> Cluster:
    """The cluster, with Slurm's address for a worker 0 whose name nobody knows."""
    found = split_address(cluster.coordinator or "")
    if cluster.workers == 1 or found is None:
        return cluster
    host, port = found
    address = slurm_address(host)
    if address is None:
        return cluster
    return dataclasses.replace(cluster, coordinator=join_address(address, port))


@functools.cache
def slurm_address(host: str) -> str | None:
    """NodeAddr of a node whose name cannot be looked up; None: it can, or is not set.

    Slurm's nodes need no names outside of slurm.conf: `NodeName=gpu[1-4]
    NodeAddr=10.0.0.[1-4]`.
    """
    if _is_known(host) or shutil.which("scontrol") is None:
        return None
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SCONTROL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", done.stdout)
    if done.returncode or match is None or match[1] == host:
        return None
    address = join_address(match[1], 1)
    return match[1] if split_address(address) is not None else None


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False
