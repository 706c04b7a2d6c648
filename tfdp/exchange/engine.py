"""The interface that every reduction engine implements. A third is one file."""

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
from tfdp.exchange.packing import pack, unpack, whole_from_shards
from tfdp.exchange.sparse import join_rows, merge_rows
from tfdp.exchange.traffic import TrafficCount
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology

# TensorFlow's names of its collectives' ways -> what people call them.
HINTS_IN_WORDS = {"nccl": "NCCL", "ring": "TensorFlow's ring"}

# Group keys are unique in the process, and the same on every host that makes its
# strategies in the same order. Stock strategies count from 1; keep well away.
_group_keys = itertools.count(1_000_000)


def next_group_key() -> int:
    """A key that no other group of this process has."""
    return next(_group_keys)


class Engine(abc.ABC):
    """Sums and gathers tensors over the replicas of a topology.

    Each method is called once by every replica, in the same order, in a graph; the
    calls of the replicas that belong together find each other by their number.

    Args:
      devices: one device per replica, in rank order, as full names.
      topology: the levels to reduce over.
    """

    #: The name that `Communication(engine=...)` and `tfdp info` use.
    name: str = ""
    #: Whether tensors should be packed into one buffer per bucket.
    packs: bool = True
    #: Makes sums while steps go on; None: sums are made in the step that asks.
    late: AsyncExchange | None = None
    #: The way that TensorFlow's collectives are asked for; "": they are not used.
    _hint: str = ""

    def __init__(self, devices: Sequence[str], topology: Topology):
        self.devices = tuple(devices)
        self.topology = topology
        self.run_graph: tf.Graph | None = None
        self.traffic = TrafficCount(len(self.devices))
        self._call_numbers = CallNumbers(len(self.devices))
        #: See `Reducer`.
        self.branches: list[tuple[int, tf.Graph]] = []

    @property
    def in_words(self) -> str:
        """The name, and what of TensorFlow's carries the tensors, where it does."""
        if not self._hint:
            return self.name
        return f"{self.name} ({HINTS_IN_WORDS.get(self._hint, self._hint)})"

    def begin_run(self) -> None:
        """Starts the tracing of one `strategy.run`: all replicas count alike again."""
        self.run_graph = tf.compat.v1.get_default_graph()
        self.branches = []
        self._call_numbers.begin_run()
        self.traffic.begin()

    def end_run(self) -> None:
        """Ends it, in the same graph: all replicas are traced."""
        return

    def sent_bytes(self, rank: int) -> int | None:
        """What a replica sends to others in one run of the step that was traced last.

        Each `strategy.run` that is traced starts the count again: `model.evaluate`
        after `model.fit` leaves the traffic of evaluation here. Tensors that are
        handed over within shared memory count as sent.

        Args:
          rank: the replica.

        Returns:
          Bytes, or None when a size is known only while the step runs.
        """
        return self.traffic.of(rank)

    def sent_between_hosts(self) -> int | None:
        """The bytes that this process has sent to other hosts so far.

        None: nobody counts them. Simulated hosts are within one process: 0.
        """
        return 0

    def seconds_between_hosts(self) -> float | None:
        """How long steps of this process were in exchanges with other hosts so far.

        The waiting for them included. None: nobody knows. Simulated hosts are within
        one process: 0.
        """
        return 0.0

    def next_call_number(
        self, rank: int, what: str = "", tensors: Sequence[tf.Tensor] = ()
    ) -> int:
        """The number of this exchange; the same on every replica that takes part.

        Args:
          rank: the calling replica.
          what, tensors: see `CallNumbers.next`.

        Raises:
          CollectiveError: inside a `tf.while_loop` within the replica function, or
            inside a function that XLA compiles; or where another replica does
            something else.
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
                "replica function. Each replica would run a loop of its own and "
                "wait for the others for ever. Unroll the loop in Python, put it "
                "around strategy.run (steps_per_execution does), or do the "
                "exchange after it."
            )
        self.note_branches(rank)
        return self._call_numbers.next(rank, what, tensors)

    def note_branches(self, rank: int) -> None:
        """See `Reducer`."""
        inner = names.graphs_inside(self.run_graph)
        self.branches += [(rank, g) for g in inner if names.is_branch_graph(g)]

    @abc.abstractmethod
    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum of `tensor` over all replicas, on each of them.

        Args:
          tensor: any shape, the same on all replicas; a number type.
          rank: the calling replica.
        """

    @property
    def replicas(self) -> int:
        """How many replicas there are, on all hosts."""
        return len(self.devices)

    @property
    def reduces_buckets(self) -> bool:
        """Whether the tensors of a bucket travel in one exchange."""
        return self.packs

    def all_reduce_bucket(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        """The sums of several tensors of one type, in one exchange.

        Args:
          tensors: the tensors of a bucket.
          rank: the calling replica.
          label: names the bucket in errors.
        """
        if len(tensors) == 1:
            return [self.all_reduce(tensors[0], rank)]
        return unpack(self.all_reduce(pack(tensors), rank), tensors)

    #: The type in which `all_reduce_gradients` sends; None for the gradients' own.
    wire_dtype: str | None = None

    def all_reduce_gradients(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        """As `all_reduce_bucket`, of gradients, which may be rounded on the way."""
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
        """The sum over all replicas of rows of a table, as rows.

        Args:
          slices: this replica's; the number of rows may differ between replicas.
          rank: the calling replica.
          label: names the exchange in errors, where one can fail.
          summed: rows with the same index are added, before they travel and after; what
            comes back has each index once. False: all rows, in rank order.
          wire_dtype: the smaller float type in which values travel between hosts; None
            for their own.

        Cost: (N - 1) times the bytes of values and indices per replica, in two
        exchanges of one level: rows cannot be added by who passes them on.
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
        """The replicas of this process, host by host; None: `all_reduce_within` is not
        there, or there is one host."""
        return None

    def all_reduce_within(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum of `tensor` over the replicas of the calling replica's host."""
        raise CollectiveError(f"The engine {self.name!r} has no sums within a host.")

    @property
    def shard_parts(self) -> int:
        """Over how many replicas a tensor is sharded."""
        return len(self.devices)

    @property
    def first_part(self) -> int:
        """The shard of this process's first replica."""
        return 0

    @property
    def holds_first_copy(self) -> bool:
        """Whether the shards of this process are the first of several copies."""
        return True

    @abc.abstractmethod
    def reduce_scatter_bucket(
        self,
        tensors: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        """This replica's shards of the sums of several tensors of one type.

        Args:
          tensors: whole ones, alike on all replicas in shape and type.
          layouts: how each is cut, into `shard_parts` parts.
          rank: the calling replica.
          label: names the bucket in errors.
        """

    @abc.abstractmethod
    def all_gather_bucket(
        self,
        shards: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        """The whole tensors, on every replica, from the shards of all.

        Args:
          shards: this replica's, flat and padded.
          layouts: how each tensor is cut.
          rank: the calling replica.
          label: names the bucket in errors.
        """

    def join_shards(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor, in cross-replica context.

        Args:
          shards: of the replicas of this process, flat and padded.
          layout: how the tensor is cut.
          label: names the exchange in errors, where there is one.
        """
        return whole_from_shards(shards, layout)

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """All replicas' tensors, joined along the first axis in rank order.

        Args:
          tensor: rank 1 or more; the first dimension may differ between replicas.
          rank: the calling replica.
        """

    def all_gather_equal(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """All replicas' tensors, which have one shape, as [replicas, ...].

        Args:
          tensor: int32; the sizes that are not known may differ from step to step.
          rank: the calling replica.
        """
        whole = self.all_gather(tensor[None], rank)
        return tf.ensure_shape(whole, [self.replicas, *tensor.shape])

    def all_to_all(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        """Row i goes to replica i; what comes back is by sender.

        Args:
          rows: int32, [replicas, ...], of one shape on all replicas, which is known.
          rank: the calling replica.

        Raises:
          CollectiveError: where there is no such exchange.
        """
        raise CollectiveError(f"The engine {self.name!r} has no all-to-all.")

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """Replica 0's `tensor`, on every replica."""


# The numbers under which replicas meet while they are traced one after the other.


class CallNumbers:
    """Counts the exchanges of each replica, in order or by name.

    Args:
      replicas: of this process.
    """

    def __init__(self, replicas: int):
        self._counts = [0] * replicas
        # By its name, and how often that came before: the number of an exchange.
        self._named: dict[tuple[str, int], int] = {}
        self._named_so_far = 0
        self._names_met: collections.Counter[tuple[str, int]] = collections.Counter()
        #: By the number: which replica came first, and for what.
        self._first: dict[int, tuple[int, str]] = {}

    def begin_run(self) -> None:
        """All replicas count alike again.

        A trace that failed half-way has left some ahead of others; without this every
        later exchange would wait for a partner that never comes.
        """
        self._counts = [max(self._counts)] * len(self._counts)
        # Numbers go on: one graph may hold several runs.
        self._named.clear()
        self._names_met.clear()
        self._first.clear()

    def next(self, rank: int, what: str = "", tensors: Sequence[tf.Tensor] = ()) -> int:
        """The number of this exchange; below 0 for one that has a name.

        Args:
          rank: the calling replica.
          what: is done, in words; "": it may differ between replicas.
          tensors: of which all replicas have the same shapes.

        Raises:
          CollectiveError: where another replica does something else.
        """
        name = name_of_exchanges()
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
        before = self._names_met[name, rank]
        self._names_met[name, rank] += 1
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
                "branches may come in another order on each replica: take one "
                "all_reduce of both."
            )


# What replicas meet for, where they may come to it in another order.
#
# Exchanges of a forward pass are built in the order of the program, which is the same
# on all replicas. A tape takes gradients in an order of its own, which may differ: it
# goes by how many operations lie between, and a replica that adds has others than those
# that receive. An exchange of a backward pass is named after what it is the gradient
# of.


_local = threading.local()


@contextlib.contextmanager
def exchanges_of(name: str) -> Iterator[None]:
    """While this lasts, replicas meet under `name`, and not by the order of exchanges.

    Args:
      name: alike on all replicas; several exchanges of one name are counted. "": by
        the order all the same.
    """
    before = name_of_exchanges()
    _local.name = name
    try:
        yield
    finally:
        _local.name = before


def name_of_exchanges() -> str | None:
    """What the calling replica is about to meet for; None: the next in order."""
    return getattr(_local, "name", None) or None
