"""`Stragglers`: names the worker for which the others wait, while they train."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import keras

from tfdp._private.keras_fit import callbacks_around
from tfdp.callbacks.gather_from_hosts import refuse_strategy
from tfdp.callbacks.other_callbacks import Logs
from tfdp.callbacks.step_count import is_due
from tfdp.chain.step_times import StepTimes
from tfdp.checks import check_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.stragglers import Scores, SlowWorker
from tfdp.step.observers import attach, detach

# Fewer steps do not show what is usual.
FEWEST_STEPS = 3


class Stragglers(keras.callbacks.Callback):
    """Names the worker for which the others wait, the likely cause, and what it costs.

    A synchronous step takes as long as its slowest worker. Each worker measures its
    steps: the time until its batch was there, the time in exchanges, and how long its
    data was under way. With the time s_r of a step on worker r, w_r of it in exchanges
    and l_r for its data, the worker was busy for b_r = s_r - w_r + l_r. Every
    `report_every` steps, over the steps since the last report:

        to the best rank       median b_r / min over workers of median b
        to its own best        median b_r / least median b_r of a report so far
        lost in a step         median over steps of (b_r - median of the others' b)

    The worker with the largest loss is a straggler if that is a tenth of a step at
    least, and three standard errors of the median (from the median absolute
    deviation). The cause is the part by which it exceeds the others most: "input",
    "compute" (gradients, update, callbacks: the rest of b), or "link", the network
    link on which it sends. Rare pauses do not change a median.

    Worker 0 prints one line for each new straggler or cause. The logs of an epoch (and
    so TensorBoard's scalars) get, the same on all workers, `straggler_worker` (-1:
    none), `straggler_lost_share` of a step, `straggler_to_best` and
    `straggler_to_own_best`. With `RunRecord`, `tfdp report` shows what was printed.

    Does nothing on one worker. The replicas of one worker are not told apart.

    Args:
      report_every: how many steps a report is about, 3 to 60.

    Raises:
      ConfigurationError: `report_every` is not as above; when training starts: under a
        strategy that is not tfdp's or of a TPU, with another engine than sockets
        between hosts, `Communication(min_hosts=...)`, an optimizer with `sync=...`, or
        `run_eagerly=True`.

    Cost: a call of Python and some small operations in a step, some 0.1 ms, and 28
    bytes per worker in the first bucket (with `wire_dtype` or `shard`, in an exchange
    of their own); the step is retraced when training begins and after it ends. Keras
    waits for each batch before it starts the next.

    ```python
    import keras
    import numpy as np
    import tfdp

    strategy = tfdp.auto_strategy()  # several workers: started by `tfdp launch`
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    stragglers = tfdp.callbacks.Stragglers()
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[stragglers])
    print(stragglers.found)  # the last reports: none on one worker
    ```

    Source: a step's slowest worker as its cost: C. Chen et al., 2018, LB-BSP, arXiv
    1806.02508, section 2. Differs from the paper: medians, and causes.
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
        strategy = self.model.distribute_strategy
        cluster = getattr(strategy, "cluster", None)
        if cluster is None or cluster.workers == 1:
            return
        _check_can_measure(self.model)
        self._times, self._scores = StepTimes(strategy), Scores(cluster.workers)
        self._prints = cluster.rank == 0
        self._examined, self._batches = 0, 0
        self._of_epoch: list[SlowWorker | None] = []
        self.found = []
        self._recorders: list[Callable[[SlowWorker], None]] = [
            other.note_straggler
            for other in callbacks_around(self.model)
            if hasattr(other, "note_straggler")
        ]
        attach(self.model, self._times)
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._batches, self._of_epoch = 0, []

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        before, self._batches = self._batches, batch + 1
        if is_due(self.report_every, before, self._batches):
            self._look()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._times is None:
            return
        if not self._of_epoch:
            self._look()
        if logs is not None:
            logs.update(_in_logs(self._of_epoch))

    def on_train_end(self, logs: Logs = None) -> None:
        if self._times is not None:
            self._close()
            self.model.make_train_function(force=True)

    def _close(self) -> None:
        if self._times is not None:
            detach(self.model, self._times)
        self._times = None

    def _look(self) -> None:
        """Examines the steps since the last look, and reports a new straggler."""
        tables = [] if self._times is None else self._times.since(self._examined)
        if len(tables) < FEWEST_STEPS:
            return
        self._examined = tables[-1][0]
        seconds = [table.tolist() for _, table in tables]
        found = self._scores.slowest(self._examined, seconds)
        self._of_epoch.append(found)
        if found is None:
            return
        last = self.found[-1] if self.found else None
        if last is not None and (last.worker, last.cause) == (
            found.worker,
            found.cause,
        ):
            return
        self.found.append(found)
        for record in self._recorders:
            record(found)
        if self._prints:
            line = f"tfdp: step {found.step}: {found}"
            print(line, file=sys.stderr, flush=True)


def _in_logs(looks: list[SlowWorker | None]) -> dict[str, float]:
    """The worker that cost most in an epoch, as numbers."""
    found = [look for look in looks if look is not None]
    lost: dict[int, float] = {}
    for each in found:
        lost[each.worker] = lost.get(each.worker, 0.0) + each.lost_share
    worker = max(lost, key=lambda rank: lost[rank], default=-1)
    own = [each for each in found if each.worker == worker]
    return {
        "straggler_worker": worker,
        "straggler_lost_share": lost.get(worker, 0.0) / max(len(looks), 1),
        "straggler_to_best": statistics.median([e.to_best for e in own] or [1.0]),
        "straggler_to_own_best": statistics.median(
            [e.to_own_best for e in own] or [1.0]
        ),
    }


def _check_can_measure(model: keras.Model) -> None:
    strategy, optimizer = model.distribute_strategy, model.optimizer
    refuse_strategy(strategy, "Stragglers")
    why = None
    if getattr(strategy, "elastic_hosts", None) is not None:
        why = (
            "compares workers that step together, but with "
            "Communication(min_hosts=...) each steps at its own pace"
        )
    elif getattr(optimizer, "sync", None) is not None:
        why = (
            "compares workers that step together, but with sync=... each steps at its "
            "own pace"
        )
    elif model.run_eagerly:
        why = "measures graphs. Compile with run_eagerly=False"
    if why is not None:
        raise ConfigurationError(f"Stragglers {why}, or remove the callback.")
