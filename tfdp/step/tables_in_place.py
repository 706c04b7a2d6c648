"""Tables whose rows an update changes in place are read where they lie, too.

TensorFlow changes single rows of a variable (`ResourceScatter...`: what Keras' `SGD`
does with the gradient of an `Embedding`) only while nobody else holds the variable's
memory, and has everybody who reads the variable afterwards get a copy of it, for ever:
each step would copy the whole table to look some of its rows up. Where that mode is
ended behind the update (Keras' `take` reads the variable, then gathers), a reader gets
the memory itself; should one still hold it when rows are changed next, TensorFlow
copies then.

Saves: in each step a copy of the table, in time and in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import (
    MAY_CALL,
    given_to,
    graphs_called,
    is_compiled_by_xla,
    is_resource,
)

__all__ = ["read_in_place"]

SCATTERS = "ResourceScatter"


def read_in_place(graph: Any) -> None:
    """Ends, behind all that `graph` does, the copies for who reads changed tables.

    Args:
      graph: of a step, which is still being built.
    """
    handles = {id(handle): handle for handle in _scattered(graph, {})}
    for handle in handles.values():
        tf.raw_ops.DisableCopyOnRead(resource=handle)


def _scattered(graph: Any, known: dict[Any, list[tf.Tensor]]) -> Iterator[tf.Tensor]:
    """The handles, in `graph`, of variables of which rows are changed, some twice."""
    for op in graph.get_operations():
        if op.type.startswith(SCATTERS):
            yield op.inputs[0]
        elif op.type in MAY_CALL and not is_compiled_by_xla(op):
            for inner in graphs_called(op):
                yield from _scattered_within(inner, op, known)


def _scattered_within(
    inner: Any, op: tf.Operation, known: dict[Any, list[tf.Tensor]]
) -> Iterator[tf.Tensor]:
    if inner not in known:
        known[inner] = list(_scattered(inner, known))
    own = list(map(id, known[inner]))
    for argument, given in zip(inner.inputs, given_to(inner, op.inputs), strict=False):
        if id(argument) in own and is_resource(given):
            yield given
