"""Where each worker's time went in a step, carried to all workers by the next step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private.names import (
    make_counter,
    make_note,
    run_independently,
    time_in_graph,
)
from tfdp.chain.reduction import Reduction, Stage
from tfdp.errors import ConfigurationError
from tfdp.hosts.python_calls import counted

#: The columns of a table: rows of the batch, else seconds.
#:
#: step       from the end of the sums of the step before to the end of this step's
#: input      that steps waited for their batches
#: compute    until the worker's own gradients were ready, without input, and without
#:            waiting for exchanges that come before those of gradients
#: waiting    in exchanges with other workers, their transfers included
#: sending    that the worker's sends were blocked: by its link, or by a peer that does
#:            not read yet
#: arriving   that blocks of data were under way from this worker to its peers, by the
#:            clocks of the peers, from a block's first bytes to its last
#: rows       of the worker's batches
COLUMNS = ("step", "input", "compute", "waiting", "sending", "arriving", "rows")
STEP, INPUT, COMPUTE, WAITING, SENDING, ARRIVING, ROWS = range(len(COLUMNS))

#: The number of tables that are kept.
RECENT = 64
# A sum is about the update before, whose time begins with the end of the one before it.
FIRST = 3


class StepTimes(Stage):
    """Measures each step on each worker, and lets all workers read all numbers.

    The numbers of step t are a rider of the sums of step t + 1: a table [workers,
    columns] to which each worker adds its own row (and the column `arriving` of the
    workers that send to it). So all workers read the same bits, no exchange is added,
    and no bucket waits for it. A step is one sum of gradients, so with gradient
    accumulation it spans several batches. Attach it to the steps of a model with
    `tfdp.step.observers.attach` before the step is traced.

    Args:
      strategy: a `MultiHostDataParallelStrategy` whose hosts are linked by sockets.

    Raises:
      ConfigurationError: the hosts are not linked by sockets, or there is one.

    Cost: a call of Python and a few small operations per step, 28 bytes per worker in
    the first bucket.
    """

    def __init__(self, strategy: Any):
        transport = strategy.extended.reducer.transport
        link = getattr(transport.outer, "link", None)
        is_timed = transport.seconds_between_hosts is not None
        if link is None or link.exchanges_of_steps is None or not is_timed:
            has = "one host" if link is None else f"engine={transport.name!r}"
            raise ConfigurationError(
                "The times of workers are measured where several hosts exchange over "
                f'sockets (Communication(engine="sockets")). This strategy has {has}.'
            )
        self._link = link
        replicas = len(strategy.extended.worker_devices)
        shape = [RECENT, link.workers, len(COLUMNS)]
        self._tables = make_note(tf.zeros(shape), tf.float32)
        self._count = make_counter()
        # By replica: when its gradients were ready, and when their sums were.
        self._marks = [
            make_note(tf.zeros([4], tf.float64), tf.float64) for _ in range(replicas)
        ]
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
        float32, the same bits on all workers; None before the third sum."""
        tables = self.since(-1)
        return tables[-1] if tables else None

    def since(self, step: int) -> list[tuple[int, np.ndarray]]:
        """The tables of the steps after `step`, at most `RECENT`, in order."""
        count = int(self._count.numpy())
        first = max(FIRST, count - RECENT + 1, step + 3)
        if first > count:
            return []
        tables = self._tables.numpy()
        return [
            (one - 2, tables[(one - 1) % RECENT]) for one in range(first, count + 1)
        ]

    def begin_step(self, rows: Any, batch: Sequence[tf.Tensor]) -> None:
        self._summed, self._table = {}, None
        began, arrived = time_in_graph([]), time_in_graph(batch)
        marks = tf.stack([mark.read_value() for mark in self._marks])
        own_rows = tf.cast(0 if rows is None else rows, tf.float64)
        table = tf.numpy_function(
            counted(self._next_table),
            [marks, arrived - began, own_rows],
            tf.float32,
            stateful=True,
            name="tfdp_step_times",
        )
        if not tf.executing_eagerly():
            run_independently(table.op)
        self._table = tf.ensure_shape(table, self._empty().shape)

    def before(self, reduction: Reduction) -> None:
        rank = reduction.rank
        if self._table is None or rank in self._summed:
            return  # the second sum of a step: that of another optimizer
        own = [one for one in reduction.gradients if one is not None]
        self._summed[rank] = reduction, _time_of(own)
        table = self._table if rank == 0 else tf.zeros(self._table.shape)
        # In the type of the gradients, to share their bucket.
        is_double = all(one.dtype == tf.float64 for one in own)
        reduction.riders.append(tf.cast(table, tf.float64 if is_double else tf.float32))

    def after(self, reduction: Reduction) -> None:
        rank = reduction.rank
        of, ready = self._summed.get(rank, (None, None))
        if of is not reduction:
            return
        [total] = reduction.take_riders(1)
        sums = [one for one in reduction.gradients if one is not None]
        with tf.device("CPU:0"):
            mark = tf.concat([ready, _time_of([*sums, total])], axis=0)
            # After the table was read: the sum of riders needs what was made of it.
            self._marks[rank].assign(mark)
            if rank == 0:
                place = tf.convert_to_tensor(self._count) % RECENT
                row = tf.cast(total, tf.float32)
                self._tables.scatter_nd_update(place[None, None], row[None])
                self._count.assign_add(1)

    def _empty(self) -> np.ndarray:
        return np.zeros([self._link.workers, len(COLUMNS)], np.float32)

    def _next_table(
        self, marks: np.ndarray, waited_seconds: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """This worker's part of the table of the last sum; called when a batch is
        there."""
        ready, ended = float(marks[:, 0].max()), float(marks[0, 2])
        if ended > self._ended:  # a batch of an accumulation may have had no sum
            self._own = self._part(ready, ended)
            self._ended, self._input, self._rows = ended, 0.0, 0.0
        self._input += max(0.0, float(waited_seconds))
        self._rows += float(rows)
        return self._own

    def _part(self, ready: float, ended: float) -> np.ndarray:
        link, table, began = self._link, self._empty(), self._ended
        own = table[link.rank]
        # Exchanges are timed by another clock than graphs.
        offset = time.time() - time.monotonic()
        waiting, before, last = 0.0, 0.0, self._last_exchange
        # A copy: the thread of an exchange appends.
        for one in list(link.exchanges_of_steps)[::-1]:
            if one.number <= self._last_exchange:
                break
            end = one.end + offset
            if end > ended:
                continue
            last = max(last, one.number)
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
        own[COMPUTE] = max(0.0, ready - began - self._input - before)
        own[WAITING] = waiting
        own[SENDING] = self._moved.sending - moved.sending
        own[ROWS] = self._rows
        pairs = zip(self._moved.receiving, moved.receiving, strict=True)
        for place, (now, earlier) in enumerate(pairs):
            sender = (link.rank - 2**place) % link.workers
            table[sender, ARRIVING] += now - earlier
        return table


def _time_of(values: Sequence[Any]) -> tf.Tensor:
    """[seconds since 1970 when `values` are computed, a number to ignore]."""
    dense = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
    # On a GPU an operation counts as done when it is queued. A number that is copied
    # to the host shows that the device has computed it, and what was queued before.
    with tf.control_dependencies(dense):
        shown = tf.cast(tf.reduce_sum(tf.reshape(dense[-1], [-1])[:1]), tf.float64)
    with tf.device("CPU:0"):
        shown = tf.identity(shown)
        return tf.stack([time_in_graph([shown]), shown])
