"""Slows one of several workers down: does `callbacks.Stragglers` say who, and why?

Groups of 2, 3 and 4 processes on this machine train with one of them slow, 20 cases in
all, each for 20 steps:

    input      its input pipeline sleeps before each batch
    compute    its process is stopped for most of the time, as a quota of a container's
               processor does
    link       the kernel sends what it sends at a limited rate (SO_MAX_PACING_RATE)

It prints what the callback said by then. After that, two workers take turns with the
callback and without, and it prints what the callback costs a step. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.shared import make_parser, run_script, write_report
from tfdp.errors import DeviceError

STEPS = 20
# (slow worker, cause), by number of workers.
CASES = {
    2: [(0, "input"), (1, "compute"), (0, "link"), (1, "input"), (0, "compute")]
    + [(1, "link")],
    3: [(0, "link"), (1, "input"), (2, "compute"), (2, "link"), (0, "input")]
    + [(1, "compute")],
    4: [(0, "compute"), (1, "link"), (2, "input"), (3, "compute"), (3, "input")]
    + [(2, "link"), (1, "compute"), (0, "input")],
}
INPUT_SECONDS = 0.15
RUNS_SECONDS, STOPS_SECONDS = 0.004, 0.036
LINK_BYTES_PER_SECOND = 2_000_000
SO_MAX_PACING_RATE, NO_LIMIT = 47, 2**31 - 1
WIDTH, BATCH = 256, 1536
COST_BATCH, WARM_STEPS = 2048, 20
THROTTLE = """
import os, signal, sys, time
process, runs, stops = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() == process:
        os.kill(process, signal.SIGSTOP)
        time.sleep(stops)
        os.kill(process, signal.SIGCONT)
        time.sleep(runs)
finally:
    os.kill(process, signal.SIGCONT)
"""


def run(options: argparse.Namespace) -> int:
    """Prints a line for each case, and the cost; returns 1 where a case was wrong."""
    groups = {2: CASES[2][:2]} if options.quick else CASES
    rows = []
    for workers, cases in groups.items():
        for found in _group(workers, {"cases": cases}, options.timeout_seconds):
            said = "nothing" if found["said"] is None else found["said"]
            verdict = "right" if found["right"] else "WRONG"
            asked = f"worker {found['worker']}, {found['cause']}"
            print(f"{workers} workers: {asked}: {verdict}: {said}", flush=True)
            rows.append({"workers": workers, **found})
    right = sum(row["right"] for row in rows)
    print(f"right within {STEPS} steps: {right} of {len(rows)}")
    cost = {"pairs": 5 if options.quick else 30 * options.repeats}
    (found,) = _group(2, cost, options.timeout_seconds)
    print(found["text"])
    write_report(options.json, "stragglers", rows=rows, cost=found)
    return 0 if right == len(rows) or options.quick else 1


def _group(workers: int, orders: dict[str, Any], seconds: int) -> list[dict[str, Any]]:
    """What worker 0 of a group of processes has found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "found.json")
    program = [sys.executable, "-m", "benchmarks.stragglers", json.dumps(orders), path]
    processes = [
        subprocess.Popen(
            program,
            env={
                **os.environ,
                "TFDP_WORKERS": f"{workers}",
                "TFDP_RANK": f"{rank}",
                "TFDP_COORDINATOR": coordinator,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(workers)
    ]
    with folder:
        try:
            outputs = [process.communicate(timeout=seconds)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            if process.returncode:
                raise DeviceError(
                    f"Worker {rank} of {workers} failed: {outputs[rank][-2000:]}"
                )
        with open(path, encoding="utf-8") as file:
            return list(json.load(file))


def find(orders: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What a worker of a group does; worker 0 tells."""
    import tensorflow as tf

    import tfdp
    from tfdp.hosts import shared_memory

    # Workers of one machine would share memory, which is no link.
    shared_memory.CAN_SHARE = False
    tf.config.threading.set_intra_op_parallelism_threads(1)
    sockets = tfdp.Communication(engine="sockets")
    strategy = tfdp.MultiHostDataParallelStrategy(communication=sockets)
    if "cases" in orders:
        found = [_case(strategy, *case) for case in orders["cases"]]
    else:
        found = [_cost(strategy, orders["pairs"])]
    return found if strategy.cluster.rank == 0 else None


def _model(strategy: Any, width: int) -> Any:
    import keras

    with strategy.scope():
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
        inputs, output = keras.Input((width,)), keras.layers.Dense(1)
        model = keras.Sequential([inputs, *layers, output])
        model.compile("sgd", "mse", jit_compile=False)
    return model


def _case(strategy: Any, worker: int, cause: str) -> dict[str, Any]:
    """Trains with a slow worker, and what the callback said."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    pause_seconds = [0.0]

    def wait(batch: Any) -> Any:
        time.sleep(pause_seconds[0])
        return batch

    def waits(batch: Any) -> tuple[Any, Any]:
        batch = tf.numpy_function(wait, [batch], tf.float32)
        batch = tf.ensure_shape(batch, [None, WIDTH])
        return batch, batch[:, :1]

    class Injects(keras.callbacks.Callback):
        """Makes this worker slow from the second step on."""

        stack = contextlib.ExitStack()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch or strategy.cluster.rank != worker:
                return
            if cause == "input":
                pause_seconds[0] = INPUT_SECONDS
            elif cause == "compute":
                self.stack.enter_context(_stopped_often())
            else:
                self.stack.enter_context(_narrow_link(strategy.link))

        def on_train_end(self, logs: Any = None) -> None:
            pause_seconds[0] = 0.0
            self.stack.close()

    rows = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    # It ends: a call of Python that goes on would hang at exit.
    data = tf.data.Dataset.from_tensor_slices(rows).repeat(2 * STEPS)
    data = data.batch(BATCH).map(waits)
    stragglers = tfdp.callbacks.Stragglers()
    _model(strategy, WIDTH).fit(
        data, steps_per_epoch=STEPS, verbose=0, callbacks=[stragglers, Injects()]
    )
    last = stragglers.found[-1] if stragglers.found else None
    return {
        "worker": worker,
        "cause": cause,
        "said": None if last is None else str(last),
        "all": [
            f"{one.step}: worker {one.worker} {one.cause}" for one in stragglers.found
        ],
        "right": last is not None and (last.worker, last.cause) == (worker, cause),
    }


@contextlib.contextmanager
def _stopped_often() -> Iterator[None]:
    times = [f"{os.getpid()}", f"{RUNS_SECONDS}", f"{STOPS_SECONDS}"]
    throttle = subprocess.Popen([sys.executable, "-c", THROTTLE, *times])
    try:
        yield
    finally:
        throttle.terminate()
        throttle.wait()


@contextlib.contextmanager
def _narrow_link(link: Any) -> Iterator[None]:
    connections = [
        end.sender._connection
        for channel in link.step_channels
        for end in link._channels[channel].neighbours
    ]
    for rate in (LINK_BYTES_PER_SECOND, NO_LIMIT):
        for one in connections:
            one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
        if rate != NO_LIMIT:
            yield


def _cost(strategy: Any, pairs: int) -> dict[str, Any]:
    """Seconds of a step with the callback and without, step by step in turn."""
    import numpy as np
    import tensorflow as tf

    import tfdp

    rows = np.random.default_rng(0).normal(size=(COST_BATCH, WIDTH)).astype("float32")
    data = tf.data.Dataset.from_tensors((rows, rows[:, :1])).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    arms = {name: _model(strategy, WIDTH) for name in ("without", "with")}
    stragglers = tfdp.callbacks.Stragglers()
    stragglers.set_model(arms["with"])
    stragglers.on_train_begin()
    stragglers.on_epoch_begin(0)
    arms["without"].make_train_function()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for step in range(WARM_STEPS + pairs):
        for name in list(arms)[:: 1 if step % 2 else -1]:
            began = time.perf_counter(), time.process_time()
            arms[name].train_function(batches)
            if name == "with":
                stragglers.on_train_batch_end(step)
            ended = time.perf_counter(), time.process_time()
            if step >= WARM_STEPS:
                seconds[name].append((ended[0] - began[0], ended[1] - began[1]))
    texts = []
    for place, clock in enumerate(("wall clock", "processor time")):
        step_seconds, with_it = (
            np.array([each[place] for each in seconds[name]]) for name in arms
        )
        more = np.median(with_it) - np.median(step_seconds)
        # The standard error of a median, from the quartiles of the differences.
        low, high = np.quantile(with_it - step_seconds, [0.25, 0.75])
        error = 1.25 * (high - low) / 1.35 / pairs**0.5
        texts.append(
            f"{clock}: a step of {np.median(step_seconds) * 1e3:.2f} ms, with the "
            f"callback {more * 1e6:+.0f} us (standard error {error * 1e6:.0f}), "
            f"{more / np.median(step_seconds):+.2%}"
        )
    return {"seconds": seconds, "text": "\n".join(texts)}


if __name__ == "__main__":
    run_script(make_parser(__doc__, repeats=10), run, find)
