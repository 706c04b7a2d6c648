"""What a replica without rows brings to a gather: nothing.

It computes on a row that another one has, which is in the gather already. Rows that
fill a batch up would be in the gather as well: refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.autograph import library_code
from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.names import current_rank
from tfdp.errors import ConfigurationError
from tfdp.tracing.replica_invariance import GATHERED_ROWS
from tfdp.tracing.run import ReplicaRun

__all__ = ["with_own_gathers"]


def with_own_gathers(step: Callable, run: ReplicaRun) -> Callable:
    """`step`, whose `all_gather` along the first axis leaves borrowed rows out.

    Args:
      step: what every replica runs.
      run: in which it is traced.
    """
    if tf.executing_eagerly():
        return step

    @library_code
    @functools.wraps(step)
    def step_with_own_gathers(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        led = {"all_gather": functools.partial(_gather, context, run)}
        with instance_attributes(context, led):
            return step(*args, **kwargs)

    return step_with_own_gathers


def _gather(
    context: Any, run: ReplicaRun, value: Any, axis: int, options: Any = None
) -> Any:
    original = type(context).all_gather.__get__(context)
    if axis == 0:
        _refuse_filling(run, value)
        value = tf.nest.map_structure(lambda part: _own_rows(run, part), value)
    return tf.nest.map_structure(
        lambda rows: tf.identity(rows, name=GATHERED_ROWS),
        original(value, axis, options),
    )


def _refuse_filling(run: ReplicaRun, value: Any) -> None:
    padding = run.padding_of(current_rank())
    if padding is None:
        return
    for part in tf.nest.flatten(value):
        if tf.TensorShape(part.shape)[:1] == [padding.rows]:
            raise ConfigurationError(
                "all_gather was asked for what has a row for each row of a batch that "
                "was filled up to a fixed size (pad_batches): the filling would be in "
                "it. Leave out pad_batches, or give batches of one size "
                "(drop_remainder=True), which are not filled up."
            )


def _own_rows(run: ReplicaRun, value: Any) -> Any:
    """`value` without borrowed rows, where its length is one of rows.

    That is not known while the graph is built, where replicas borrow; a number that
    each replica has is of a known length.
    """
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0:
        return value
    if value.shape[0] is not None or run.owns_rows is None:
        return value
    own = tf.cast(run.has_own_rows(current_rank()), tf.int32)
    return value[: tf.shape(value)[0] * own]
