"""Tables that a step changes row by row: their later readers share their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import in_compiled_function
from tfdp._private.step_ops import (
    given_to,
    graphs_called,
    is_compiled_by_xla,
    is_resource,
)
from tfdp.lint.op_kinds import may_call

SCATTERS = "ResourceScatter"


def read_in_place(ops: Sequence[tf.Operation]) -> None:
    """Makes later reads share the memory of tables that `ops` change in place.

    TensorFlow changes single rows of a variable (`ResourceScatter...`, in Keras' `SGD`)
    only while its memory has no other reader, and from then on copies the whole table
    for each reader. Ending that mode after the update saves that copy in each step; a
    reader that still holds the memory at the next update makes TensorFlow copy then.
    """
    if in_compiled_function():
        return  # XLA changes no variable in place, and has no such mode
    handles = {id(handle): handle for handle in _scattered(ops, {})}
    for handle in handles.values():
        # Only variables from before the step; one made within may never be initialized.
        if handle.op.type == "Placeholder":
            tf.raw_ops.DisableCopyOnRead(resource=handle)


def _scattered(
    ops: Sequence[tf.Operation], known: dict[Any, list[tf.Tensor]]
) -> Iterator[tf.Tensor]:
    """The handles of variables whose rows `ops` change, some of them twice."""
    for op in ops:
        if op.type.startswith(SCATTERS):
            yield op.inputs[0]
        elif may_call(op) and not is_compiled_by_xla(op):
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
