"""`Communication`: how replicas exchange tensors, as one frozen, checked value."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.compression import CAST_DTYPES, Compression
from tfdp.plan.topology import Topology

MIB = 1 << 20
ENGINES = ("auto", "in_process", "tensorflow", "sockets", "mpi")
WIRE_DTYPES = (None, *CAST_DTYPES)
ACROSS = ("hosts", "replicas")
REPEATED_ROWS = ("auto", "sum")
# By option: what can act, and why the rest cannot. See `refuse_idle_options`.
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
    "checksum": ((False,), "what stays within a host has no checksums"),
}
# Where blocks have checksums, besides.
WITH_CHECKSUMS = {
    "engine": (("auto", "sockets"), "checksum=True is of what sockets carry"),
}
# Where hosts may die (min_hosts), besides.
ON_LIVING_HOSTS = {
    "engine": (
        ("auto", "sockets"),
        "hosts that may die and come back meet over sockets",
    ),
    "wire_dtype": ((None,), "no gradients cross hosts"),
    "compression": ((None,), "no gradients cross hosts"),
    "repeated_rows": (("auto",), "no gradients cross hosts"),
}
ON_SEVERAL_HOSTS = {
    "engine": (
        ("auto", "sockets", "mpi", "tensorflow"),
        "it does not cross hosts",
    ),
    "hierarchy": (("auto",), "the hosts and their devices are the levels"),
    "compression_across": (
        ("hosts",),
        "within a host nothing is gained by sending less, and much is lost",
    ),
}


@dataclasses.dataclass(frozen=True)
class Communication:
    """How replicas exchange tensors. Frozen; nonsense is refused when it is made.

    Args:
      bucket_bytes: the most bytes of gradients that travel as one buffer, at least 1.
        A single tensor larger than that travels alone. Default 25 MiB, as PyTorch
        DDP.
      first_bucket_bytes: the first bucket leaves when it holds as much, so that the
        exchange starts early in backprop; the last, which nothing hides, holds that
        at most, or one tensor. Default 1 MiB, as PyTorch DDP for its first.
      hierarchy: `"auto"` takes the levels that the devices have (one on one host,
        two on many); `"flat"` is one level always; a pair `(hosts,
        devices_per_host)` states them, which also simulates hosts on one machine:
        `(2, 2)` treats four devices as two hosts of two.
      engine: `"auto"` picks by device: `"tensorflow"` (packed collectives, NCCL) on
        physical GPUs, `"in_process"` (replicas hand tensors to each other without
        copies) on logical CPUs and elsewhere within one process. Between hosts:
        `"mpi"` where an MPI launcher started the workers and mpi4py is installed; else
        `"tensorflow"` (gradients cross by TensorFlow's collectives: NCCL, not run on a
        GPU; its ring on CPUs) where all hosts have GPUs and a first sum is right; else
        `"sockets"`. docs/hosts.md says when.
      timeout_seconds: how long a worker waits for the others, when they meet and in
        an exchange, before it fails and names who is missing; above 0. Replicas of
        one process do not wait for other processes and need no deadline.
      silence_seconds: how long another worker may send no heartbeat (one comes every
        half second) before it counts as lost, at least 2. A process that dies is
        noticed at once; this is for one that is stopped and for a broken network.
      wire_dtype: `"bfloat16"` or `"float16"` sends gradients between hosts in 16
        bits, rounded to 8 or 11 significant ones; they are added in their own type,
        except by the engine `"tensorflow"`, which adds what it sends.
        float16 cannot hold 65,520 or more (which become infinite) nor less than
        3e-8 (zero): use it with loss scaling. None sends them as they are. Nothing
        is rounded within a host, nor what is no gradient. Short for
        `compression=tfdp.compression.Cast(...)`.
      compression: one of `tfdp.compression`, by which gradients are sent in fewer
        bytes; None for none. Integers, float64, slices of embeddings, biases and
        scales, and what is no gradient are sent as they are. docs/communication.md
        says which one pays where.
      compression_across: `"hosts"`: replicas of a host add as always, exactly, and
        what a host sends to others is compressed. `"replicas"`: what each replica of
        this process sends is, which shows on one machine what a method does to
        training.
      repeated_rows: rows of an embedding's gradient whose word occurs several times in
        a batch. `"auto"`: they are added before they travel where the optimizer makes
        the same update of their sum: SGD, Lion, `LARS` and `LAMB`, without clipping.
        Others square or clip each occurrence by itself, on one device too, and so all
        rows travel. `"sum"`: they are always added, so that less is sent; the update is
        then that of the same matrix behind a one-hot encoding, as with `shard=`, on any
        number of replicas, one included. docs/exactness.md has what differs.
      min_hosts: with how many hosts a training with `sync=` (docs/faults.md) goes on
        when others die; they may come back. From 1 to the number of hosts; more than
        half of them rules out that two parts of a cut network train on apart. None:
        the loss of a host ends the training.
      checksum: True gives each block that goes over sockets a CRC32C, which ends the
        training where one bit of it was changed on its way, before anything damaged is
        added; docs/hosts.md has the cost. `engine="auto"` is `"sockets"` then. What
        processes of one machine hand over in shared memory has none, and what hosts
        that may die exchange (`min_hosts`) always has one. False: TCP's own checksum
        only, of 16 bits.
      compare_hosts: whether hosts compare what must be the same on all of them: when an
        epoch of `fit` starts, checksums of weights, optimizer state and learning rate;
        when a loop of `fit`, `evaluate` or `predict` ends, checksums of its batches.
        docs/hosts.md has what it finds and what it costs. Where hosts train apart
        (`min_hosts`) nothing is compared.

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
            value = getattr(self, name)
            if not is_whole(value, least=1):
                raise ConfigurationError(
                    f"Communication.{name} must be an integer of at least 1. "
                    f"Received: {value!r}."
                )
        if self.engine not in ENGINES:
            raise ConfigurationError(
                f"Communication.engine must be one of {', '.join(ENGINES)}. "
                f"Received: {self.engine!r}."
            )
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(
                "Communication.wire_dtype must be 'bfloat16', 'float16' or None. "
                f"Received: {self.wire_dtype!r}."
            )
        if self.repeated_rows not in REPEATED_ROWS:
            raise ConfigurationError(
                "Communication.repeated_rows must be 'auto' or 'sum'. Received: "
                f"{self.repeated_rows!r}."
            )
        if self.min_hosts is not None and not is_whole(self.min_hosts, least=1):
            raise ConfigurationError(
                "Communication.min_hosts must be None or an integer of at least 1. "
                f"Received: {self.min_hosts!r}."
            )
        if not isinstance(self.checksum, bool):
            raise ConfigurationError(
                "Communication.checksum must be True or False. Received: "
                f"{self.checksum!r}."
            )
        if not isinstance(self.compare_hosts, bool):
            raise ConfigurationError(
                "Communication.compare_hosts must be True or False. Received: "
                f"{self.compare_hosts!r}."
            )
        self._check_seconds("timeout_seconds", above=0.0)
        self._check_seconds("silence_seconds", above=2.0, or_equal=True)
        self._check_hierarchy()
        self._check_compression()

    def _check_compression(self) -> None:
        method = self.compression
        if method is not None and not isinstance(method, Compression):
            raise ConfigurationError(
                "Communication.compression must be None or a value of "
                "tfdp.compression, such as tfdp.compression.Int8(). Received: "
                f"{method!r}."
            )
        if self.compression_across not in ACROSS:
            raise ConfigurationError(
                "Communication.compression_across must be 'hosts' or 'replicas'. "
                f"Received: {self.compression_across!r}."
            )
        if method is None and self.compression_across != "hosts":
            raise ConfigurationError(
                "Communication(compression_across='replicas') says where gradients are "
                "compressed, and compression=None that they are not. Give a method, "
                "such as compression=tfdp.compression.Int8(), or leave it out."
            )
        if method is not None and self.wire_dtype is not None:
            raise ConfigurationError(
                f"Communication(wire_dtype={self.wire_dtype!r}) is short for "
                f"compression=tfdp.compression.Cast({self.wire_dtype!r}), and "
                f"compression={method!r} is given, too. Leave one of them out."
            )

    @property
    def link_dtype(self) -> str | None:
        """The type in which links between hosts send gradients; None for their own."""
        if self.compression is None or self.compression_across != "hosts":
            return self.wire_dtype
        return self.compression.wire_dtype

    def _check_seconds(self, name: str, above: float, or_equal: bool = False) -> None:
        value = getattr(self, name)
        if (
            not is_number(value)
            or not (above < value < float("inf"))
            and not (or_equal and value == above)
        ):
            raise ConfigurationError(
                f"Communication.{name} must be a finite number "
                f"{'of at least' if or_equal else 'above'} {above:g}. "
                f"Received: {value!r}."
            )
        if not isinstance(value, (int, float)):
            # What workers compare goes over the wire as JSON, which has no NumPy.
            object.__setattr__(self, name, float(value))

    def _check_hierarchy(self) -> None:
        hierarchy = self.hierarchy
        if hierarchy in ("auto", "flat"):
            return
        if not isinstance(hierarchy, (tuple, list)) or len(hierarchy) != 2:
            raise ConfigurationError(
                "Communication.hierarchy must be 'auto', 'flat' or a pair "
                f"(hosts, devices_per_host). Received: {hierarchy!r}."
            )
        hosts, devices_per_host = hierarchy
        Topology(hosts, devices_per_host)
        # A list would make the value unhashable; frozen means that it stays as made.
        object.__setattr__(self, "hierarchy", (hosts, devices_per_host))

    def resolve_topology(self, real: Topology) -> Topology:
        """The topology to reduce over, given the `real` one of the devices.

        Raises:
          ConfigurationError: when a stated hierarchy has another number of replicas.
        """
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


def refuse_idle_options(communication: Communication, hosts: int) -> None:
    """Refuses what asks for something that cannot happen on as many hosts.

    Bounds (bucket sizes, seconds) are kept where nothing comes near them; the other
    options would be ignored. docs/options.md has the table.

    Raises:
      ConfigurationError: naming the first such option, and why.
    """
    if hosts > 1 and communication.compression and communication.link_dtype:
        communication.compression.refuse_selection()
    for name, (allowed, why) in _idle_options(communication, hosts).items():
        raise ConfigurationError(
            f"Communication({name}={getattr(communication, name)!r}) cannot act on "
            f"{'one host' if hosts == 1 else f'{hosts} hosts'}: {why}. Allowed "
            f"here: {', '.join(map(repr, allowed))}."
        )


def without_idle_options(
    communication: Communication,
) -> tuple[Communication, dict[str, str]]:
    """The same without options that act between hosts only.

    Returns:
      The rest, which acts on one host as well; and by option that was left out, why it
      cannot act there.

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
    """By option that cannot act on as many hosts: what can, and why."""
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
    if communication.compression_across == "replicas" or _simulates_hosts(
        communication
    ):
        reasons.pop("compression", None)
    return {
        name: reason
        for name, reason in reasons.items()
        if getattr(communication, name) not in reason[0]
    }


def _simulates_hosts(communication: Communication) -> bool:
    hierarchy = communication.hierarchy
    return isinstance(hierarchy, tuple) and hierarchy[0] > 1


def refuse_compressed_shards(
    communication: Communication, shard: str, hosts: int
) -> None:
    """Refuses shards of gradients that are compressed, but for what a link rounds.

    Raises:
      ConfigurationError: then.
    """
    is_rounded = hosts > 1 and communication.link_dtype is not None
    if communication.compression and not is_rounded and shard != "none":
        raise ConfigurationError(
            f"Communication(compression={communication.compression!r}) sums whole "
            f"gradients, and with shard={shard!r} each replica gets a part of the sum "
            "only. Use shard='none', or wire_dtype='bfloat16', which goes with shards."
        )


def uncompressed(communication: Communication) -> Communication:
    """The same without compression."""
    return dataclasses.replace(
        communication, wire_dtype=None, compression=None, compression_across="hosts"
    )


def checked_communication(given: Communication | None) -> Communication:
    """What the argument `communication` of a strategy asks for: None, the defaults.

    Raises:
      ConfigurationError: when it is something else.
    """
    if given is None:
        return Communication()
    if not isinstance(given, Communication):
        raise ConfigurationError(
            f"communication must be None or a tfdp.Communication. Received: {given!r}."
        )
    return given
