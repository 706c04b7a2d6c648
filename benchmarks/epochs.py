"""Times short epochs of Keras' `fit`, with all that `fit` does once per epoch.

Where an epoch has few steps, most of it is input that is set up and taken down again.
The images come as arrays, shuffled, as in a first script: no strategy, the stock one
and tfdp take turns in one process, each with 4 epochs of 10 steps of a network of 586
parameters.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.bench.cases import STOCK_DEFAULT
from benchmarks.bench.one_process.arms import ARMS
from benchmarks.bench.results import ArmResult, CaseResult
from benchmarks.bench.tables import format_result
from benchmarks.shared import add_devices, make_parser, run_script, write_report
from tfdp.tools.measuring.in_turn import time_in_turn
from tfdp.tools.measuring.models import LOCAL_BATCH, MODELS, make_images
from tfdp.tools.processes.children import ask_child
from tfdp.tools.processes.devices import set_up_devices

ARM_NAMES = ("one-device", STOCK_DEFAULT, "tfdp")
SUBJECT = "mlp-tiny"
EPOCHS, QUICK_EPOCHS, STEPS = 4, 1, 10


def run(options: argparse.Namespace) -> int:
    """Prints a table for each number of replicas."""
    results = []
    for devices in options.devices:
        asked = {
            "devices": devices,
            "repeats": options.repeats,
            "epochs": QUICK_EPOCHS if options.quick else EPOCHS,
        }
        found = ask_child("benchmarks.epochs", asked, options.timeout_seconds)
        results.append(found)
        print(format_result(CaseResult.from_json(found)), end="\n\n", flush=True)
    write_report(options.json, "epochs", results=results)
    return 0


def find(asked: dict[str, Any]) -> dict[str, Any]:
    """What a worker process measures on one number of replicas."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    devices = set_up_devices("cpu", asked["devices"])
    fits = {arm: _fits(ARMS[arm](devices), asked["epochs"]) for arm in ARM_NAMES}
    seconds = time_in_turn(
        {arm: call for arm, (call, _) in fits.items()},
        repeats=asked["repeats"],
        calls=1,
        finish=tf.test.experimental.sync_devices,
    )
    return CaseResult(
        case="epoch-tiny",
        suite="epochs",
        devices=len(devices),
        subject={"name": SUBJECT, "parameters": 586, "local_batch": LOCAL_BATCH},
        settings={
            "repeats": asked["repeats"],
            "calls_per_repeat": 1,
            "device_type": "cpu",
            "epochs": asked["epochs"],
        },
        arms={
            arm: ArmResult(tuple(seconds[arm]), samples)
            for arm, (_, samples) in fits.items()
        },
    ).to_json()


def _fits(strategy: Any, epochs: int) -> tuple[Any, int]:
    """A call of `fit`, warmed up, and the images that it trains on."""
    import numpy as np

    from tfdp.tools.measuring.steps import build_network

    global_batch = LOCAL_BATCH * strategy.num_replicas_in_sync
    network = build_network(strategy, MODELS[SUBJECT])
    images, labels = make_images(MODELS[SUBJECT], global_batch)
    samples = STEPS * global_batch
    images = np.resize(images, (samples, *images.shape[1:]))
    labels = np.resize(labels, (samples,))

    def call() -> None:
        network.fit(images, labels, batch_size=global_batch, epochs=epochs, verbose=0)

    call()
    return call, epochs * samples


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=20)
    add_devices(parser, [2])
    run_script(parser, run, find)
