"""Who waits for whom: the order of exchanges while a graph is built and when it runs.

TensorFlow runs an operation as soon as its inputs exist, and chains stateful operations
of all devices in program order: one replica's exchange would wait for another's. Three
orders take the place of that:

- `ReplicaOrder`: which exchanges of the replicas of this process belong together.
- `ReplicaTokens`: conditionals and functions wait for those of their own replica only.
- `LinkCalls` (`tfdp.exchange.link_calls`): exchanges with other hosts run one after the
  other, in one order on all.

`run_independently` exempts an operation from TensorFlow's own order. An operation in an
exchange is exempt, except for launches of NCCL between hosts.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp._private import names
from tfdp.errors import CollectiveError
from tfdp.exchange.packing import Tensors

run_independently = names.run_independently


class ReplicaOrder:
    """The exchanges of one `strategy.run`, which all replicas build in one order."""

    def __init__(self, replicas: int):
        #: The graph of the replica function under construction; None where a compiler
        #: orders exchanges, in any graph.
        self.run_graph: tf.Graph | None = None
        #: The branches of `tf.cond` recorded in this run, each with its replica's rank.
        #: All replicas must take the same branch of each.
        self.branches: list[tuple[int, tf.Graph]] = []
        #: How many exchanges each replica has built.
        self.built = [0] * replicas
        # By the ranks of a group: others need not build the same exchanges.
        self._numbers: dict[tuple[int, ...], CallNumbers] = collections.defaultdict(
            lambda: CallNumbers(replicas)
        )

    def begin_run(self) -> None:
        """Starts the tracing of one `strategy.run`: aligns all replicas' counts."""
        self.run_graph = tf.compat.v1.get_default_graph()
        self.branches = []
        for numbers in self._numbers.values():
            numbers.begin_run()

    def next(
        self,
        rank: int,
        what: str = "",
        tensors: Tensors = (),
        group: tuple[int, ...] = (),
    ) -> int:
        """The number of this exchange, equal on all replicas of `group`, which has
        numbers of its own; see `CallNumbers.next`.

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
        if names.is_in_vectorized_loop():
            raise CollectiveError(
                "An exchange between replicas was built inside tf.vectorized_map, or "
                "for GradientTape.jacobian of weights in shards "
                '(shard="parameters", layout=), which TensorFlow repeats for each '
                "iteration in an order of its own. Exchange before or after it "
                "(tfdp.losses.all_rows, all_sum); take a jacobian with "
                'shard="gradients", where weights are whole.'
            )
        self.note_branches(rank)
        self.built[rank] += 1
        return self._numbers[group].next(rank, what, tensors)

    def note_branches(self, rank: int) -> None:
        """Records the conditionals under construction. Exchanges record their own."""
        if self.run_graph is not None:
            inner = names.graphs_inside(self.run_graph)
            self.branches += [(rank, g) for g in inner if names.is_branch_graph(g)]


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
    """Makes replicas match exchanges by `name` within the context, not by their order.

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


class ReplicaTokens:
    """A resource of each replica of this process, which orders what uses it.

    A conditional that contains exchanges must use a resource of its replica: TensorFlow
    would chain the conditionals of two replicas, and they would wait for each other.
    """

    def __init__(self, devices: Sequence[str]):
        self._devices = tuple(devices)
        self._tokens = [names.make_token(device) for device in self._devices]
        self._run_token = names.make_token(self._devices[0])
        self._run_graph: tf.Graph | None = None
        self._touched: dict[tuple[int, int], tf.Graph] = {}
        self._received: list[tf.Operation] = []

    def begin_run(self) -> None:
        """Prepares for the replicas of a `strategy.run`, traced next in this graph."""
        self._run_graph = tf.compat.v1.get_default_graph()
        self._touched, self._received = {}, []

    def end_run(self, *, always: bool = False) -> None:
        """Orders calls of functions that contain this run; called when it is traced.

        A function called twice in a step uses each rendezvous name twice, so that one
        call could receive what the other sent. The function writes to a resource after
        all receives, so that TensorFlow orders the calls. A run without receives needs
        no order, except with `always`.
        """
        if not (always or self._received) or names.in_compiled_function():
            return
        with tf.device(self._devices[0]), tf.control_dependencies(self._received):
            tf.raw_ops.AssignVariableOp(resource=self._run_token.handle, value=0.0)

    def pin_to_replica(self, rank: int) -> None:
        """Makes an inner graph use a resource of this replica, once."""
        graph = tf.compat.v1.get_default_graph()
        if graph is self._run_graph or (rank, id(graph)) in self._touched:
            return
        self._touched[rank, id(graph)] = graph  # kept, so that its id stays unique
        self._use(rank)

    def end_behind(self, received: tf.Operation, rank: int) -> None:
        """Makes the function that contains `received` end after it.

        Both calls of a function use the same names, and a receive waits for nothing:
        the second call would take the first one's tensors.
        """
        if tf.compat.v1.get_default_graph() is self._run_graph:
            self._received.append(received)
        else:
            with tf.control_dependencies([received]):
                self._use(rank)

    def _use(self, rank: int) -> None:
        handle = self._tokens[rank].handle
        # From graph to graph, as the gradient of a branch cannot capture an eager one.
        for graph in reversed(names.graphs_inside(None)):
            if hasattr(graph, "capture"):  # of a function
                handle = graph.capture(handle)
        with tf.device(self._devices[rank]):
            tf.raw_ops.VarIsInitializedOp(resource=handle)
