"""Rows of a global batch by the hosts' speed (`balance="speed"`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdp._private import frames
from tfdp._private.names import make_note, note_in_graph, run_unordered
from tfdp._private.whole_input import taken_whole
from tfdp.chain.reduction import Reduction, Stage
from tfdp.chain.step_times import StepTimes
from tfdp.data.split import has_rows, length_of
from tfdp.errors import ConfigurationError
from tfdp.hosts.python_calls import counted
from tfdp.plan.balance import SpeedBalance
from tfdp.plan.stragglers import COMPUTE
from tfdp.tracing.rows import rows_between
from tfdp.tracing.step import Step


class RowShares(Stage):
    """Which rows of a batch this host takes, by the times of all hosts' steps.

    All hosts get the same times with the sums of a step, and decide by the same
    function; so from the next batch on all of them split in the same way. They split
    when a step takes its batch, because they read ahead by different amounts.

    Args:
      strategy: a `MultiHostDataParallelStrategy`.

    Raises:
      ConfigurationError: the hosts are not linked by sockets.

    Cost: that of `StepTimes`, a call of Python per step, and memory for two global
    batches on each host.
    """

    def __init__(self, strategy: Any):
        self._times = StepTimes(strategy)
        self._strategy, link = strategy, strategy.link
        self._rank, self._replicas = link.rank, len(strategy.extended.worker_devices)
        self._balance = SpeedBalance(link.workers, self._replicas)
        #: Host h takes the rows from n ends[h] // ends[-1] to n ends[h + 1] // ends[-1]
        #: of n.
        self._ends = make_note(self._ends_now(), tf.int64)

    @property
    def shares(self) -> tuple[int, ...]:
        """Whole numbers, one per host, in proportion to which a batch is shared."""
        return self._balance.shares

    def distributed(self, dataset: tf.data.Dataset, options: Any) -> Any:
        """A distributed dataset of global batches, which steps take by `split`."""
        if options is not None:
            self.refuse("such a dataset takes no tf.distribute.InputOptions")
        fit = frames.training_input_of_caller()
        if fit is not None and self._strategy.is_jitted(fit["self"]):
            self.refuse(
                "jit_compile=True would compile the step again for each number of rows"
            )
        return taken_whole(
            tf.distribute.Strategy.distribute_datasets_from_function(
                self._strategy, lambda _: dataset
            )
        )

    def attach(self, step: Step) -> None:
        """Lets a step be measured, if it trains."""
        if step.is_local:
            self.refuse("with sync=... a step has no sum of all hosts to decide by")
        step.stages.append(self)

    def refuse(self, why: str) -> NoReturn:
        raise ConfigurationError(
            f"balance={self._strategy.balance!r} gives hosts rows of the same global "
            f"batches by their speed, and {why}. Leave one of the two out."
        )

    def split(self, batch: Any) -> list[Any]:
        """The part of each replica of this host, in the order of their ranks."""
        with tf.device("CPU:0"):
            ends = self._ends.read_value()
            of = [
                functools.partial(self._rows_of, ends, r) for r in range(self._replicas)
            ]
            return [tf.nest.map_structure(own, batch) for own in of]

    def _rows_of(self, ends: tf.Tensor, replica: int, part: Any) -> Any:
        if not has_rows(part):
            return part
        rows = length_of(part)
        start = rows * ends[self._rank] // ends[-1]
        here = rows * ends[self._rank + 1] // ends[-1] - start
        first, last = (-(-here * r // self._replicas) for r in (replica, replica + 1))
        return rows_between(part, start + first, start + last)

    def begin_step(self, rows: Any, batch: Sequence[tf.Tensor]) -> None:
        self._times.begin_step(rows, batch)

    def before(self, reduction: Reduction) -> None:
        self._times.before(reduction)

    def after(self, reduction: Reduction) -> None:
        riders = list(reduction.riders)
        self._times.after(reduction)
        # A second optimizer of a step has no table.
        if reduction.rank == 0 and len(reduction.riders) < len(riders):
            self._decide(riders[-1], reduction.step.batch.total)

    def _decide(self, table: tf.Tensor, rows: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            ends = tf.numpy_function(
                counted(self._next_ends),
                [table[:, COMPUTE], tf.cast(rows, tf.int64)],
                tf.int64,
                stateful=True,
                name="tfdp_row_shares",
            )
            run_unordered(ends)
            note_in_graph(self._ends, ends)

    def _next_ends(self, seconds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self._balance.note(seconds.tolist(), int(rows))
        return self._ends_now()

    def _ends_now(self) -> np.ndarray:
        return np.cumsum([0, *self.shares], dtype=np.int64)
