"""Measures where each worker's time goes; the next step carries it to all workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private.names import make_note, run_unordered, time_in_graph
from tfdp.chain.reduction import Reduction, Stage
from tfdp.errors import ConfigurationError
from tfdp.exchange.sparse import values_of
from tfdp.hosts.python_calls import counted
from tfdp.plan.stragglers import (
    ARRIVING,
    COLUMNS,
    COMPUTE,
    INPUT,
    ROWS,
    SENDING,
    STEP,
    WAITING,
)

#: The number of tables that are kept.
RECENT = 64
# The first two sums are about no step that has a beginning.
FIRST = 3


class StepTimes(Stage):
    """Measures each step on each worker, and lets all workers read all numbers.

    The numbers of step t are a rider of the sums of step t + 1: a table [workers,
    columns] (see `tfdp.plan.stragglers.COLUMNS`) to which each worker adds its own row,
    and the column `arriving` of the workers that send to it. So all workers read the
    same bits, no exchange is added, and no bucket waits for it. A step is one sum of
    gradients, so with gradient accumulation it spans several batches. Attach it with
    `tfdp.step.observers.attach`, within `fit`, before the step is traced.

    Args:
      strategy: a `MultiHostDataParallelStrategy` whose hosts are linked by sockets.

    Raises:
      ConfigurationError: the hosts are not linked by sockets, or there is one.

    Cost: a call of Python and a few small operations per step, 28 bytes per worker in
    the first bucket.
    """

    def __init__(self, strategy: Any):
        transport = strategy.extended.reducer.transport
        link = getattr(strategy, "link", None)
        is_timed = transport.seconds_between_hosts is not None
        if link is None or link.exchanges_of_steps is None or not is_timed:
            has = "one host" if link is None else f"engine={transport.name!r}"
            raise ConfigurationError(
                "The times of workers are measured where several hosts exchange over "
                f'sockets (Communication(engine="sockets")). This strategy has {has}.'
            )
        self._link = link
        replicas = len(strategy.extended.worker_devices)
        self._sum = make_note(tf.zeros([link.workers, len(COLUMNS)]), tf.float32)
        # By replica: when its gradients were ready, and when their sums were.
        self._marks = [
            make_note(tf.zeros([2], tf.float64), tf.float64) for _ in range(replicas)
        ]
        self._sums = 0
        self._tables: deque[tuple[int, np.ndarray]] = deque(maxlen=RECENT)
        # Of the graph under construction: the table, and by replica its reduction.
        self._table: tf.Tensor | None = None
        self._summed: dict[int, tuple[Reduction, tf.Tensor]] = {}
        # Of this worker, since the end of the last sums.
        self._ended = self._input = self._rows = 0.0
        self._last_exchange = -1
        self._moved = link.transfer_seconds()
        self._own = self._empty()

    def read(self) -> tuple[int, np.ndarray] | None:
        """The newest step with known times, from 0, and its table [workers, columns] in
        float32, the same bits on all workers; None before the fourth step."""
        return self._tables[-1] if self._tables else None

    def since(self, step: int) -> list[tuple[int, np.ndarray]]:
        """The tables of the steps after `step`, at most `RECENT`, in order."""
        return [one for one in list(self._tables) if one[0] > step]

    def begin_step(self, rows: Any, batch: Sequence[tf.Tensor]) -> None:
        self._summed, self._table = {}, None
        began, arrived = time_in_graph([]), time_in_graph(batch)
        marks = [mark.read_value() for mark in self._marks]
        own_rows = 0 if rows is None else rows
        table = tf.numpy_function(
            counted(self._next_table),
            [began, arrived, own_rows, self._sum.read_value(), *marks],
            tf.float32,
            stateful=True,
            name="tfdp_step_times",
        )
        run_unordered(table)
        table.set_shape(self._own.shape)
        self._table = table

    def before(self, reduction: Reduction) -> None:
        rank = reduction.rank
        if self._table is None or rank in self._summed:
            return  # the second sum of a step: that of another optimizer
        own = [one for one in reduction.gradients if one is not None]
        self._summed[rank] = reduction, _time_of(own)
        table = self._table if rank == 0 else tf.zeros(self._table.shape)
        # In the type of the gradients, to share their bucket.
        is_double = bool(own) and all(one.dtype == tf.float64 for one in own)
        reduction.riders.append(tf.cast(table, tf.float64 if is_double else tf.float32))

    def after(self, reduction: Reduction) -> None:
        rank = reduction.rank
        of, ready = self._summed.get(rank, (None, None))
        if of is not reduction:
            return
        [total] = reduction.take_riders(1)
        sums = [one for one in reduction.gradients if one is not None]
        with tf.device("CPU:0"):
            # After they were read: the sum of riders needs what was made of them.
            self._marks[rank].assign(tf.stack([ready, _time_of([*sums, total])]))
            if rank == 0:
                self._sum.assign(tf.cast(total, tf.float32))

    def _empty(self) -> np.ndarray:
        return np.zeros([self._link.workers, len(COLUMNS)], np.float32)

    def _next_table(
        self,
        began: np.ndarray,
        arrived: np.ndarray,
        rows: np.ndarray,
        total: np.ndarray,
        *marks: np.ndarray,
    ) -> np.ndarray:
        """Takes the table of the last sum; returns this worker's part of the next one.
        Called when a batch is there."""
        ready, ended = max(float(mark[0]) for mark in marks), float(marks[0][1])
        if ended > self._ended:  # a batch of an accumulation may have had no sum
            self._sums += 1
            if self._sums >= FIRST:
                self._tables.append((self._sums - 2, np.array(total)))
            self._own = self._part(ready, ended)
            self._ended, self._input, self._rows = ended, 0.0, 0.0
        self._input += max(0.0, float(arrived) - float(began))
        self._rows += float(rows)
        return self._own

    def _part(self, ready: float, ended: float) -> np.ndarray:
        link, table, began = self._link, self._empty(), self._ended
        own = table[link.rank]
        # Exchanges are timed by another clock than graphs.
        offset = time.time() - time.monotonic()
        waiting, before, last = 0.0, 0.0, self._last_exchange
        exchanges, seen = link.exchanges_of_steps, float("inf")
        for place in range(1, len(exchanges) + 1):
            one = exchanges[-place]
            if one.number <= self._last_exchange:
                break
            end = one.end + offset
            # Another thread may append, and so move what was seen to the next place.
            if one.number >= seen or end > ended:
                continue
            seen = one.number
            last = max(last, seen)
            waiting += one.end - one.start
            # Gradients travel while others are computed.
            if end <= ready and "bucket" not in one.label and "table" not in one.label:
                before += one.end - one.start
        self._last_exchange = last
        moved, self._moved = self._moved, link.transfer_seconds()
        if not began:
            return table
        own[STEP] = ended - began
        own[INPUT] = self._input
        own[WAITING] = waiting
        if not ready:  # all gradients are summed elsewhere, by shards
            ready, before = ended, waiting
        own[COMPUTE] = max(0.0, ready - began - self._input - before)
        own[SENDING] = self._moved.sending - moved.sending
        own[ROWS] = self._rows
        pairs = zip(self._moved.receiving, moved.receiving, strict=True)
        for place, (now, earlier) in enumerate(pairs):
            sender = (link.rank - 2**place) % link.workers
            table[sender, ARRIVING] += now - earlier
        return table


def _time_of(values: Sequence[Any]) -> tf.Tensor:
    """Seconds since 1970 when `values` are computed; 0 for none."""
    if not values:
        return tf.constant(0.0, tf.float64)
    dense = list(map(values_of, values))
    if "GPU" not in dense[-1].device:
        return time_in_graph(dense)
    # On a GPU an operation counts as done when it is queued. A number that is copied
    # to the host shows that the device has computed it, and what was queued before.
    with tf.control_dependencies(dense):
        shown = tf.cast(tf.reduce_sum(tf.reshape(dense[-1], [-1])[:1]), tf.float64)
    with tf.device("CPU:0"):
        # A nanosecond at most; unused, the copy would be left out.
        used = 1e-9 * tf.cast(tf.math.is_nan(tf.identity(shown)), tf.float64)
        return time_in_graph([used]) + used
