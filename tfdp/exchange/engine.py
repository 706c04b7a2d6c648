"""The interface that every reduction engine implements."""

from __future__ import annotations

import abc
import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp._private import names
from tfdp.errors import CollectiveError
from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.exchange.packing import Layouts, Tensors, pack, unpack, whole_from_shards
from tfdp.exchange.sparse import join_rows, merge_rows
from tfdp.exchange.traffic import TrafficCount
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology

# TensorFlow's names of collective implementations -> readable ones.
HINT_LABELS = {"nccl": "NCCL", "ring": "TensorFlow's ring"}

# Group keys are unique in the process, and equal on all hosts, which make their
# strategies in the same order. Stock strategies count from 1; keep well away.
_group_keys = itertools.count(1_000_000)


def next_group_key() -> int:
    """A group key that is unused in this process."""
    return next(_group_keys)


class Engine(abc.ABC):
    """Sums and gathers tensors over the replicas of a topology.

    Every replica calls each method once, in the same order, in a graph; the calls that
    belong together are matched by their number. `devices` has a full name per replica.
    """

    #: The name that `Communication(engine=...)` and `tfdp info` use.
    name: str = ""
    #: Whether tensors should be packed into one buffer per bucket.
    packs: bool = True
    #: The type in which `all_reduce_gradients` sends; None: the gradients' own.
    wire_dtype: str | None = None
    #: Sums that are in flight while steps go on; None: not supported.
    late: AsyncExchange | None = None
    #: Which implementation TensorFlow's collectives use; "": they are not used.
    _hint: str = ""

    def __init__(self, devices: Sequence[str], topology: Topology):
        self.devices = tuple(devices)
        self.topology = topology
        self.run_graph: tf.Graph | None = None
        self.traffic = TrafficCount(len(self.devices))
        self._call_numbers = CallNumbers(len(self.devices))
        self.branches: list[tuple[int, tf.Graph]] = []

    @property
    def in_words(self) -> str:
        """The name, and which of TensorFlow's collectives it uses, if any."""
        if not self._hint:
            return self.name
        return f"{self.name} ({HINT_LABELS.get(self._hint, self._hint)})"

    def begin_run(self) -> None:
        """Starts the tracing of one `strategy.run`: aligns all replicas' counts."""
        self.run_graph = tf.compat.v1.get_default_graph()
        self.branches = []
        self._call_numbers.begin_run()
        self.traffic.begin()

    def end_run(self) -> None:
        """Called in the same graph when all replicas are traced."""
        return

    def sent_bytes(self, rank: int) -> int | None:
        """The bytes that replica `rank` sends in one run of the last traced step.

        `model.evaluate` after `model.fit` leaves the traffic of evaluation here.
        Tensors in shared memory count as sent. None: a size is unknown while tracing.
        """
        return self.traffic.of(rank)

    def sent_between_hosts(self) -> int | None:
        """The bytes that this process has sent to other hosts so far; None: unknown.

        Simulated hosts are in one process: 0.
        """
        return 0

    def seconds_between_hosts(self) -> float | None:
        """Seconds that steps of this process spent in exchanges with other hosts.

        Includes waiting for them. None: unknown. Simulated hosts are in one process: 0.
        """
        return 0.0

    def next_call_number(self, rank: int, what: str = "", tensors: Tensors = ()) -> int:
        """The number of this exchange, equal on all replicas; see `CallNumbers.next`.

        Raises `CollectiveError` inside a `tf.while_loop` of the replica function, or a
        function that XLA compiles.
        """
        if names.in_compiled_function():
            raise CollectiveError(
                "An exchange between replicas was built inside a function compiled by "
                "XLA (jit_compile=True), where it cannot run. Masked or weighted mean "
                "losses, synchronized batch normalization, train_on_batch and a "
                "train_step of your own need one there: compile with "
                "jit_compile=False, or keep the exchange outside the compiled "
                "function."
            )
        if any(map(names.is_loop_graph, names.graphs_inside(self.run_graph))):
            raise CollectiveError(
                "An exchange between replicas (gradients, all_reduce, synchronized "
                "batch normalization) was built inside a tf.while_loop of the "
                "replica function. Each replica would run its own loop and wait "
                "for the others forever. Unroll the loop in Python, put it around "
                "strategy.run (steps_per_execution does), or do the exchange after it."
            )
        self.note_branches(rank)
        return self._call_numbers.next(rank, what, tensors)

    def note_branches(self, rank: int) -> None:
        """Records the branches that are being built; see `Reducer`."""
        inner = names.graphs_inside(self.run_graph)
        self.branches += [(rank, g) for g in inner if names.is_branch_graph(g)]

    @abc.abstractmethod
    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum of `tensor`, a number type of one shape, on all replicas."""

    @property
    def replicas(self) -> int:
        """The number of replicas, on all hosts."""
        return len(self.devices)

    @property
    def reduces_buckets(self) -> bool:
        """Whether the tensors of a bucket travel in one exchange."""
        return self.packs

    def all_reduce_bucket(
        self, tensors: Tensors, rank: int, label: str
    ) -> list[tf.Tensor]:
        """The sums of several tensors of one type, in one exchange.

        `label` names the exchange in errors, here and below.
        """
        if len(tensors) == 1:
            return [self.all_reduce(tensors[0], rank)]
        return unpack(self.all_reduce(pack(tensors), rank), tensors)

    def all_reduce_gradients(
        self, tensors: Tensors, rank: int, label: str
    ) -> list[tf.Tensor]:
        """`all_reduce_bucket` for gradients, which may be rounded in flight."""
        return self.all_reduce_bucket(tensors, rank, label)

    def all_reduce_rows(
        self,
        slices: tf.IndexedSlices,
        rank: int,
        label: str,
        *,
        summed: bool = False,
        wire_dtype: str | None = None,
    ) -> tf.IndexedSlices:
        """The sum over all replicas of any number of rows of a table, as rows.

        Args:
          summed: add rows of equal index before and after they travel, so that each
            index is returned once. False: all rows, in rank order.
          wire_dtype: the type of float values between hosts; None: their own.

        Cost: (N - 1) times the bytes of values and indices per replica, in two
        exchanges of one level: replicas that forward rows cannot add them.
        """
        if summed:
            slices = merge_rows(slices)
        gathered = tf.IndexedSlices(
            values=self.all_gather(slices.values, rank),
            indices=self.all_gather(slices.indices, rank),
            dense_shape=slices.dense_shape,
        )
        return join_rows([gathered], summed=summed)

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The replicas of this process, host by host; None: one host, or
        `all_reduce_within` is not supported."""
        return None

    def all_reduce_within(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum of `tensor` over the replicas of the calling replica's host."""
        raise CollectiveError(f"The engine {self.name!r} has no sums within a host.")

    @property
    def shard_parts(self) -> int:
        """The number of shards of a tensor."""
        return len(self.devices)

    @property
    def first_part(self) -> int:
        """The shard of this process's first replica."""
        return 0

    @property
    def holds_first_copy(self) -> bool:
        """Whether this process holds the first of several copies of its shards."""
        return True

    @abc.abstractmethod
    def reduce_scatter_bucket(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        """This replica's shards of the sums of several whole tensors of one type.

        `layouts` cut each into `shard_parts` parts.
        """

    @abc.abstractmethod
    def all_gather_bucket(
        self, shards: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        """The whole tensors, on all replicas, from all flat, padded shards."""

    def join_shards(
        self, shards: Tensors, layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor, in cross-replica context, from this process's shards."""
        return whole_from_shards(shards, layout)

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """All replicas' tensors, joined along the first axis in rank order.

        Tensors have an axis at least; its length may differ between replicas.
        """

    def all_gather_equal(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """All replicas' int32 tensors of one shape, as [replicas, ...].

        Unknown sizes may differ from step to step.
        """
        whole = self.all_gather(tensor[None], rank)
        return tf.ensure_shape(whole, [self.replicas, *tensor.shape])

    def all_to_all(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        """Sends row i to replica i; returns the received rows, by sender.

        `rows` are int32 [replicas, ...] of one static shape on all replicas. Raises
        `CollectiveError` where an engine has no all-to-all.
        """
        raise CollectiveError(f"The engine {self.name!r} has no all-to-all.")

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """Replica 0's `tensor`, on every replica."""


class CallNumbers:
    """Counts the exchanges of this process's replicas, in order or by name."""

    def __init__(self, replicas: int):
        self._counts = [0] * replicas
        # The number of an exchange by its name and how often that occurred before.
        self._named: dict[tuple[str, int], int] = {}
        self._named_so_far = 0
        self._names_used: collections.Counter[tuple[str, int]] = collections.Counter()
        #: By number: the first replica that reached it, and its exchange.
        self._first: dict[int, tuple[int, str]] = {}

    def begin_run(self) -> None:
        """Aligns all replicas' counts.

        A trace that failed half-way has left some ahead of others; without this every
        later exchange would wait for a partner that never comes.
        """
        self._counts = [max(self._counts)] * len(self._counts)
        # Numbers go on: one graph may hold several runs.
        self._named.clear()
        self._names_used.clear()
        self._first.clear()

    def next(self, rank: int, what: str = "", tensors: Tensors = ()) -> int:
        """The number of this exchange; negative for a named one.

        `tensors` have equal shapes on all replicas. Raises `CollectiveError` where
        `what` or shapes differ from those of another replica; "": they may differ.
        """
        name = current_exchange_name()
        if name is None:
            number = self._counts[rank]
            self._counts[rank] += 1
        else:
            number = self._number_of(name, rank)
        if what and all(tensor.shape.is_fully_defined() for tensor in tensors):
            shapes = ", ".join(f"{t.dtype.name} {t.shape}" for t in tensors)
            self._check_identical(number, rank, f"{what} of {shapes}")
        return number

    def _number_of(self, name: str, rank: int) -> int:
        before = self._names_used[name, rank]
        self._names_used[name, rank] += 1
        if (name, before) not in self._named:
            self._named_so_far += 1
            self._named[name, before] = -self._named_so_far
        return self._named[name, before]

    def _check_identical(self, number: int, rank: int, what: str) -> None:
        first, of_first = self._first.setdefault(number, (rank, what))
        if of_first != what:
            raise CollectiveError(
                f"Replicas {first} and {rank} would exchange different tensors: "
                f"{first} comes with the {of_first}, {rank} with the {what}. They must "
                "come to their exchanges (gradients, all_reduce, synchronized batch "
                "normalization) in the same order. Look for code that only some "
                "replicas run; and gradients of a model's own all_reduce in two "
                "branches may come in another order on each replica: call one "
                "all_reduce for both."
            )


# Exchanges of a forward pass are built in program order, the same on all replicas. A
# tape orders gradients by how many operations lie between, which differs on a replica
# that adds. So an exchange of a backward pass is matched by the name of the exchange
# that it differentiates.
_local = threading.local()


@contextlib.contextmanager
def exchanges_of(name: str) -> Iterator[None]:
    """Within the context, replicas match exchanges by `name`, not by their order.

    The name is the same on all replicas; several exchanges of one name are counted. "":
    by order.
    """
    before = current_exchange_name()
    _local.name = name
    try:
        yield
    finally:
        _local.name = before


def current_exchange_name() -> str | None:
    """The name that the calling replica's next exchange gets; None: by order."""
    return getattr(_local, "name", None) or None
