"""Host names that the name service cannot resolve, and TCP ports."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping

from tfdp.cluster.description import Cluster, join_address, split_address
from tfdp.errors import ConfigurationError

# Outside Kubernetes a name that stays unknown this long will not appear; a name service
# that is down comes back within seconds.
UNKNOWN_NAME_SECONDS = 30.0
SCONTROL_SECONDS = 20.0


def unknown_name_seconds(environment: Mapping[str, str] | None = None) -> float:
    """How long worker 0's name may stay unknown: in a pod forever, as pods may wait."""
    environment = os.environ if environment is None else environment
    in_a_pod = bool(environment.get("KUBERNETES_SERVICE_HOST"))
    return math.inf if in_a_pod else UNKNOWN_NAME_SECONDS


def with_slurm_address(cluster: Cluster) -> Cluster:
    """The cluster, with Slurm's address for a worker 0 whose name does not resolve."""
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
    """NodeAddr of a node whose name does not resolve; None: it does, or is not set.

    Nodes need names in slurm.conf only: `NodeName=gpu[1-4] NodeAddr=10.0.0.[1-4]`.
    """
    if _resolves(host) or shutil.which("scontrol") is None:
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
    return match[1] if split_address(join_address(match[1], 1)) is not None else None


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


# Below the ephemeral ports (Linux: 32768 and up), so that no outgoing connection takes
# the port while worker 0 is still importing TensorFlow.
FIRST_PORT, LAST_PORT = 20000, 29999
LOOPBACK = "127.0.0.1"


def any_port() -> int:
    """A random port from 20000 to 29999: for hosts that cannot be checked."""
    return random.SystemRandom().randint(FIRST_PORT, LAST_PORT)


def free_port(address: str = LOOPBACK) -> int:
    """A port from 20000 to 29999 without a listener at `address` ("": any address)."""
    return _first_port(lambda port: _is_free(port, address))


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port, which no other process can bind before the block ends."""
    # Without SO_REUSEADDR: with it, others could bind the port as well.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        yield _first_port(lambda port: _binds(holder, "", port))


def _first_port(is_free: Callable[[int], bool]) -> int:
    for _ in range(100):
        port = any_port()
        if is_free(port):
            return port
    raise ConfigurationError(
        f"no free port was found from {FIRST_PORT} to {LAST_PORT}; name another one"
    )


def checked_port(port: int) -> int:
    """`port`, or a `ConfigurationError` if it is taken or not allowed."""
    if not _is_free(port):
        raise ConfigurationError(
            f"--port {port}: the port is taken, or this user may not use it. Leave "
            "--port out to get a free one."
        )
    return port


def _is_free(port: int, address: str = LOOPBACK) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _binds(probe, address, port)


def _binds(probe: socket.socket, address: str, port: int) -> bool:
    try:
        probe.bind((address, port))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise
    return True
