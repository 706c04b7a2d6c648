"""`Cluster`: the three facts that a worker needs, as one frozen, checked value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tfdp.checks import is_whole
from tfdp.cluster.job_key import checked_job_key
from tfdp.errors import ClusterError

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


# A claim: what one launcher's variables say about the cluster.


# Ids of jobs are larger than any number of workers.
LARGEST = 2**63 - 1
# A message quotes as much of a variable.
QUOTED_CHARACTERS = 300


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one source says; None where it is silent.

    Args:
      source: who says it, as in `Cluster.source`.
      found: the variables that were read, for messages.
      workers, rank, coordinator: as in `Cluster`.
      missing: what a complete claim would hold besides, for messages.
      one_task_per_node: True for a Slurm step that may be an MPI launcher's daemons.
      needs_coordinator: False for MPI, which brings its processes together itself.
      job: as in `Cluster`.
    """

    source: str
    found: Mapping[str, str]
    workers: int | None = None
    rank: int | None = None
    coordinator: str | None = None
    missing: Sequence[str] = ()
    one_task_per_node: bool = False
    needs_coordinator: bool = True
    job: str = ""

    @property
    def variables(self) -> str:
        """`NAME=value, NAME=value`, for messages."""
        pairs = self.found.items()
        return ", ".join(f"{name}={shortened(value)}" for name, value in pairs)

    def contradicts(self, other: Claim) -> bool:
        """Whether both state a rank or a number of workers, and not the same one."""
        pairs = ((self.rank, other.rank), (self.workers, other.workers))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def present(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Those of the variables that are set to something, in the order asked for."""
    return {name: environment[name] for name in names if environment.get(name)}


def integer(found: Mapping[str, str], name: str, least: int) -> int | None:
    """The variable as an integer of at least `least`; None when it is not set.

    Raises:
      ClusterError: when it is none, or larger than 63 bits hold.
    """
    text = found.get(name)
    if text is None:
        return None
    digits = text.strip()
    # The length first: Python refuses to read a number of thousands of digits.
    is_number = digits.isdecimal() and len(digits) <= len(str(LARGEST))
    if not is_number or not least <= int(digits) <= LARGEST:
        raise ClusterError(
            f"{name} must be an integer of at least {least} (and at most {LARGEST}). "
            f"Received: {shortened(text)!r}."
        )
    return int(digits)


def shortened(text: str) -> str:
    """`text`, or its start and its length where it is too long for a message."""
    if len(text) <= QUOTED_CHARACTERS:
        return text
    return f"{text[:QUOTED_CHARACTERS]}... ({len(text)} characters)"
