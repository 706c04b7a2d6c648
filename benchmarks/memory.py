"""Measures what memory each replica holds, beside what the formulas of ZeRO say.

At every stage of sharding. Each measurement is a process of its own: what a process has
once taken from the system says nothing of what the next training needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
from typing import Any

from benchmarks.shared import (
    add_devices,
    in_a_line,
    make_parser,
    needs_proc,
    run_script,
    write_report,
)
from tfdp.cluster.machine import forget_peak, peak_bytes, resident_bytes
from tfdp.plan.options import SHARD_STAGES
from tfdp.tools.processes.children import ProcessFailed, ask_child

# 12 layers of 2,896 x 2,896: 100.6 million weights.
LAYERS, WIDTH = 12, 2896
QUICK_LAYERS, QUICK_WIDTH, QUICK_STAGES = 3, 256, (3,)
# Of a model that takes what its graph takes, and next to nothing else.
NARROW = 96
FLOAT_BYTES = 4
# TensorFlow then returns what it frees to the system, so that resident memory tells
# what lives: no pool of its own (its oneDNN build has one, with oneDNN off as well), no
# pool of the C library.
ENVIRONMENT = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
SEED, WARM_UP_STEPS = 1, 2


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


def expected_bytes(request: MemoryRequest) -> MemoryFigures:
    """What the formulas say, in bytes per replica; float32 and Adam.

    With P parameters and N replicas: weights 4 P, slots 8 P and gradients 4 P, each
    divided by N from stage 3, 1 and 2 on; stage 3 has one gathered layer besides.

    Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.

    >>> figures = expected_bytes(MemoryRequest(devices=2, stage=1, layers=1, width=10))
    >>> figures.peak  # 8 P + 8 P / N
    1200.0
    """
    whole = FLOAT_BYTES * request.parameters
    shard = whole / request.devices
    weights = shard if request.stage >= 3 else whole
    slots = 2 * (shard if request.stage >= 1 else whole)
    gradients = shard if request.stage >= 2 else whole
    gathered = FLOAT_BYTES * request.width**2 if request.stage >= 3 else 0
    return MemoryFigures(
        weights=float(weights),
        slots=float(slots),
        at_rest=float(weights + slots),
        peak=float(weights + slots + gradients + gathered),
    )


def run(options: argparse.Namespace) -> int:
    """Measures every stage on every number of replicas."""
    needs_proc()
    layers, width = (QUICK_LAYERS, QUICK_WIDTH) if options.quick else (LAYERS, WIDTH)
    rows, failed = [], 0
    print(
        f"Adam on {layers * width**2 / 1e6:.1f}M float32 weights, {layers} layers; MB "
        "per replica, and as a share of what the formula says; the graph's own memory, "
        "in the last column, is taken off\n\n"
        f"{'N':>2} {'shard':>11} {'weights':>8} {'slots':>8} {'at rest':>15} "
        f"{'peak of a step':>17} {'graph':>6}",
        flush=True,
    )
    for number in options.devices:
        for stage in QUICK_STAGES if options.quick else range(len(SHARD_STAGES)):
            name = SHARD_STAGES[stage]
            request = MemoryRequest(number, stage, layers, width)
            try:
                graph = _graph_bytes(request, options.timeout_seconds)
                found = _measure(request, options.timeout_seconds)
            except ProcessFailed as error:
                failed = 1
                why = in_a_line(error)
                print(f"{number:>2} {name:>11} failed: {why}", file=sys.stderr)
                continue
            found = dataclasses.replace(
                found, at_rest=found.at_rest - graph, peak=found.peak - graph
            )
            expected = expected_bytes(request)
            print(_format_row(number, name, found, expected, graph), flush=True)
            rows.append(
                {
                    **dataclasses.asdict(request),
                    "measured": dataclasses.asdict(found),
                    "expected": dataclasses.asdict(expected),
                    "graph_bytes": graph,
                }
            )
    write_report(options.json, "memory", rows=rows)
    return failed


def _format_row(
    devices: int,
    name: str,
    found: MemoryFigures,
    expected: MemoryFigures,
    graph_bytes: float,
) -> str:
    def compared(key: str) -> str:
        measured, formula = getattr(found, key), getattr(expected, key)
        return f"{measured / 1e6:,.0f} ({measured / formula:.3f})"

    return (
        f"{devices:>2} {name:>11} {found.weights / 1e6:>8,.0f} "
        f"{found.slots / 1e6:>8,.0f} {compared('at_rest'):>15} {compared('peak'):>17} "
        f"{graph_bytes / 1e6:>6,.0f}"
    )


def _graph_bytes(request: MemoryRequest, timeout_seconds: float) -> float:
    """What the graph of such a model takes per replica, whatever its width."""
    narrow = _measure(dataclasses.replace(request, width=NARROW), timeout_seconds)
    return narrow.at_rest - narrow.weights - narrow.slots


def _measure(request: MemoryRequest, timeout_seconds: float) -> MemoryFigures:
    worker, asked = "benchmarks.memory", dataclasses.asdict(request)
    return MemoryFigures(**ask_child(worker, asked, timeout_seconds, **ENVIRONMENT))


def find(asked: dict[str, Any]) -> dict[str, Any]:
    """What a worker process measures."""
    return dataclasses.asdict(measure(MemoryRequest(**asked)))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=1)
    add_devices(parser, [2])
    run_script(parser, run, find)
