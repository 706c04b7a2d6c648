"""Warns of batches too small to give each replica a row."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from tfdp._private import frames
from tfdp.data.padding import stated_batch_rows
from tfdp.data.split import bounds_of_host
from tfdp.errors import DeviceWarning
from tfdp.strategies.in_words import is_without_fit_message

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
