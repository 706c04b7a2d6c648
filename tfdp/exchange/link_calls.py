"""Calls of Python from a graph, for what goes over a link; in one order everywhere."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.hosts.python_calls import counted

__all__ = ["LINK_CALL", "LinkCalls"]

#: What their ops are called, for who reads a graph.
LINK_CALL = "tfdp_link_call"

#: What a call hands to the next one: nothing but that it is over.
TOKEN = np.uint8(0)

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")


class LinkCalls:
    """Makes calls that run one after the other, in the order in which they are built.

    Every host builds the same ones in the same order, which is how the exchange of one
    meets that of the others. A call within a conditional comes behind those that were
    built before the conditional, and before those that are built after it.

    Each call hands the next one a token. That it has to run before would not do: where
    the data of the two say so as well, TensorFlow's optimizer takes that order out, and
    may find later that there is nothing to compute in between (the share of a host
    without rows is 0, whatever the sum is).
    """

    def __init__(self) -> None:
        self._last_graph: Callable[[], tf.Graph | None] = lambda: None
        #: The name of the last call of each graph: a tensor would keep the graph.
        self._last_calls: weakref.WeakKeyDictionary[tf.Graph, str] = (
            weakref.WeakKeyDictionary()
        )

    def call(
        self,
        function: Callable[..., list],
        tensors: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """What `function` makes of the arrays of `tensors`, as it says in `specs`."""
        if tf.executing_eagerly():
            return [tf.constant(r) for r in function(*(t.numpy() for t in tensors))]
        # Stateful: TensorFlow then neither drops a call nor merges two. But it would
        # also chain them with every other stateful op, the other replicas' included,
        # which wait for this call: so they get an order of their own.
        graph = tf.compat.v1.get_default_graph()
        tokens, conditionals = self._before(graph)
        with tf.control_dependencies(conditionals):
            *results, token = tf.numpy_function(
                counted(_in_turn(function, len(tensors))),
                [*tensors, *tokens],
                [*(spec.dtype for spec in specs), TOKEN.dtype],
                stateful=True,
                name=LINK_CALL,
            )
        token.set_shape([])
        self._last_graph, self._last_calls[graph] = weakref.ref(graph), token.op.name
        names.run_independently(token.op)
        return [
            # See HandOver.receive: known shapes must be known to all replicas.
            tf.ensure_shape(result, spec.shape)
            for result, spec in zip(results, specs, strict=True)
        ]

    def _before(self, graph: tf.Graph) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """What a call that is built in `graph` now waits for: tokens, and operations.

        The token of a graph around this one is brought in, by the conditional.
        """
        tokens = self._token_of(graph)
        conditionals: list[tf.Operation] = []
        if self._last_graph() is not graph:
            conditionals += _conditionals_in(graph)
        # The first one in a conditional: TensorFlow lets the conditional wait for it.
        while not tokens and names.is_branch_graph(graph):
            graph = graph.outer_graph
            tokens = self._token_of(graph)
            conditionals += _conditionals_in(graph)
        return tokens, conditionals

    def _token_of(self, graph: tf.Graph) -> list[tf.Tensor]:
        """What the last call in `graph` hands to the next one, if there is a call."""
        last = self._last_calls.get(graph)
        return [] if last is None else [graph.get_operation_by_name(last).outputs[-1]]


def _in_turn(function: Callable[..., list], count: int) -> Callable[..., list]:
    """`function` of the first `count` arrays; the rest are tokens, and so is the last
    of what it returns."""

    @functools.wraps(function)
    def call(*arrays: np.ndarray) -> list:
        return [*function(*arrays[:count]), TOKEN]

    return call


def _conditionals_in(graph: tf.Graph) -> list[tf.Operation]:
    """What may hold the call before this one: an accumulating optimizer's reduction.

    Nothing else orders a call behind one within a conditional, and the hosts would make
    the two in different orders.
    """
    return [op for op in graph.get_operations() if op.type in CONDITIONALS]
