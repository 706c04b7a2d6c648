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

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import in_compiled_function
from tfdp._private.step_ops import (
    MAY_CALL,
    given_to,
    graphs_called,
    is_compiled_by_xla,
    is_resource,
)

__all__ = ["read_in_place"]

SCATTERS = "ResourceScatter"


def read_in_place(ops: Sequence[tf.Operation]) -> None:
    """Ends, behind `ops`, the copies for who reads tables that they change.

    Args:
      ops: of a step, whose graph is still being built.
    """
    if in_compiled_function():
        return  # XLA changes no variable in place, and knows no such mode
    handles = {id(handle): handle for handle in _scattered(ops, {})}
    for handle in handles.values():
        # One that was there before the step; what it makes itself may never be there.
        if handle.op.type == "Placeholder":
            tf.raw_ops.DisableCopyOnRead(resource=handle)


def _scattered(
    ops: Sequence[tf.Operation], known: dict[Any, list[tf.Tensor]]
) -> Iterator[tf.Tensor]:
    """The handles of variables of which `ops` change rows, some of them twice."""
    for op in ops:
        if op.type.startswith(SCATTERS):
            yield op.inputs[0]
        elif op.type in MAY_CALL and not is_compiled_by_xla(op):
            for inner in graphs_called(op):
                yield from _scattered_within(inner, op, known)


def _scattered_within(
    inner: Any, op: tf.Operation, known: dict[Any, list[tf.Tensor]]
) -> Iterator[tf.Tensor]:
    if inner not in known:
        known[inner] = list(_scattered(inner.get_operations(), known))
    own = list(map(id, known[inner]))
    for argument, given in zip(inner.inputs, given_to(inner, op.inputs), strict=False):
        if id(argument) in own and is_resource(given):
            yield given
