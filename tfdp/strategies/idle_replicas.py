"""Warns of replicas without rows, or with the rows of the others."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import frames
from tfdp.data.padding import stated_batch_rows
from tfdp.data.split import bounds_of_host
from tfdp.errors import DeviceWarning, SameRowsWarning
from tfdp.strategies.in_words import is_without_fit_message
from tfdp.tracing.step import Step

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def idle_ranks(rows: int, hosts: int, replicas: int) -> list[int]:
    """The ranks, of `hosts` times `replicas`, that get none of the `rows` of a batch.

    >>> idle_ranks(8, 1, 7)
    [4, 5, 6]
    """
    idle: list[int] = []
    for host in range(hosts):
        begin, end = bounds_of_host(rows, host, hosts)
        own = end - begin
        working = -(-own // max(1, -(-own // replicas)))
        idle += range(host * replicas + working, (host + 1) * replicas)
    return idle


def warn_of_idle_replicas(strategy: Any, dataset: Any) -> None:
    """Warns, once per strategy, of an input for `fit`, or for a loop of the user's own,
    that leaves replicas without rows in every step."""
    is_to_train = frames.training_input_of_caller() or frames.loop_around() is None
    if not (is_to_train and strategy.has_fixed_shares and strategy.is_chief):
        return
    count = strategy.num_replicas_in_sync
    rows = stated_batch_rows(dataset) if count > 1 else None
    if rows is None or strategy in _warned or is_without_fit_message():
        return
    idle = idle_ranks(rows, strategy.hosts, count // strategy.hosts)
    if not idle:
        return
    _warned.add(strategy)
    sizes = [rows // count * count, -(-rows // count) * count]
    warnings.warn(
        f"Batches of {rows} rows leave {len(idle)} of {count} replicas (rank "
        f"{', '.join(map(str, idle))}) without a row in every step: they compute for "
        f"nothing. Use {' or '.join(str(size) for size in sizes if size)} as the batch "
        f"size, or another multiple of {count}; or fewer replicas.",
        DeviceWarning,
        stacklevel=3,
    )


# Keras distributes the dataset of `fit`; a custom loop must do it.

_warned_of_same_rows: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_same_rows(strategy: Any, arguments: Any, step: Step) -> None:
    """Warns, once per strategy, if an optimizer trained on rows that replicas share."""
    if step.replicas == 1 or not step.has_updated or strategy in _warned_of_same_rows:
        return
    values = tf.nest.flatten(arguments)
    if any(isinstance(value, tf.distribute.DistributedValues) for value in values):
        return
    shape = next((value.shape for value in values if _has_rows(value)), None)
    if shape is None:
        return
    _warned_of_same_rows.add(strategy)
    warnings.warn(
        f"strategy.run gave all {step.replicas} replicas the same tensor of shape "
        f"{tuple(shape)}, and an optimizer trains on it: all rows are computed "
        f"{step.replicas} times. Loop over strategy.experimental_distribute_dataset("
        "dataset), which gives each replica its part of a batch. If the tensor is no "
        "batch (a table, say), do not pass it as an argument.",
        SameRowsWarning,
        stacklevel=4,
    )


def _has_rows(value: Any) -> bool:
    is_tensor = tf.is_tensor(value) and not isinstance(value, tf.Variable)
    return (is_tensor or isinstance(value, np.ndarray)) and value.shape not in ((), [])
