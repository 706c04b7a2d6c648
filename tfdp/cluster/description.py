"""`Cluster`, a frozen, checked value, and `Claim`, one launcher's variables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tfdp.checks import is_whole
from tfdp.cluster.job_key import checked_job_key
from tfdp.errors import ClusterError
from tfdp.files.checked_json import LARGEST_COUNT

# A name, an IPv4 address, or an IPv6 address in brackets.
ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[^\s:\[\]/]+))"
    r":(?P<port>[0-9]{1,5})"
)
MOST_WORKERS = 1_000_000  # some memory is used per worker; more is surely a mistake
# Limits of a domain name and of its labels (RFC 1035, 2.3.4).
LONGEST_HOST, LONGEST_LABEL = 253, 63


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes of one training. Frozen; checked on creation.

    Args:
      workers: number of processes, from 1 to 1,000,000.
      rank: this process, 0 <= rank < workers.
      coordinator: `"host:port"` of worker 0, where all connect by TCP (an IPv6 host in
        brackets). None with one worker, or if only MPI connects them.
      source: origin of the values: `"argument"`, `"tfdp"`, `"TF_CONFIG"`, `"Slurm"`,
        `"Kubernetes"`, `"Open MPI"`, `"MPICH"` or `"torchrun"`.
      devices_per_worker: number of devices given by the launcher, at least 1; None
        leaves it to the strategy.
      job_key: secret shared by all workers of this job, 16 to 256 printable
        characters; None reads the variable TFDP_JOB_KEY. Not printed, not compared.
      job: the launcher's id of this job, the same in all its workers and different in
        the next job; "" if it has none. Not compared.

    Raises:
      ClusterError: a value is out of range.

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
                f"{MOST_WORKERS}. Received: {quoted(self.workers)}."
            )
        if not is_whole(self.rank) or not 0 <= self.rank < self.workers:
            raise ClusterError(
                f"Cluster.rank must be an integer from 0 to {self.workers - 1} "
                f"(workers={self.workers}). Received: {quoted(self.rank)}."
            )
        address = self.coordinator
        is_address = isinstance(address, str) and split_address(address) is not None
        if address is not None and not is_address:
            raise ClusterError(
                "Cluster.coordinator must be 'host:port' of worker 0, with a port "
                f"from 1 to 65535, and a host of at most {LONGEST_HOST} characters, "
                f"{LONGEST_LABEL} between dots. Received: {quoted(self.coordinator)}."
            )
        devices = self.devices_per_worker
        if devices is not None and (not is_whole(devices) or devices < 1):
            raise ClusterError(
                "Cluster.devices_per_worker must be an integer of at least 1, or "
                f"None. Received: {quoted(devices)}."
            )
        if self.job_key is not None:
            checked_job_key(self.job_key, "Cluster.job_key")
        if not isinstance(self.job, str):
            raise ClusterError(f"Cluster.job must be a str. Received: {self.job!r}.")


def join_address(host: str, port: int | str) -> str:
    """`"host:port"`, an IPv6 host in brackets.

    >>> join_address("node1", 20000), join_address("::1", 20000)
    ('node1:20000', '[::1]:20000')
    """
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None if it is not such an address.

    >>> split_address("node1:20000"), split_address("[::1]:20000")
    (('node1', 20000), ('::1', 20000))
    """
    match = ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    host = match["ipv6"] or match["host"]
    # Python's resolver raises a UnicodeError for longer ones.
    longest_label = max(map(len, host.split(".")))
    if len(host) > LONGEST_HOST or (
        not match["ipv6"] and longest_label > LONGEST_LABEL
    ):
        return None
    return host, int(match["port"])


def quoted(value: object) -> str:
    """`repr`, cut if long: Python refuses to print thousands of digits."""
    if isinstance(value, int) and abs(value) > 2**64:
        return f"a number of {value.bit_length()} bits"
    return shortened(repr(value))


QUOTED_CHARACTERS = 300  # the longest quote of a variable in a message


@dataclasses.dataclass(frozen=True)
class Claim:
    """One launcher's statements about a `Cluster`; None where it states nothing."""

    source: str
    found: Mapping[str, str]  # the variables that were read, for messages
    workers: int | None = None
    rank: int | None = None
    coordinator: str | None = None
    missing: Sequence[str] = ()  # what a complete claim also needs, for messages
    one_task_per_node: bool = False  # a Slurm step, possibly an MPI launcher's daemons
    needs_coordinator: bool = True  # not for MPI, which connects its processes itself
    job: str = ""

    @property
    def variables(self) -> str:
        """`NAME=value, NAME=value`, for messages."""
        pairs = self.found.items()
        return ", ".join(f"{name}={shortened(value)}" for name, value in pairs)

    def contradicts(self, other: Claim) -> bool:
        """Whether both state a rank or a number of workers, and these differ."""
        pairs = ((self.rank, other.rank), (self.workers, other.workers))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def present(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """The variables that are set and not empty, in the order of `names`."""
    return {name: environment[name] for name in names if environment.get(name)}


def integer(found: Mapping[str, str], name: str, least: int) -> int | None:
    """The variable as an integer of at least `least`; None if it is not set."""
    text = found.get(name)
    if text is None:
        return None
    digits = text.strip()
    # The length first: Python refuses to parse thousands of digits.
    is_number = digits.isdecimal() and len(digits) <= len(str(LARGEST_COUNT))
    if not is_number or not least <= int(digits) <= LARGEST_COUNT:
        raise ClusterError(
            f"{name} must be an integer of at least {least} (and at most "
            f"{LARGEST_COUNT}). Received: {shortened(text)!r}."
        )
    return int(digits)


def shortened(text: str) -> str:
    """`text`, or its start and length if it is too long for a message."""
    if len(text) <= QUOTED_CHARACTERS:
        return text
    return f"{text[:QUOTED_CHARACTERS]}... ({len(text)} characters)"
