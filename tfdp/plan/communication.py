"""`Communication`: how replicas exchange tensors, as one frozen, checked value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.compression import CAST_DTYPES, Compression
from tfdp.plan.topology import Topology

MIB = 1 << 20
ACROSS = ("hosts", "replicas")
# By option, its values.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "engine": ("auto", "in_process", "tensorflow", "sockets", "mpi"),
    "wire_dtype": (None, *CAST_DTYPES),
    "compression_across": ACROSS,
    "repeated_rows": ("auto", "sum"),
}
# By option: the values that can act, and why others cannot. See `check_idle_options`.
ON_ONE_HOST = {
    "engine": (
        ("auto", "in_process", "tensorflow"),
        "it carries sums between processes, and there is one",
    ),
    "wire_dtype": ((None,), "gradients are rounded between hosts only"),
    "compression": (
        (None,),
        "gradients are compressed between hosts only, unless "
        "compression_across='replicas'",
    ),
    "min_hosts": ((None,), "there are no others that could die"),
    "checksum": ((False,), "traffic within a host has no checksums"),
}
# In addition, with checksum=True.
WITH_CHECKSUMS = {
    "engine": (("auto", "sockets"), "checksum=True applies to sockets only")
}
# In addition, where hosts may die (min_hosts).
ON_LIVING_HOSTS = {
    "engine": (("auto", "sockets"), "hosts that may die and return use sockets"),
    "wire_dtype": ((None,), "no gradients cross hosts"),
    "compression": ((None,), "no gradients cross hosts"),
    "repeated_rows": (("auto",), "no gradients cross hosts"),
}
ON_SEVERAL_HOSTS = {
    "engine": (("auto", "sockets", "mpi", "tensorflow"), "it does not cross hosts"),
    "hierarchy": (("auto",), "the hosts and their devices are the levels"),
    "compression_across": (
        ("hosts",),
        "within a host sending less gains nothing and loses much",
    ),
}


@dataclasses.dataclass(frozen=True)
class Communication:
    """How replicas exchange tensors. Frozen; wrong values raise when it is made.

    Args:
      bucket_bytes: the most bytes of gradients that travel as one buffer, at least 1.
        A larger tensor travels alone. Default 25 MiB, as PyTorch DDP.
      first_bucket_bytes: the first bucket leaves when it holds this many, so that the
        exchange starts early in backprop; the last, which nothing hides, holds at most
        this many, or one tensor. Default 1 MiB, as PyTorch DDP for its first.
      hierarchy: `"auto"` uses the levels of the devices (one on one host, two on many);
        `"flat"` is always one level; a pair `(hosts, devices_per_host)` states them,
        which also simulates hosts: `(2, 2)` treats four devices as two hosts of two.
      engine: `"auto"` chooses by device: `"tensorflow"` (packed collectives, NCCL) on
        physical GPUs, `"in_process"` (replicas hand over tensors without copies) on
        logical CPUs and elsewhere within one process. Between hosts: `"mpi"` where an
        MPI launcher started the workers and mpi4py is installed; else `"tensorflow"`
        (gradients cross by TensorFlow's collectives: NCCL, not run on a GPU; its ring
        on CPUs) where all hosts have GPUs and a first sum is right; else `"sockets"`.
      timeout_seconds: how long a worker waits for the others, at startup and in an
        exchange, before it fails and names the missing ones; above 0.
      silence_seconds: how long another worker may send no heartbeat (two per second)
        before it counts as lost, at least 2. The death of a process is detected at
        once; this is for suspended ones and broken networks.
      wire_dtype: `"bfloat16"` or `"float16"` sends gradients between hosts in 16 bits,
        rounded to 8 or 11 significant ones; they are added in their own type, except by
        the engine `"tensorflow"`, which adds what it sends. float16 cannot hold 65,520
        or more (which become infinite) nor less than 3e-8 (zero): use it with loss
        scaling. Nothing else is rounded, nor anything within a host. None: unrounded.
        Short for `compression=tfdp.compression.Cast(...)`.
      compression: one of `tfdp.compression`, which sends gradients in fewer bytes; None
        for none. Integers, float64, slices of embeddings, biases, scales, and other
        values are sent uncompressed. docs/communication.md compares the methods.
      compression_across: `"hosts"`: replicas of a host add exactly, as always, and
        traffic between hosts is compressed. `"replicas"`: traffic between replicas of
        this process is, to see on one machine how a method affects training.
      repeated_rows: rows of an embedding's gradient for words that repeat in a batch.
        `"auto"`: they are added before they travel where the optimizer makes the same
        update of their sum: SGD, Lion, `LARS` and `LAMB`, without clipping. Other
        optimizers square or clip each occurrence, on one device too, and so all rows
        travel. `"sum"`: always add them, to send less; the update is then that of the
        same matrix behind a one-hot encoding, as with `shard=`, on any number of
        replicas, one included. docs/exceptions.md has the differences.
      min_hosts: the number of hosts with which a training with `sync=` continues when
        others die; they may return (docs/local-sgd.md). From 1 to the number of hosts;
        more than half rules out that both parts of a partitioned network continue.
        None: the loss of a host ends the training.
      checksum: True adds a CRC32C to each block sent over sockets, which ends the
        training before a corrupted block is added; `engine="auto"` is then `"sockets"`.
        Shared memory has none; exchanges of hosts that may die (`min_hosts`) always
        have one. False: only TCP's checksum, of 16 bits. docs/how-hosts-work.md
        has the cost.
      compare_hosts: compare what must be the same on all hosts: when an epoch of `fit`
        starts, checksums of weights, optimizer state and learning rate; when a loop of
        `fit`, `evaluate` or `predict` ends, checksums of its batches. For the cost see
        docs/how-hosts-work.md. Not done where hosts train independently (`min_hosts`).

    Raises:
      ConfigurationError: when a value is out of its range.

    >>> Communication(bucket_bytes=4 * MIB).bucket_bytes
    4194304
    >>> Communication(bucket_bytes=0)
    Traceback (most recent call last):
    ...
    tfdp.errors.ConfigurationError: Communication.bucket_bytes must be an integer \
of at least 1. Received: 0.
    """

    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = 1 * MIB
    hierarchy: Literal["auto", "flat"] | tuple[int, int] = "auto"
    engine: Literal["auto", "in_process", "tensorflow", "sockets", "mpi"] = "auto"
    timeout_seconds: float = 600.0
    silence_seconds: float = 15.0
    wire_dtype: Literal["bfloat16", "float16"] | None = None
    compression: Compression | None = None
    compression_across: Literal["hosts", "replicas"] = "hosts"
    repeated_rows: Literal["auto", "sum"] = "auto"
    min_hosts: int | None = None
    checksum: bool = False
    compare_hosts: bool = True

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes"):
            fits = is_whole(getattr(self, name), least=1)
            self._require(fits, name, "an integer of at least 1")
        for name, allowed in CHOICES.items():
            fits = getattr(self, name) in allowed
            self._require(fits, name, " or ".join(map(repr, allowed)))
        for name in ("checksum", "compare_hosts"):
            fits = isinstance(getattr(self, name), bool)
            self._require(fits, name, "True or False")
        fits = self.min_hosts is None or is_whole(self.min_hosts, least=1)
        self._require(fits, "min_hosts", "None or an integer of at least 1")
        self._check_seconds("timeout_seconds", 0.0, "above 0")
        self._check_seconds("silence_seconds", 2.0, "of at least 2")
        self._check_hierarchy()
        self._check_compression()

    def _require(self, fits: bool, name: str, allowed: str) -> None:
        if not fits:
            raise ConfigurationError(
                f"Communication.{name} must be {allowed}. Received: "
                f"{getattr(self, name)!r}."
            )

    def _check_compression(self) -> None:
        method = self.compression
        self._require(
            method is None or isinstance(method, Compression),
            "compression",
            "None or a value of tfdp.compression, such as tfdp.compression.Int8()",
        )
        if method is None and self.compression_across != "hosts":
            raise ConfigurationError(
                "Communication(compression_across='replicas') needs a compression, and "
                "compression=None is none. Give a method, such as "
                "compression=tfdp.compression.Int8(), or leave it out."
            )
        if method is not None and self.wire_dtype is not None:
            raise ConfigurationError(
                f"Communication(wire_dtype={self.wire_dtype!r}) is short for "
                f"compression=tfdp.compression.Cast({self.wire_dtype!r}), and "
                f"compression={method!r} is given, too. Leave one of them out."
            )

    @property
    def link_dtype(self) -> str | None:
        """The type in which links between hosts send gradients; None: their own."""
        if self.compression is None or self.compression_across != "hosts":
            return self.wire_dtype
        return self.compression.wire_dtype

    def _check_seconds(self, name: str, least: float, allowed: str) -> None:
        value = getattr(self, name)
        fits = is_number(value) and least <= value < float("inf") and value > 0
        self._require(fits, name, f"a finite number {allowed}")
        if not isinstance(value, (int, float)):
            # Workers compare these values as JSON, which has no NumPy numbers.
            object.__setattr__(self, name, float(value))

    def _check_hierarchy(self) -> None:
        hierarchy: Any = self.hierarchy
        if hierarchy in ("auto", "flat"):
            return
        fits = isinstance(hierarchy, (tuple, list)) and len(hierarchy) == 2
        allowed = "'auto', 'flat' or a pair (hosts, devices_per_host)"
        self._require(fits, "hierarchy", allowed)
        hosts, devices_per_host = hierarchy
        Topology(hosts, devices_per_host)
        # Hashable and immutable.
        object.__setattr__(self, "hierarchy", (hosts, devices_per_host))

    def resolve_topology(self, real: Topology) -> Topology:
        """The topology to reduce over, given the `real` one of the devices."""
        if self.hierarchy == "auto":
            return real
        if self.hierarchy == "flat":
            return Topology(1, real.num_replicas)
        stated = Topology(*self.hierarchy)
        if stated.num_replicas != real.num_replicas:
            raise ConfigurationError(
                f"Communication.hierarchy={self.hierarchy} makes "
                f"{stated.num_replicas} replicas, but there are {real.num_replicas} "
                f"({real}). Choose hosts x devices_per_host = {real.num_replicas}."
            )
        return stated


def check_idle_options(communication: Communication, hosts: int) -> None:
    """Raises `ConfigurationError` for the first option without effect on `hosts` hosts.

    Bounds (bucket sizes, seconds) are exempt. docs/options.md has the table.
    """
    if hosts > 1 and communication.compression and communication.link_dtype:
        communication.compression.check_no_selection()
    for name, (allowed, why) in _idle_options(communication, hosts).items():
        raise ConfigurationError(
            f"Communication({name}={getattr(communication, name)!r}) cannot act on "
            f"{'one host' if hosts == 1 else f'{hosts} hosts'}: {why}. Allowed "
            f"here: {', '.join(map(repr, allowed))}."
        )


def without_idle_options(
    communication: Communication,
) -> tuple[Communication, dict[str, str]]:
    """The values without options that act between hosts only, and those with reasons.

    >>> rest, idle = without_idle_options(Communication(wire_dtype="bfloat16"))
    >>> rest == Communication(), idle
    (True, {'wire_dtype': 'gradients are rounded between hosts only'})
    """
    idle = {name: why for name, (_, why) in _idle_options(communication, 1).items()}
    defaults = Communication()
    rest = {name: getattr(defaults, name) for name in idle}
    return dataclasses.replace(communication, **rest), idle


def _idle_options(
    communication: Communication, hosts: int
) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Options without effect on `hosts` hosts: the values with effect, and why."""
    reasons: dict[str, tuple[tuple[Any, ...], str]] = dict(
        ON_ONE_HOST if hosts == 1 else ON_SEVERAL_HOSTS
    )
    if hosts > 1 and communication.checksum:
        reasons |= WITH_CHECKSUMS
    if hosts > 1 and communication.min_hosts is not None:
        reasons |= ON_LIVING_HOSTS
        reasons["min_hosts"] = (
            tuple(range(1, hosts + 1)),
            "there are never more than that",
        )
    hierarchy = communication.hierarchy
    simulates_hosts = isinstance(hierarchy, tuple) and hierarchy[0] > 1
    if communication.compression_across == "replicas" or simulates_hosts:
        reasons.pop("compression", None)
    return {
        name: reason
        for name, reason in reasons.items()
        if getattr(communication, name) not in reason[0]
    }


def check_compressed_shards(
    communication: Communication, shard: str, hosts: int
) -> None:
    """Raises `ConfigurationError` for compressed, not just rounded shards."""
    is_rounded = hosts > 1 and communication.link_dtype is not None
    if communication.compression and not is_rounded and shard != "none":
        raise ConfigurationError(
            f"Communication(compression={communication.compression!r}) sums whole "
            f"gradients, and with shard={shard!r} each replica gets a part of the sum "
            "only. Use shard='none', or wire_dtype='bfloat16', which goes with shards."
        )


def uncompressed(communication: Communication) -> Communication:
    """The same values without compression."""
    return dataclasses.replace(
        communication, wire_dtype=None, compression=None, compression_across="hosts"
    )


def checked_communication(given: Communication | None) -> Communication:
    """The argument `communication` of a strategy; None: the defaults."""
    if given is None:
        return Communication()
    if not isinstance(given, Communication):
        raise ConfigurationError(
            f"communication must be None or a tfdp.Communication. Received: {given!r}."
        )
    return given


class IdleOptions:
    """Options of `auto_strategy` without effect `where` it runs, with the reasons.

    >>> idle = IdleOptions("one host", {"min_hosts": "there are no others"})
    >>> idle.lines
    ('min_hosts has no effect on one host: there are no others',)
    """

    def __init__(self, where: str, reasons: Mapping[str, str]):
        self._where = where
        self._reasons = dict(reasons)

    def add(self, option: str, why: str) -> None:
        self._reasons[option] = why

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{option} has no effect on {self._where}: {why}"
            for option, why in self._reasons.items()
        )
