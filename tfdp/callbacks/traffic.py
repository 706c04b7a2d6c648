"""`Traffic`: the bytes that a step sends, in the progress bar and in TensorBoard."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfdp.callbacks.other_callbacks import Logs
from tfdp.errors import ConfigurationError
from tfdp.exchange.traffic import TrafficMeter
from tfdp.strategies.gather_from_hosts import refuse_strategy, refuse_without_graphs


class Traffic(keras.callbacks.Callback):
    """Adds the bytes that a training step sends to the logs of batches and epochs.

    Two numbers for this worker (all replicas of the process together), each the mean
    over the steps of the batch or epoch:

        bytes_within_hosts     what its replicas pass to each other
        bytes_between_hosts    what it sends to other workers

    Traffic between batches is left out: validation, and other callbacks. Place it
    before callbacks that read the values.

    Within a host, each tensor passed between replicas counts with its size, even if
    memory is shared, or what TensorFlow's ring sends; not in steps that skip a
    conditional's exchange (gradient accumulation). Simulated hosts
    (`Communication(hierarchy=...)`) are one. Results returned to `fit` do not count.

    Between hosts it is what the transport has sent: gradients, sample counts, metric
    sums and exchange headers; not heartbeats, nor TCP overhead. MPI and TensorFlow's
    ring do not report it: for them it is what a ring sends for these sums, the minimum.

    Unknown numbers are left out of the logs: between hosts with NCCL, and within if
    strings are sent. Without a strategy, and on one replica, both are 0.

    Raises:
      ConfigurationError: when training starts: under a strategy of several replicas
        that is not tfdp's or of a TPU, or with `run_eagerly=True`.

    Cost: the training step is retraced when training begins and after it ends; a few
    microseconds per step; Keras waits for each batch before it starts the next.

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

    def on_train_begin(self, logs: Logs = None) -> None:
        transport = transport_of(self.model, "Traffic")
        self._close()  # left by a failed training
        if transport is None:
            return
        self._reader = TrafficReader(transport)
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = Reading()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Leaves out traffic since the last batch: validation, other callbacks."""
        self._before = self._read()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        passed = self._read().plus(self._before, sign=-1)
        self._epoch = self._epoch.plus(passed)
        if logs is not None:
            logs.update(self._means(passed))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs.update(self._means(self._epoch))

    def on_train_end(self, logs: Logs = None) -> None:
        if self._reader is not None:
            self._close()
            self.model.make_train_function(force=True)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _read(self) -> Reading:
        return Reading() if self._reader is None else self._reader.read()

    def _means(self, passed: Reading) -> dict[str, float]:
        # Without a backend no step is counted, and none sends anything.
        steps = max(passed.steps, 1)
        return {
            f"bytes_{where}_hosts": sent / steps
            for where, sent in (("within", passed.within), ("between", passed.between))
            if sent is not None
        }


@dataclasses.dataclass(frozen=True)
class Reading:
    """Steps run and bytes sent up to one moment; None: unknown."""

    steps: int = 0
    within: int | None = 0
    between: int | None = 0

    def plus(self, other: Reading, sign: int = 1) -> Reading:
        """The sum; with `sign=-1` the difference."""

        def joined(mine: int | None, theirs: int | None) -> int | None:
            return None if mine is None or theirs is None else mine + sign * theirs

        return Reading(
            self.steps + sign * other.steps,
            joined(self.within, other.within),
            joined(self.between, other.between),
        )


class TrafficReader:
    """Counts what replicas of this process send, in graphs built from now on."""

    def __init__(self, transport: Any):
        self._transport = transport
        self._meter = TrafficMeter()
        if transport is not None:
            transport.traffic.meters.add(self._meter)

    def read(self) -> Reading:
        if self._transport is None:
            return Reading()
        return Reading(self._meter.steps, *self.sent())

    def sent(self) -> tuple[int | None, int | None]:
        """The bytes within and between hosts, without a query of the steps."""
        if self._transport is None:
            return 0, 0
        return self._meter.sent_bytes, self._transport.bytes_between_hosts

    def close(self) -> None:
        """Graphs built from now on do not count."""
        if self._transport is not None:
            self._transport.traffic.meters.discard(self._meter)


def transport_of(model: keras.Model, name: str) -> Any:
    """The transport of the steps of `model`; None: one replica; errors show `name`."""
    strategy: Any = model.distribute_strategy
    try:
        refuse_strategy(strategy, name)
    except ConfigurationError:
        if strategy.num_replicas_in_sync == 1:
            return None
        raise
    transport = strategy.extended.reducer.transport
    if transport.replicas > 1:
        refuse_without_graphs(model, name)
    return transport
