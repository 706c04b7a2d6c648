"""Calls of Python from a graph, for what goes over a link; in one order everywhere."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp._private.step_ops import CALLS, MAY_CALL, PYTHON, graphs_called, run_behind
from tfdp.hosts.async_exchanges import AsyncExchanges
from tfdp.hosts.python_calls import counted

#: What their ops are called, for who reads a graph.
LINK_CALL = "tfdp_link_call"
LINK_BEGIN = "tfdp_link_begin"

#: What a call hands to the next one: nothing but that it is over.
TOKEN = np.uint8(0)

#: By graph the name of an operation: the operation itself would keep the graph.
LastOps: TypeAlias = "weakref.WeakKeyDictionary[tf.Graph, str]"
#: What holds graphs of its own, of which a call may be in one.
CONTROL_FLOW = MAY_CALL.difference(CALLS)


class LinkCalls:
    """Makes calls that run one after the other, in the order in which they are built.

    Every host builds the same ones in the same order, which is how the exchange of one
    meets that of the others. A call within a conditional or a loop comes behind those
    that were built before it, and before those that are built after it. That one turn
    of a loop ends before the next one begins TensorFlow sees to.

    Each call hands the next one a token. That it has to run before would not do: where
    the data of the two say so as well, TensorFlow's optimizer takes that order out, and
    may find later that there is nothing to compute in between (the share of a host
    without rows is 0, whatever the sum is).
    """

    def __init__(self) -> None:
        self._last_graph: Callable[[], tf.Graph | None] = lambda: None
        #: By graph that is being built the last op that ends an exchange, and the last
        #: one that begins one: what ends none yet need not be waited for to begin.
        self._last_ends: LastOps = weakref.WeakKeyDictionary()
        self._last_begins: LastOps = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakKeyDictionary[tf.Graph, int] = (
            weakref.WeakKeyDictionary()
        )
        self._begun = AsyncExchanges()

    def close(self) -> None:
        """Waits for what others wait for, too."""
        self._begun.close()

    def call(
        self,
        function: Callable[..., list],
        tensors: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """What `function` makes of the arrays of `tensors`, as it says in `specs`."""
        if tf.executing_eagerly():
            return [tf.constant(r) for r in function(*(t.numpy() for t in tensors))]
        graph = tf.compat.v1.get_default_graph()
        results = self._op(function, tensors, specs, LINK_CALL, self._last_ends)
        self._last_graph = weakref.ref(graph)
        self._last_ends[graph] = self._last_begins[graph] = results[0].op.name
        return _of_known_shapes(results, specs)

    def call_ahead(
        self,
        function: Callable[..., list],
        tensors: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
        channels: Sequence[str],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """As `call`, but calls like it that come one after the other begin at once.

        As many are under way as there are channels, which take turns; the others wait
        in their order. So the network has something to send while one of them ends.

        Args:
          function: called with a channel and the arrays, in a thread of the channel.
          tensors, specs: see `call`.
          channels: alike on all hosts.

        Returns: what `call` does, and a number that is there once the call has begun.
        """
        if tf.executing_eagerly():
            results = self.call(
                lambda *arrays: function(channels[0], *arrays), tensors, specs
            )
            return results, tf.constant(0, tf.int64)
        graph = tf.compat.v1.get_default_graph()
        # By the graph's own count: what else hosts have traced may differ.
        turn = self._ahead.get(graph, 0)
        self._ahead[graph] = turn + 1
        channel = channels[turn % len(channels)]

        def begin(*arrays: np.ndarray) -> list[np.ndarray]:
            # Each array holds the memory of its tensor, into which nobody writes then.
            ticket = self._begun.begin(channel, lambda: function(channel, *arrays))
            return [np.array(ticket)]

        def take(*arrays: np.ndarray) -> list[np.ndarray]:
            return list(self._begun.take(int(arrays[-1])))

        number = [tf.TensorSpec([], tf.int64)]
        (ticket,) = self._op(begin, tensors, number, LINK_BEGIN, self._last_begins)
        # With the tensors, which are in use until then.
        given = [*tensors, ticket]
        results = self._op(take, given, specs, LINK_CALL, self._last_ends)
        self._last_graph = weakref.ref(graph)
        self._last_begins[graph] = ticket.op.name
        self._last_ends[graph] = results[0].op.name
        return _of_known_shapes(results, specs), ticket

    def end_run(self) -> None:
        """When replicas are built: functions that they call take their turns, too.

        Such a function (`tf.function`) may be one of an earlier trace, and be called
        again: nothing of the graph around it is in it, and no token.
        """
        known: dict[int, bool] = {}
        since: list[tf.Operation] = []  # the last such function, and what is behind it
        for op in tf.compat.v1.get_default_graph().get_operations():
            if not _is_call_of_link(op) and not _holds_calls(op, known):
                continue
            if op.type in CALLS:
                run_behind(op, since)
                since.clear()
            elif since and since[0].type in CALLS:
                run_behind(op, since[:1])
            since.append(op)

    def _op(
        self,
        function: Callable[..., list],
        tensors: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
        name: str,
        last_ops: LastOps,
    ) -> list[tf.Tensor]:
        # Stateful: TensorFlow then neither drops a call nor merges two. But it would
        # also chain them with every other stateful op, the other replicas' included,
        # which wait for this call: so they get an order of their own.
        graph = tf.compat.v1.get_default_graph()
        tokens, others = self._before(graph, last_ops)
        with tf.control_dependencies(others):
            *results, token = tf.numpy_function(
                counted(_in_turn(function, len(tensors))),
                [*tensors, *tokens],
                [*(spec.dtype for spec in specs), TOKEN.dtype],
                stateful=True,
                name=name,
            )
        token.set_shape([])
        names.run_independently(token.op)
        return results

    def _before(
        self, graph: tf.Graph, last_ops: LastOps
    ) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """What a call that is built in `graph` now waits for: tokens, and operations.

        The token of a graph around this one is brought in, by the conditional or loop.
        """
        tokens = _token_of(graph, last_ops)
        others: list[tf.Operation] = []
        if self._last_graph() is not graph:
            others += _control_flow_in(graph)
        # The first one in a conditional or a loop: TensorFlow lets that wait for it.
        # Whatever begins within it waits for what ends before it.
        while not tokens and (
            names.is_branch_graph(graph) or names.is_loop_graph(graph)
        ):
            graph = graph.outer_graph
            tokens = _token_of(graph, self._last_ends)
            others += _control_flow_in(graph)
        return tokens, others


def _token_of(graph: tf.Graph, last_ops: LastOps) -> list[tf.Tensor]:
    """What the last of these in `graph` hands to the next one, if there is any."""
    last = last_ops.get(graph)
    if last is None:
        return []
    # A gradient tape does not follow integers through an operation of theirs alone.
    # Given as it is, a token would say to the tape of the replica that calls, and of no
    # other, that its gathers of weights come one after the other: and the gradients of
    # parallel branches would come in another order than on the other replicas.
    return [tf.identity(graph.get_operation_by_name(last).outputs[-1])]


def _is_call_of_link(op: tf.Operation) -> bool:
    return op.type in PYTHON and (LINK_CALL in op.name or LINK_BEGIN in op.name)


def _holds_calls(op: tf.Operation, known: dict[int, bool]) -> bool:
    """Whether `op` calls functions with calls of the link in them.

    Args:
      known: by the ids of functions' graphs, what was found before.
    """
    for graph in graphs_called(op):
        if id(graph) not in known:
            known[id(graph)] = any(
                _is_call_of_link(one) or _holds_calls(one, known)
                for one in graph.get_operations()
            )
        if known[id(graph)]:
            return True
    return False


def _in_turn(function: Callable[..., list], count: int) -> Callable[..., list]:
    """`function` of the first `count` arrays; the rest are tokens, and so is the last
    of what it returns."""

    @functools.wraps(function)
    def call(*arrays: np.ndarray) -> list:
        return [*function(*arrays[:count]), TOKEN]

    return call


def _of_known_shapes(
    results: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    # See SendReceive.receive: known shapes must be known to all replicas.
    return [
        tf.ensure_shape(result, spec.shape)
        for result, spec in zip(results, specs, strict=True)
    ]


def _control_flow_in(graph: tf.Graph) -> list[tf.Operation]:
    """What may hold the call before this one: an accumulating optimizer's reduction, or
    a loop of steps.

    Nothing else orders a call behind one within it, and the hosts would make the two in
    different orders.
    """
    return [op for op in graph.get_operations() if op.type in CONTROL_FLOW]
