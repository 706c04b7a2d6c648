"""Calls of Python from a graph, for what goes over a link; in one order everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp._private import names
from tfdp.hosts.python_calls import counted

__all__ = ["LINK_CALL", "LinkCalls"]

#: What their ops are called, for who reads a graph.
LINK_CALL = "tfdp_link_call"

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")


class LinkCalls:
    """Makes calls that run one after the other, in the order in which they are built.

    Every host builds the same ones in the same order, which is how the exchange of one
    meets that of the others. A call within a conditional comes behind those that were
    built before the conditional, and before those that are built after it.
    """

    def __init__(self) -> None:
        self._last_graph: Callable[[], tf.Graph | None] = lambda: None
        #: The last call of each graph that is being built.
        self._last_calls: weakref.WeakKeyDictionary[tf.Graph, tf.Operation] = (
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
        with tf.control_dependencies(self._before(graph)):
            results = tf.numpy_function(
                counted(function),
                tensors,
                [spec.dtype for spec in specs],
                stateful=True,
                name=LINK_CALL,
            )
        self._last_graph, self._last_calls[graph] = weakref.ref(graph), results[0].op
        names.run_independently(results[0].op)
        return [
            # See HandOver.receive: known shapes must be known to all replicas.
            tf.ensure_shape(result, spec.shape)
            for result, spec in zip(results, specs, strict=True)
        ]

    def _before(self, graph: tf.Graph) -> list[tf.Operation]:
        """What has to run before a call that is built in `graph` now."""
        last = self._last_calls.get(graph)
        before = [] if last is None else [last]
        if self._last_graph() is not graph:
            before += _conditionals_in(graph)
        # The first one in a conditional: TensorFlow lets the conditional wait for it.
        while last is None and names.is_branch_graph(graph):
            graph = graph.outer_graph
            last = self._last_calls.get(graph)
            before += [] if last is None else [last]
            before += _conditionals_in(graph)
        return before


def _conditionals_in(graph: tf.Graph) -> list[tf.Operation]:
    """What may hold the call before this one: an accumulating optimizer's reduction.

    Nothing else orders a call behind one within a conditional, and the hosts would make
    the two in different orders.
    """
    return [op for op in graph.get_operations() if op.type in CONDITIONALS]
