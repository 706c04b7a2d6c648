"""Measures what an update by Muon costs on shards: owners, beside every replica alone.

The weights of a transformer, and gradients as they are: the update alone, with the sum
of the gradients and the return of the weights. A replica has one core of its own, where
the machine has as many.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.shared import (
    Load,
    add_devices,
    in_a_line,
    least_to_most,
    make_parser,
    run_script,
    write_report,
)
from tfdp.plan.options import SHARD_STAGES
from tfdp.tools.processes.children import ProcessFailed, ask_child

LAYERS, WIDTH = 12, 256
QUICK_LAYERS, QUICK_WIDTH = 1, 32
WARM_UP_UPDATES = 2


@dataclasses.dataclass(frozen=True)
class MuonRequest:
    """Updates of the matrices of a transformer.

    Args:
      devices: replicas, each on a logical CPU.
      stage: of ZeRO, 0 to 3.
      layers: each has four matrices width x width, and two of four times that.
      width: of the model.
      repeats: updates to measure.
    """

    devices: int
    stage: int
    layers: int
    width: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class MuonFigures:
    """What was found.

    Args:
      seconds: that each update took.
      core_seconds: of all threads, per update and replica: what a replica computes,
        also where the machine has fewer cores than replicas.
    """

    seconds: list[float]
    core_seconds: float


def measure(request: MuonRequest) -> MuonFigures:
    """Makes the updates, on as many cores as replicas."""
    cores = sorted(os.sched_getaffinity(0))[: request.devices]
    os.sched_setaffinity(0, cores)
    import keras
    import tensorflow as tf

    import tfdp

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(request.devices)
    devices = tfdp.use_virtual_devices(request.devices)
    strategy = tfdp.DataParallelStrategy(devices, shard=request.stage, alone=True)
    wide = 4 * request.width
    shapes = [(request.width, request.width)] * 4
    shapes += [(request.width, wide), (wide, request.width)]
    keras.utils.set_random_seed(1)
    with strategy.scope():
        normal = keras.initializers.RandomNormal(stddev=0.02)
        weights = [
            keras.Variable(normal, shape=shape, name=f"layer_{layer}_{place}")
            for layer in range(request.layers)
            for place, shape in enumerate(shapes)
        ]
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.Muon(1e-3))
        optimizer.build(weights)
    gradients = [
        tf.random.stateless_normal(w.shape, [1, i]) for i, w in enumerate(weights)
    ]

    @tf.function(autograph=False)
    def update() -> Any:
        def replica() -> None:
            context = tf.distribute.get_replica_context()
            factor = 1.0 + tf.cast(context.replica_id_in_sync_group, tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.add_n(
                    [
                        tf.reduce_sum(w * g)
                        for w, g in zip(weights, gradients, strict=True)
                    ]
                )
                loss = tfdp.losses.local_mean(loss * factor)
            optimizer.apply(tape.gradient(loss, weights), weights)

        strategy.run(replica)

    for _ in range(WARM_UP_UPDATES):
        update()
    seconds, core_seconds = [], time.process_time()
    for _ in range(request.repeats):
        begin = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - begin)
    core_seconds = time.process_time() - core_seconds
    return MuonFigures(seconds, core_seconds / request.repeats / request.devices)


def run(options: argparse.Namespace) -> int:
    """Measures every stage on every number of replicas."""
    layers, width = (QUICK_LAYERS, QUICK_WIDTH) if options.quick else (LAYERS, WIDTH)
    rows: list[dict[str, Any]] = []
    failed, load = 0, Load()
    print(
        f"Muon on the matrices of {layers} layers of width {width}; in parentheses "
        "relative to one replica\n\n"
        f"{'N':>2} {'shard':>11} {'seconds':>26} {'core seconds a replica':>24}",
        flush=True,
    )
    for number in sorted({1, *options.devices}):
        for stage in (0,) if number == 1 else (0, 1, 3):
            request = MuonRequest(number, stage, layers, width, options.repeats)
            asked, limit = dataclasses.asdict(request), options.timeout_seconds
            try:
                found = MuonFigures(**ask_child("benchmarks.muon", asked, limit))
            except ProcessFailed as error:
                failed = 1
                print(f"{number:>2} stage {stage}: {in_a_line(error)}", file=sys.stderr)
                continue
            load.note()
            rows.append({**asked, **dataclasses.asdict(found)})
            print(_format_row(number, SHARD_STAGES[stage], found, rows[0]), flush=True)
    print(load)
    write_report(options.json, "muon", rows=rows)
    return failed


def _format_row(
    number: int, stage: str, found: MuonFigures, one: dict[str, Any]
) -> str:
    middle = statistics.median(found.seconds)
    relative = middle / statistics.median(one["seconds"])
    core = found.core_seconds / one["core_seconds"]
    return (
        f"{number:>2} {stage:>11} {least_to_most(found.seconds, '.2f'):>20}"
        f" ({relative:.2f}) {found.core_seconds:>17.2f} ({core:.2f})"
    )


def find(request: dict[str, Any]) -> dict[str, Any]:
    """What a worker process measures."""
    return dataclasses.asdict(measure(MuonRequest(**request)))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=5)
    add_devices(parser, (2, 4))
    run_script(parser, run, find)
