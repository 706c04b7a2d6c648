"""`Transport`: the one interface of everything that moves tensors between replicas."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.exchange.ordering import ReplicaOrder
from tfdp.exchange.packing import Tensors
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.traffic import TrafficCount
from tfdp.plan.shards import Layouts
from tfdp.plan.topology import Groups, Topology

# TensorFlow's names of collective implementations -> readable ones.
HINT_LABELS = {"nccl": "NCCL", "ring": "TensorFlow's ring"}

# Group keys are unique in the process, and equal on all hosts, which make their
# strategies in the same order. Stock strategies count from 1; keep well away.
_group_keys = itertools.count(1_000_000)


def next_group_key() -> int:
    """A group key that is unused in this process."""
    return next(_group_keys)


class Transport(abc.ABC):
    """Moves tensors between the replicas of a topology, within each of `groups`.

    Every replica calls each method once, in the same order, in replica context, while a
    graph is built; `order` matches the calls that belong together. `devices` has a full
    name per replica of this process. On a TPU, where one program runs on all cores, a
    `rank` is a tensor. `label` names an exchange in errors.
    """

    #: The name that `Communication(engine=...)` and `tfdp info` use.
    name: str = ""
    #: Whether the tensors of a bucket travel in one exchange.
    reduces_buckets: bool = True
    #: Whether a compiler orders the exchanges, and needs static sizes.
    is_compiled: bool = False
    #: Whether every method keeps to `groups`, which `among` then replaces.
    keeps_to_groups: bool = False
    #: The float type in which gradients may travel; None: their own.
    wire_dtype: str | None = None
    #: An `AsyncExchange`: sums between hosts that steps do not wait for; None: none.
    late: Any = None
    #: Which implementation TensorFlow's collectives use; "": they are not used.
    hint: str = ""
    #: Whether the parts of a tensor travel padded to one length.
    pads_parts: bool = False
    #: Joins parts of several hosts, as `Levels.join`; None: all are in here.
    join: Any = None
    #: Sends tensors to chosen replicas, as `InProcess.swap`; None: it cannot.
    swap: Any = None
    #: Lends a member's tensor for work at another, as `InProcess.lend`; with it
    #: `give_back`, the gradient. None: it cannot.
    lend: Any = None
    give_back: Any = None
    #: `to_each(rows, numbers, rank, label)` sends rows to each replica, in order; gives
    #: those that came. `numbers` (int32 [parts, parts], the same on all replicas) says
    #: how many each sends to each. None: it cannot.
    to_each: Any = None

    def __init__(self, devices: Sequence[str], topology: Topology):
        self.devices = tuple(devices)
        self.topology, self.groups = topology, topology.everyone
        #: The replicas of the largest group, on all hosts.
        self.replicas = len(self.devices)
        self.traffic = TrafficCount(len(self.devices))
        self.order = ReplicaOrder(len(self.devices))

    def among(self, groups: Groups) -> Transport:
        """The same methods for the replicas of each of `groups`, as if they were all.

        `groups` is a partition of the ranks of all hosts, such as
        `topology.within_hosts`. Replicas keep their ranks.
        """
        if groups == self.groups:
            return self
        if not self.keeps_to_groups or sum(map(len, groups)) != len(self.devices):
            raise CollectiveError(
                f"The engine {self.name!r} has no exchanges among {groups}."
            )
        part = copy.copy(self)
        part.groups = groups
        part.replicas = max(map(len, groups))
        return part

    @property
    def between_hosts(self) -> Transport:
        """The same methods for the first replicas of the hosts, which alone call it."""
        return self.among(self.topology.across_hosts)

    @property
    def parts(self) -> int:
        """The number of parts of a tensor."""
        return self.replicas

    def part_of(self, rank: Any) -> int:
        """The part of this process's replica `rank`: its place in its group."""
        return self.groups.place_of(rank)

    @property
    def in_words(self) -> str:
        """The name, and which of TensorFlow's collectives it uses, if any."""
        if not self.hint:
            return self.name
        return f"{self.name} ({HINT_LABELS.get(self.hint, self.hint)})"

    @property
    def bytes_between_hosts(self) -> int | None:
        """The bytes that this process has sent to other hosts so far; None: unknown.

        Simulated hosts are in one process: 0.
        """
        return 0

    @property
    def seconds_between_hosts(self) -> float | None:
        """Seconds that steps of this process spent in exchanges with other hosts.

        Includes waiting for them. None: unknown. Simulated hosts are in one process: 0.
        """
        return 0.0

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Prepares for the replicas of a `strategy.run`, traced within the context."""
        self.order.begin_run()
        self.traffic.begin()
        yield

    @abc.abstractmethod
    def all_reduce(
        self, tensors: Tensors, rank: Any, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        """The sums of several tensors of one number type, of one shape on all replicas.

        `wire_dtype`: the type of wider floats on their way; None: their own.
        """

    def reduce(self, tensors: Tensors, rank: Any) -> list[tf.Tensor]:
        """The sums at the first replica; elsewhere unspecified tensors."""
        return self.all_reduce(tensors, rank, "sum")

    def combine(self, tensors: Tensors, rank: Any, how: RowSum) -> list[tf.Tensor]:
        """The lists of all replicas, combined to one by `how`, on each of them.

        Tensors have an axis at least; its length may differ between replicas.

        Cost: (N - 1) times the bytes of a list per replica, in an exchange of one level
        for each tensor: replicas that forward lists cannot combine them.
        """
        own = how.combine([tensors])
        return how.combine([[self.gather(tensor, rank) for tensor in own]])

    @abc.abstractmethod
    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: Any, label: str
    ) -> list[tf.Tensor]:
        """This replica's parts of the sums of several whole tensors of one type.

        `layouts` cut each into `parts`. A part is flat, and not padded; but a transport
        that pads them all (`pads_parts`) gives and takes padded ones.
        """

    @abc.abstractmethod
    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: Any, label: str
    ) -> list[tf.Tensor]:
        """The whole tensors, on all replicas, from all parts."""

    @abc.abstractmethod
    def gather(self, tensor: tf.Tensor, rank: Any) -> tf.Tensor:
        """All replicas' tensors, joined along the first axis in rank order.

        Tensors have an axis at least; its length may differ between replicas.
        """

    def start(
        self, tensor: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """All replicas' int32 tensors of one shape, as [replicas, ...].

        Unknown sizes may differ from step to step. Also returns a tensor that exists
        once the exchange is in flight: the next one may then start.
        """
        whole, size = self.gather(tensor[None], rank), len(self.groups.of(rank))
        return tf.ensure_shape(whole, [size, *tensor.shape]), tensor

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """Sends row i to replica i; returns the received rows, by sender.

        `rows` are int32 [replicas, ...] of one static shape on all replicas. Raises
        `CollectiveError` where a transport has no all-to-all.
        """
        raise CollectiveError(f"The engine {self.name!r} has no all-to-all.")

    @abc.abstractmethod
    def broadcast(self, tensors: Tensors, rank: Any) -> list[tf.Tensor]:
        """The tensors of the first replica, on all; all pass equal shapes and types."""
