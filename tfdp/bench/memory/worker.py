"""Measures the memory of one sharded training: `python -m tfdp.bench.memory.worker`.

A process of its own: what a process has once taken from the system tells nothing of
what the next training needs. The request comes as JSON in the first argument; the
figures go as JSON into the file named by the second.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from typing import Any

from tfdp.cluster.process_memory import forget_peak, peak_bytes, resident_bytes
from tfdp.files.json_file import write_json

__all__ = ["MemoryFigures", "MemoryRequest", "main"]

SEED = 1
WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True)
class MemoryRequest:
    """A stack of square dense layers, trained by Adam.

    Args:
      devices: replicas, each on a logical CPU.
      stage: of ZeRO, 0 to 3; 3 computes each layer twice to gather it twice.
      layers: how many.
      width: of each layer; it has width x width weights.
      local_batch: samples of a replica.
    """

    devices: int
    stage: int
    layers: int
    width: int
    local_batch: int = 4

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return self.layers * self.width**2


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """What was found, in bytes per replica.

    Args:
      weights: in variables.
      slots: in variables of the optimizer.
      at_rest: resident memory between steps, above that of the process without a
        model, divided by the replicas.
      peak: the most during a step, likewise.
    """

    weights: float
    slots: float
    at_rest: float
    peak: float


def measure(request: MemoryRequest) -> MemoryFigures:
    """Trains a few steps and looks at the process."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(os.cpu_count() or 1)
    devices = tfdp.use_virtual_devices(request.devices)
    keras.utils.set_random_seed(SEED)
    _train(request, devices, layers=1, width=8, steps=1)
    gc.collect()
    before = resident_bytes()
    network, step = _train(
        request, devices, request.layers, request.width, WARM_UP_STEPS
    )
    gc.collect()
    at_rest = resident_bytes() - before
    forget_peak()
    loss = float(np.asarray(step()["loss"]))
    peak = peak_bytes() - before
    if not np.isfinite(loss):
        raise ValueError(f"The loss is {loss}: the figures would mean nothing.")
    return MemoryFigures(
        weights=_stored_bytes(network.trainable_variables) / request.devices,
        slots=_stored_bytes(network.optimizer.variables) / request.devices,
        at_rest=at_rest / request.devices,
        peak=peak / request.devices,
    )


def _train(
    request: MemoryRequest, devices: list[str], layers: int, width: int, steps: int
) -> Any:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    strategy = tfdp.DataParallelStrategy(devices, shard=request.stage, alone=True)
    with strategy.scope():
        network = keras.Sequential(
            [
                keras.Input((width,)),
                *(keras.layers.Dense(width, "relu", False) for _ in range(layers)),
            ]
        )
        network.compile(keras.optimizers.Adam(1e-5), "mse", jit_compile=False)
        network.optimizer.build(network.trainable_variables)
    if request.stage == 3:
        tfdp.remat(network, prefetch=0)
    batch = request.local_batch * request.devices
    x = np.random.default_rng(SEED).normal(size=(batch, width)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x)).repeat()
    batches = iter(
        strategy.experimental_distribute_dataset(data.batch(batch, drop_remainder=True))
    )
    network.make_train_function()

    def step() -> Any:
        return network.train_function(batches)

    for _ in range(steps):
        step()
    return network, step


def _stored_bytes(variables: Any) -> int:
    parts = [
        part
        for variable in variables
        for part in getattr(variable.value, "values", (variable.value,))
    ]
    return sum(part.numpy().nbytes for part in parts)


def main(arguments: list[str]) -> None:
    """Entry point of the worker process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request_json, result_path = arguments
    figures = measure(MemoryRequest(**json.loads(request_json)))
    write_json(result_path, dataclasses.asdict(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
