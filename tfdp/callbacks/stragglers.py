"""`Stragglers`: names the worker for which the others wait, while they train."""

from __future__ import annotations

import statistics
import sys

import keras

from tfdp._private.keras_fit import callbacks_around
from tfdp.callbacks.other_callbacks import Logs
from tfdp.callbacks.step_count import is_due
from tfdp.chain.step_times import StepTimes
from tfdp.checks import check_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.stragglers import Scores, SlowWorker
from tfdp.step.find_optimizers import optimizers_of, optimizers_with_sync
from tfdp.step.observers import attach
from tfdp.strategies.gather_from_hosts import refuse_without_graphs

# Fewer steps do not show what is usual.
FEWEST_STEPS = 3


class Stragglers(keras.callbacks.Callback):
    """Names the worker for which the others wait, the likely cause, and what it costs.

    A worker that in a step of s seconds is w in exchanges, of which its data is under
    way for l, is busy for b = s - w + l. Over the `report_every` steps since the last
    report, with the median m of b over the steps:

        to the best worker     m / the least m of a worker
        to its own best        m / its least m of a report so far
        lost in a step         the median of b - (the median of the others' b)

    The worker with the largest loss is slow if that is a tenth of a step at least, and
    the others wait for it in three steps of four at least. The cause is the
    part by which it exceeds the others most: "input"; "compute", which is gradients,
    update and callbacks, and input with `steps_per_execution` above 1; or "link", over
    which it sends. It is "compute" from a third of the largest on: a busy processor
    delays input and sends, too. Rare pauses change no median.

    Worker 0 prints a line for each new slow worker or cause, which `tfdp report` shows
    with `RunRecord`. Logs of epochs (and TensorBoard) get, the same on all workers,
    `straggler_worker` (-1: none in most reports), `straggler_lost_share` of a step,
    `straggler_to_best` and `straggler_to_own_best`. Nothing is measured on one worker.

    Args:
      report_every: steps of a report, 3 to 60. `fit` may make several at a time.

    Raises:
      ConfigurationError: `report_every` is not as above; when training starts: under a
        strategy that is not tfdp's or of a TPU, between hosts without sockets, with
        `Communication(min_hosts=...)`, `sync=...` or `run_eagerly=True`.

    Cost: about 0.2 ms of processor time in a step (0.5% of 40 ms), and 28 bytes per
    worker in the first bucket (with `wire_dtype` or `shard`, in an exchange of their
    own). From 3 workers on they move where others begin to add, which changes last
    bits. The step is retraced when training begins and ends; Keras waits for each batch
    before it starts the next.

    ```python
    import keras
    import numpy as np
    import tfdp

    with tfdp.auto_strategy().scope():  # several workers: `tfdp launch`
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    stragglers = tfdp.callbacks.Stragglers()
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[stragglers])
    print(stragglers.found)  # on one worker: []
    ```
    """

    def __init__(self, report_every: int = 10):
        super().__init__()
        check_whole("report_every", report_every, least=FEWEST_STEPS, most=60)
        self.report_every = report_every
        #: What was printed, in order.
        self.found: list[SlowWorker] = []
        self._times: StepTimes | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._close()  # left by a failed training
        self.found, self._examined = [], 0
        strategy = self.model.distribute_strategy
        cluster = getattr(strategy, "cluster", None)
        if cluster is None or cluster.workers == 1:
            return
        _check_can_measure(self.model)
        self._prints = cluster.rank == 0
        self._times, self._scores = StepTimes(strategy), Scores(cluster.workers)
        others = callbacks_around(self.model)
        self._recorders = [one for one in others if hasattr(one, "note_straggler")]
        self._detach = attach(self.model, self._times)
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._batches = 0
        self._of_epoch: list[SlowWorker | None] = []

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        before, self._batches = self._batches, batch + 1
        if self._times is not None and is_due(self.report_every, before, batch + 1):
            self._report(self._times)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._times is None:
            return
        if not self._of_epoch:
            self._report(self._times)
        if logs is not None:
            logs.update(_in_logs(self._of_epoch))

    def on_train_end(self, logs: Logs = None) -> None:
        if self._times is not None:
            self._close()
            self.model.make_train_function(force=True)

    def _close(self) -> None:
        if self._times is not None:
            self._detach()
        self._times = None

    def _report(self, times: StepTimes) -> None:
        tables = times.since(self._examined)
        if len(tables) < FEWEST_STEPS:
            return
        self._examined = tables[-1][0]
        seconds = [table.tolist() for _, table in tables]
        found = self._scores.slowest(self._examined, seconds)
        self._of_epoch.append(found)
        last = [(one.worker, one.cause) for one in self.found[-1:]]
        if found is None or [(found.worker, found.cause)] == last:
            return
        self.found.append(found)
        for recorder in self._recorders:
            recorder.note_straggler(found.step, str(found))
        if self._prints:
            line = f"tfdp: step {found.step}: {found}"
            print(line, file=sys.stderr, flush=True)


def _in_logs(found: list[SlowWorker | None]) -> dict[str, float]:
    """The reports of an epoch, as numbers."""
    workers = [-1 if one is None else one.worker for one in found]
    worker = statistics.mode(workers or [-1])
    own = [one for one in found if one is not None and one.worker == worker]
    return {
        "straggler_worker": worker,
        "straggler_lost_share": statistics.median([o.lost_share for o in own] or [0]),
        "straggler_to_best": statistics.median([o.to_best for o in own] or [1]),
        "straggler_to_own_best": statistics.median([o.to_own_best for o in own] or [1]),
    }


def _check_can_measure(model: keras.Model) -> None:
    strategy = model.distribute_strategy
    refuse_without_graphs(model, "Stragglers")
    for is_so, what in (
        (getattr(strategy, "elastic_hosts", None), "Communication(min_hosts=...)"),
        (optimizers_with_sync(optimizers_of(model), strategy), "sync=..."),
    ):
        if is_so:
            raise ConfigurationError(
                "Stragglers compares the graphs of workers that step together, but "
                f"this training has {what}. Train without it, or remove the callback."
            )
