"""The order of exchanges between hosts: one after the other, the same on all hosts."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp._private.step_ops import graphs_called, run_behind
from tfdp.exchange.op_names import LINK_BEGIN, LINK_CALL
from tfdp.exchange.packing import Tensors
from tfdp.hosts.async_exchanges import AsyncExchanges
from tfdp.hosts.python_calls import counted
from tfdp.lint.op_kinds import calls_python, is_call, is_control_flow

#: A call passes it to the next one, to order them.
TOKEN = np.uint8(0)

#: By graph, an operation's name: the operation itself would keep the graph alive.
LastOps: TypeAlias = "weakref.WeakKeyDictionary[tf.Graph, str]"


class LinkCalls:
    """Callbacks that run one after the other, in the order in which they are built.

    Every host builds the same ones in the same order, which pairs their exchanges. A
    call in a conditional or a loop runs after those built before it and before those
    built after it. TensorFlow orders the iterations of a loop.

    Each call passes the next one a token. TensorFlow's optimizer would remove a control
    dependency where the data implies the same order, and may find later that there is
    nothing to compute in between (the share of a host without rows is always 0).
    """

    def __init__(self) -> None:
        self._last_graph: Callable[[], tf.Graph | None] = lambda: None
        #: By graph under construction, the last op that ends an exchange, and the last
        #: that begins one: a begin need not wait for a pending end.
        self._last_ends: LastOps = weakref.WeakKeyDictionary()
        self._last_begins: LastOps = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakKeyDictionary[tf.Graph, int] = (
            weakref.WeakKeyDictionary()
        )
        self._begun = AsyncExchanges()

    @property
    def channel(self) -> str:
        """The channel of the link for a call that is made, or built, now."""
        return "host" if tf.executing_eagerly() else "step"

    def close(self) -> None:
        """Waits for exchanges still in flight, so that no other host hangs."""
        self._begun.close()

    def call(
        self,
        function: Callable[..., list],
        tensors: Tensors,
        specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """`function` of the tensors' arrays, as tensors that match `specs`."""
        if tf.executing_eagerly():
            return [tf.constant(r) for r in function(*(t.numpy() for t in tensors))]
        graph = tf.compat.v1.get_default_graph()
        results = self._op(function, tensors, specs, LINK_CALL, self._last_ends)
        self._last_graph = weakref.ref(graph)
        self._last_ends[graph] = self._last_begins[graph] = results[0].op.name
        return _with_static_shapes(results, specs)

    def call_ahead(
        self,
        function: Callable[..., list],
        tensors: Tensors,
        specs: Sequence[tf.TensorSpec],
        channels: Sequence[str],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """`call`, except that consecutive calls of this kind begin at once.

        Up to `len(channels)` are in flight, in the channels' threads; `function` gets
        its channel as well. So the network is busy while one of them ends. `channels`
        are the same on all hosts. Also returns a tensor that exists after the start.
        """
        if tf.executing_eagerly():
            results = self.call(
                lambda *arrays: function(channels[0], *arrays), tensors, specs
            )
            return results, tf.constant(0, tf.int64)
        graph = tf.compat.v1.get_default_graph()
        # By the graph's own count: hosts may have traced other graphs before.
        turn = self._ahead.get(graph, 0)
        self._ahead[graph] = turn + 1
        channel = channels[turn % len(channels)]

        def begin(*arrays: np.ndarray) -> list[np.ndarray]:
            # Each array shares its tensor's memory, which is read-only until `take`.
            ticket = self._begun.begin(channel, lambda: function(channel, *arrays))
            return [np.array(ticket)]

        def take(*arrays: np.ndarray) -> list[np.ndarray]:
            return list(self._begun.take(int(arrays[-1])))

        number = [tf.TensorSpec([], tf.int64)]
        (ticket,) = self._op(begin, tensors, number, LINK_BEGIN, self._last_begins)
        # The tensors are inputs because they are in use until then.
        results = self._op(take, [*tensors, ticket], specs, LINK_CALL, self._last_ends)
        self._last_graph = weakref.ref(graph)
        self._last_begins[graph] = ticket.op.name
        self._last_ends[graph] = results[0].op.name
        return _with_static_shapes(results, specs), ticket

    def end_run(self) -> None:
        """Orders functions that the replicas call, when the replicas are built.

        Such a `tf.function` may come from an earlier trace and be called again: it
        contains no token of the graph around it.
        """
        known: dict[int, bool] = {}
        since: list[tf.Operation] = []  # the last such function, and what follows it
        for op in tf.compat.v1.get_default_graph().get_operations():
            if not _is_call_of_link(op) and not _holds_calls(op, known):
                continue
            if is_call(op):
                run_behind(op, since)
                since.clear()
            elif since and is_call(since[0]):
                run_behind(op, since[:1])
            since.append(op)

    def _op(
        self,
        function: Callable[..., list],
        tensors: Tensors,
        specs: Sequence[tf.TensorSpec],
        name: str,
        last_ops: LastOps,
    ) -> list[tf.Tensor]:
        # Stateful, so that TensorFlow neither drops a call nor merges two. But it would
        # also chain them with all other stateful ops, such as those of other replicas,
        # which wait for this call: so they are marked independent.
        graph = tf.compat.v1.get_default_graph()
        tokens, others = self._before(graph, last_ops)
        count = len(tensors)  # capturing the tensors would keep the graph alive

        @functools.wraps(function)
        def call(*arrays: np.ndarray) -> list:
            return [*function(*arrays[:count]), TOKEN]  # the rest are tokens

        with tf.control_dependencies(others):
            *results, token = tf.numpy_function(
                counted(call),
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
        """The tokens and operations that a call built in `graph` now waits for.

        A conditional or a loop captures the token of the graph around it.
        """
        tokens = _token_of(graph, last_ops)
        others: list[tf.Operation] = []
        if self._last_graph() is not graph:
            others += _control_flow_in(graph)
        # The first call in a conditional or a loop, which waits for what ended before.
        while not tokens and (
            names.is_branch_graph(graph) or names.is_loop_graph(graph)
        ):
            graph = graph.outer_graph
            tokens = _token_of(graph, self._last_ends)
            others += _control_flow_in(graph)
        return tokens, others


def _token_of(graph: tf.Graph, last_ops: LastOps) -> list[tf.Tensor]:
    """The token of the last of these ops in `graph`, if any."""
    last = last_ops.get(graph)
    if last is None:
        return []
    # A gradient tape does not follow integers through a separate op such as identity.
    # Passed directly, a token would connect the gathers of weights on the tape of the
    # calling replica, and on no other: gradients of parallel branches would then come
    # in another order than on the other replicas.
    return [tf.identity(graph.get_operation_by_name(last).outputs[-1])]


def _is_call_of_link(op: tf.Operation) -> bool:
    return calls_python(op) and (LINK_CALL in op.name or LINK_BEGIN in op.name)


def _holds_calls(op: tf.Operation, known: dict[int, bool]) -> bool:
    """Whether `op` calls functions that contain calls; `known` caches by graph id."""
    for graph in graphs_called(op):
        if id(graph) not in known:
            known[id(graph)] = any(
                _is_call_of_link(one) or _holds_calls(one, known)
                for one in graph.get_operations()
            )
        if known[id(graph)]:
            return True
    return False


def _with_static_shapes(
    results: Tensors, specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    # See SendReceive.receive: all replicas must have the same static shapes.
    return [
        tf.ensure_shape(result, spec.shape)
        for result, spec in zip(results, specs, strict=True)
    ]


def _control_flow_in(graph: tf.Graph) -> list[tf.Operation]:
    """Ops that may contain the call before this one: an accumulating optimizer's
    reduction, or a loop of steps. Nothing else orders a call after them, and hosts
    would make the two in different orders."""
    return [op for op in graph.get_operations() if is_control_flow(op)]
