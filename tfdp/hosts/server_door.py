"""Keeps strangers from TensorFlow's server, which lets everybody in."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Sequence

from absl import logging

from tfdp.hosts.host_link import HostLink
from tfdp.hosts.messages import read_as
from tfdp.hosts.packet_filter import (
    admit_all,
    admit_only,
    listeners_on,
    source_address,
)

__all__ = ["keep_to_workers"]

CONNECT_SECONDS = 5.0
SETTINGS = "addresses of the workers"
# An address for each worker, or why a door cannot be closed.
MOST_BYTES = 64 << 20


def keep_to_workers(link: HostLink, ports: Sequence[int]) -> bool:
    """Lets nobody but the workers' machines connect to the server of this process.

    Each worker tells the others from which address it connects to them, and tries it
    then. Where one does not get through (an address is changed on the way) the doors
    are opened again, and where the kernel has no filters they stay open; a warning
    says so.

    Args:
      link: between the workers; all call alike.
      ports: of the workers' servers, by rank. All listen.

    Returns:
      Whether all doors are closed to others.

    Cost: four small gathers, and one connection to each other worker.
    """
    sources = [
        _source(host, port) for host, port in zip(link.hosts, ports, strict=True)
    ]
    told = link.gather(json.dumps(sources).encode(), SETTINGS, most_bytes=MOST_BYTES)
    problem = _close(ports[link.rank], _senders(link, told))
    link.gather(b"", SETTINGS, most_bytes=0)  # every filter is set
    others = [rank for rank in range(link.workers) if rank != link.rank]
    if not problem:
        unreached = [r for r in others if not _reaches(link.hosts[r], ports[r])]
        if unreached:
            problem = f"worker {link.rank} did not reach workers {unreached}"
    blobs = link.gather(problem.encode(), SETTINGS, most_bytes=MOST_BYTES)
    problems = [blob.decode(errors="replace") for blob in blobs]
    first = next(filter(None, problems), "")
    if first:
        with contextlib.suppress(OSError), listeners_on(ports[link.rank]) as listeners:
            for listener in listeners:
                admit_all(listener)
        logging.warning(
            "tfdp: Everybody who reaches port %d of this machine can read and write "
            "files by TensorFlow's server (%s). Let only the workers reach it, by a "
            "firewall; see docs/security.md.",
            ports[link.rank],
            first,
        )
    link.gather(
        b"", SETTINGS, most_bytes=0
    )  # every filter is gone, where they had to go
    return not first


def _source(host: str, port: int) -> str:
    try:
        return source_address(host, port)
    except OSError:
        return ""


def _senders(link: HostLink, told: Sequence[bytes]) -> list[str]:
    """From where workers may come: as they say, and where this one reaches them."""
    senders = {"127.0.0.1", "::1"}
    for rank, (host, blob) in enumerate(zip(link.hosts, told, strict=True)):
        source = read_as(
            lambda blob: str(json.loads(bytes(blob))[link.rank]), blob, rank, "list"
        )
        senders |= {host, source}
    return sorted(senders - {""})


def _close(port: int, senders: Iterable[str]) -> str:
    """Why the port could not be closed to others; "" when it was."""
    try:
        with listeners_on(port) as listeners:
            for listener in listeners:
                admit_only(listener, senders)
            return "" if listeners else f"nothing listens on port {port}"
    except (OSError, ValueError) as error:
        return f"no filter: {error}"


def _reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
