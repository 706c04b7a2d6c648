"""`Communication`: how replicas exchange tensors, as one frozen, checked value."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tfdp.checks import what_it_is
from tfdp.errors import ConfigurationError
from tfdp.plan.compression import Compression
from tfdp.plan.options import Given, fields_of, refuse_options
from tfdp.plan.topology import Topology

MIB = 1 << 20


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
        refuse_options(Given(values=fields_of(self)))
        for name in ("timeout_seconds", "silence_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                # Workers compare these values as JSON, which has no NumPy numbers.
                object.__setattr__(self, name, float(value))
        if not isinstance(self.hierarchy, str):
            hosts, devices_per_host = self.hierarchy
            Topology(hosts, devices_per_host)
            # Hashable and immutable.
            object.__setattr__(self, "hierarchy", (hosts, devices_per_host))

    @property
    def link_dtype(self) -> str | None:
        """The type in which links between hosts send gradients; None: their own."""
        if self.compression is None or self.compression_across != "hosts":
            return self.wire_dtype
        return self.compression.wire_dtype

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


def outside_replicas(communication: Communication, hosts: int) -> Communication:
    """The values for reductions outside replicas, which are within a host and not of
    gradients: without compression, and without options between hosts."""
    rest: dict[str, Any] = {"wire_dtype": None, "compression": None}
    if hosts > 1:
        rest |= {"engine": "auto", "min_hosts": None, "checksum": False}
    return dataclasses.replace(communication, compression_across="hosts", **rest)


def checked_communication(
    given: Communication | None, layout: Any = None
) -> Communication:
    """The argument `communication` of a strategy; None: the defaults.

    With a `layout` the rows of a word that repeats are added up first, as Keras does on
    JAX: on every mesh, whether its axes cut the table or not.
    """
    if given is None:
        given = Communication()
    if not isinstance(given, Communication):
        raise ConfigurationError(
            "communication must be None or a tfdp.Communication. Received: "
            f"{what_it_is(given)}."
        )
    return given if layout is None else as_on_jax(given)


def as_on_jax(given: Communication) -> Communication:
    """The same, with the rows of a word that repeats added up before the update."""
    return dataclasses.replace(given, repeated_rows="sum")
