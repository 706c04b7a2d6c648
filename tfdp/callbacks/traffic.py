"""`Traffic`: the bytes that a step sends, in the progress bar and in TensorBoard."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfdp.errors import ConfigurationError
from tfdp.exchange.engine import Engine
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.exchange.traffic import TrafficMeter


class Traffic(keras.callbacks.Callback):
    """Adds the bytes that a training step sends to the logs of batches and epochs.

    Two numbers, of this worker (all replicas of this process together), each the mean
    over the steps of the batch or of the epoch:

        bytes_within_hosts     what its replicas hand to each other
        bytes_between_hosts    what it sends to other workers

    From there the progress bar shows them, `History` and `CSVLogger` keep them, and
    `keras.callbacks.TensorBoard` writes them. What comes between batches is left out:
    validation, and what other callbacks do.

    Within a host each tensor that one replica hands to another counts with its size,
    also where memory is shared and nothing is copied, or what TensorFlow's ring sends;
    in steps that leave a conditional's exchange out (gradient accumulation) it does not
    count. Simulated hosts (`Communication(hierarchy=...)`) are one. What comes back to
    `fit` (metrics, predictions) does not count.

    Between hosts it is what the link has sent: gradients, numbers of samples, sums of
    metrics, and the header of each exchange; not heartbeats, nor what TCP adds. MPI and
    TensorFlow's ring do not tell: there it is what a ring sends for these sums, the
    least that any algorithm does.

    A number that nobody knows is left out of the logs: between hosts with NCCL, and
    within where strings travel.

    Without a strategy, and on one replica, both are 0. Place it before the callbacks
    that shall see it, and note that Keras waits for each batch before it starts the
    next.

    Raises:
      ConfigurationError: when training starts: under a strategy of several replicas
        that is not tfdp's, or is of a TPU, whose exchanges nobody counts; and with
        `run_eagerly=True`, where TensorFlow exchanges in its own way.

    Cost: the training step is traced once more, when training begins and after it has
    ended; in each step a few microseconds. Nothing in a `fit` without it.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)
    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((16, 4), "float32")
    history = model.fit(
        x, x[:, :1], batch_size=8, verbose=0, callbacks=[tfdp.callbacks.Traffic()]
    )
    print(history.history["bytes_within_hosts"])  # 2 x 20 bytes of gradients: [40.0]
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._reader: TrafficReader | None = None
        self._before = self._epoch = Reading()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count: in graphs, which are therefore built anew.

        Raises:
          ConfigurationError: where nobody could.
        """
        engine = engine_of(self.model, "Traffic")
        self._close()  # what a training that failed has left
        if engine is None:
            return
        self._reader = TrafficReader(engine)
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's sums."""
        self._epoch = Reading()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Leaves out what came since the last batch: validation, other callbacks'."""
        self._before = self._read()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Adds what the batch's steps have sent."""
        passed = self._read().plus(self._before, sign=-1)
        self._epoch = self._epoch.plus(passed)
        if logs is not None:
            logs.update(self._means(passed))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds what the steps of the epoch have sent."""
        if logs is not None:
            logs.update(self._means(self._epoch))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Counts no more; the next training builds graphs that do not, either."""
        if self._reader is None:
            return
        self._close()
        self.model.make_train_function(force=True)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _read(self) -> Reading:
        return Reading() if self._reader is None else self._reader.read()

    def _means(self, passed: Reading) -> dict[str, float]:
        # Without an engine no step is counted, and none sends anything.
        steps = max(passed.steps, 1)
        return {
            f"bytes_{where}_hosts": sent / steps
            for where, sent in (("within", passed.within), ("between", passed.between))
            if sent is not None
        }


# What the steps of a `fit` have sent, read when somebody asks.


@dataclasses.dataclass(frozen=True)
class Reading:
    """What had been counted at one moment.

    Args:
      steps: that had run.
      within, between: bytes; None where nobody counts them.
    """

    steps: int = 0
    within: int | None = 0
    between: int | None = 0

    def plus(self, other: Reading, sign: int = 1) -> Reading:
        """Both together; with `sign=-1` what came since `other`."""

        def joined(mine: int | None, theirs: int | None) -> int | None:
            return None if mine is None or theirs is None else mine + sign * theirs

        return Reading(
            self.steps + sign * other.steps,
            joined(self.within, other.within),
            joined(self.between, other.between),
        )


class TrafficReader:
    """Counts what the replicas of this process send, in graphs that are built from now.

    Args:
      engine: what exchanges; None: there is one replica alone, which sends nothing.
    """

    def __init__(self, engine: Engine | None):
        self._engine = engine
        self._meter = TrafficMeter()
        if engine is not None:
            engine.traffic.meters.add(self._meter)

    def read(self) -> Reading:
        """What was sent so far."""
        if self._engine is None:
            return Reading()
        return Reading(self._meter.steps, *self.sent())

    def sent(self) -> tuple[int | None, int | None]:
        """The bytes within and between hosts; the steps are not asked for."""
        if self._engine is None:
            return 0, 0
        return self._meter.sent_bytes, self._engine.sent_between_hosts()

    def close(self) -> None:
        """Graphs that are built from now on do not count for it."""
        if self._engine is not None:
            self._engine.traffic.meters.discard(self._meter)


def engine_of(model: keras.Model, who: str) -> Engine | None:
    """What exchanges in the steps of `model`; None where there is one replica alone.

    Raises:
      ConfigurationError: nobody can count there; naming `who` asked.
    """
    strategy = model.distribute_strategy
    reducer = getattr(strategy.extended, "reducer", None)
    if not isinstance(reducer, GradientPipeline):
        if strategy.num_replicas_in_sync == 1:
            return None
        raise ConfigurationError(
            f"{who} counts what tfdp sends between CPUs or GPUs, and the model was "
            f"compiled under {type(strategy).__name__}. Make it under "
            "tfdp.DataParallelStrategy or tfdp.MultiHostDataParallelStrategy, or leave "
            "the callback out."
        )
    if model.run_eagerly and reducer.engine.replicas > 1:
        raise ConfigurationError(
            f"{who} counts in graphs, and the model was compiled with "
            "run_eagerly=True, where TensorFlow exchanges in its own way. Compile with "
            "run_eagerly=False, or leave the callback out."
        )
    return reducer.engine
