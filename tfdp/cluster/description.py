"""`Cluster`: the three facts that a worker needs, as one frozen, checked value."""

from __future__ import annotations

import dataclasses
import re

from tfdp.checks import is_whole
from tfdp.cluster.job_key import checked_job_key
from tfdp.errors import ClusterError

__all__ = ["Cluster", "join_address", "split_address"]

# A name, an IPv4 address, or an IPv6 address in brackets.
ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[^\s:\[\]/]+))"
    r":(?P<port>[0-9]{1,5})"
)
# What is kept for each worker must fit into memory: more cannot be meant.
MOST_WORKERS = 1_000_000
# Of a name in the domain name system, and of each of its parts (RFC 1035, 2.3.4).
LONGEST_HOST, LONGEST_LABEL = 253, 63


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes of one training. Frozen; checked when it is made.

    Args:
      workers: number of processes, from 1 to 1,000,000.
      rank: which of them this is, 0 <= rank < workers.
      coordinator: `"host:port"` of worker 0, where all meet by TCP (an IPv6 host in
        brackets). None where there is nobody to meet (one worker) or where only MPI
        can tell (`mpiexec` names no addresses).
      source: who said so: `"argument"`, `"tfdp"`, `"TF_CONFIG"`, `"Slurm"`,
        `"Kubernetes"`, `"Open MPI"`, `"MPICH"` or `"torchrun"`.
      devices_per_worker: devices that the launcher asked for, at least 1; None
        leaves it to the strategy.
      job_key: what all workers of this job know and strangers do not, 16 to 256
        printable characters; None takes the variable TFDP_JOB_KEY, where it is set.
        Not printed, and not compared.
      job: what the launcher calls this job, the same in all its workers and another
        in the next job; "" where it has no name. Not compared.

    Raises:
      ClusterError: when a value is out of its range.

    >>> Cluster(workers=2, rank=1, coordinator="node1:20000").is_coordinator
    False
    >>> Cluster(workers=2, rank=2, coordinator="node1:20000")
    Traceback (most recent call last):
    ...
    tfdp.errors.ClusterError: Cluster.rank must be an integer from 0 to 1 (workers=2). \
Received: 2.
    """

    workers: int
    rank: int
    coordinator: str | None
    source: str = "argument"
    devices_per_worker: int | None = None
    job_key: str | None = dataclasses.field(default=None, repr=False, compare=False)
    job: str = dataclasses.field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_whole(self.workers) or not 1 <= self.workers <= MOST_WORKERS:
            raise ClusterError(
                "Cluster.workers must be an integer of at least 1, and at most "
                f"{MOST_WORKERS}. Received: {_quoted(self.workers)}."
            )
        if not is_whole(self.rank) or not 0 <= self.rank < self.workers:
            raise ClusterError(
                f"Cluster.rank must be an integer from 0 to {self.workers - 1} "
                f"(workers={self.workers}). Received: {_quoted(self.rank)}."
            )
        if self.coordinator is not None and not _is_address(self.coordinator):
            raise ClusterError(
                "Cluster.coordinator must be 'host:port' of worker 0, with a port "
                f"from 1 to 65535, and a host of at most {LONGEST_HOST} characters, "
                f"{LONGEST_LABEL} between dots. Received: {_quoted(self.coordinator)}."
            )
        devices = self.devices_per_worker
        if devices is not None and (not is_whole(devices) or devices < 1):
            raise ClusterError(
                "Cluster.devices_per_worker must be an integer of at least 1, or "
                f"None. Received: {_quoted(devices)}."
            )
        if self.job_key is not None:
            checked_job_key(self.job_key, "Cluster.job_key")
        if not isinstance(self.job, str):
            raise ClusterError(f"Cluster.job must be a str. Received: {self.job!r}.")

    @property
    def is_coordinator(self) -> bool:
        """Whether this is worker 0, the one at `coordinator`."""
        return self.rank == 0


def join_address(host: str, port: int | str) -> str:
    """`"host:port"`, an IPv6 host in brackets.

    >>> join_address("node1", 20000), join_address("::1", 20000)
    ('node1:20000', '[::1]:20000')
    """
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None when it is not such an address.

    >>> split_address("node1:20000"), split_address("[::1]:20000")
    (('node1', 20000), ('::1', 20000))
    >>> split_address("::1:20000")  # where does the port begin?
    """
    match = ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    host = match["ipv6"] or match["host"]
    # Python's resolver raises a UnicodeError for what is longer.
    longest_label = max(map(len, host.split(".")))
    if len(host) > LONGEST_HOST or (
        not match["ipv6"] and longest_label > LONGEST_LABEL
    ):
        return None
    return host, int(match["port"])


def _quoted(value: object) -> str:
    """`repr`, cut where it is long: Python refuses to write thousands of digits."""
    if isinstance(value, int) and abs(value) > 2**64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def _is_address(value: object) -> bool:
    return isinstance(value, str) and split_address(value) is not None
