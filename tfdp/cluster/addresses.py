"""Names of hosts that the name service does not know: Slurm's, and those to come."""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from tfdp.cluster.description import Cluster, join_address, split_address
from tfdp.errors import ConfigurationError

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


# TCP ports: one that is free here, one by chance, the one that was asked for.


# Below the ports that systems give to outgoing connections (Linux: 32768 and up), so
# that none of these takes it while worker 0 is still importing TensorFlow.
FIRST_PORT, LAST_PORT = 20000, 29999
LOOPBACK = "127.0.0.1"


def any_port() -> int:
    """A port from 20000 to 29999, by chance: for hosts that cannot be asked."""
    return random.SystemRandom().randint(FIRST_PORT, LAST_PORT)


def free_port(address: str = LOOPBACK) -> int:
    """A port from 20000 to 29999 that nobody listens on here.

    Args:
      address: where it is to be free; "" at all addresses of this machine.

    Raises:
      ConfigurationError: when a hundred of them are taken.
    """
    for _ in range(100):
        port = any_port()
        if _is_free(port, address):
            return port
    raise ConfigurationError(
        f"no free port was found from {FIRST_PORT} to {LAST_PORT}; end what has "
        "them, or name another one"
    )


def checked_port(port: int) -> int:
    """The port, if it is free.

    Raises:
      ConfigurationError: when another program has it, or this one may not.
    """
    if not _is_free(port):
        raise ConfigurationError(
            f"--port {port}: the port is taken, or this user may not use it. Leave "
            "--port out to get a free one."
        )
    return port


def _is_free(port: int, address: str = LOOPBACK) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connection is only waiting out is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
