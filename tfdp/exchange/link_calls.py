"""Calls of Python from a graph, for what goes over a link; in one order everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp._private import names
from tfdp.hosts.python_calls import counted

__all__ = ["LinkCalls"]

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")


class LinkCalls:
    """Makes calls that run one after the other, in the order in which they are built.

    Every host builds the same ones in the same order, which is how the exchange of one
    meets that of the others.
    """

    def __init__(self) -> None:
        self._last_call: tf.Operation | None = None
        self._last_graph: Callable[[], tf.Graph | None] = lambda: None

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
        # Asked of the graph, not of the op: an op outlives its graph and then points at
        # freed memory.
        is_same_graph = self._last_graph() is graph
        before = [self._last_call] if is_same_graph else _conditionals_in(graph)
        with tf.control_dependencies(before):
            results = tf.numpy_function(
                counted(function),
                tensors,
                [spec.dtype for spec in specs],
                stateful=True,
            )
        self._last_graph, self._last_call = weakref.ref(graph), results[0].op
        names.run_independently(results[0].op)
        return [
            # See HandOver.receive: known shapes must be known to all replicas.
            tf.ensure_shape(result, spec.shape)
            for result, spec in zip(results, specs, strict=True)
        ]


def _conditionals_in(graph: tf.Graph) -> list[tf.Operation]:
    """What may hold the call before this one: an accumulating optimizer's reduction.

    Nothing else orders a call behind one within a conditional, and the hosts would make
    the two in different orders.
    """
    return [op for op in graph.get_operations() if op.type in CONDITIONALS]
