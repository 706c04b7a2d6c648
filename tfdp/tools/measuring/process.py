"""Times work in one of the processes of a place: `python -m` this module."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdp
from tfdp.cluster import find_cluster
from tfdp.tools.measuring.gradient_sets import GRADIENT_SETS
from tfdp.tools.measuring.in_turn import time_in_turn, turns
from tfdp.tools.measuring.models import LOCAL_BATCH, MODELS, make_images
from tfdp.tools.measuring.places import Arrangement, Work
from tfdp.tools.measuring.steps import WARM_UP_CALLS, make_step, without_sums
from tfdp.tools.measuring.sums import make_gradients, make_reduction
from tfdp.tools.planning.keras_profile import profile_of
from tfdp.tools.processes.children import answer


def _find(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each work, as plain data."""
    place = Arrangement(**request["place"])
    wanted = [Work(**each) for each in request["wanted"]]
    cluster = find_cluster()
    rank = cluster.rank if cluster else 0
    strategy = _make_strategy(place, rank, request["timeout_seconds"])
    prepared = [_prepare(work, strategy, rank) for work in wanted]
    found: list[dict[str, Any]] = [
        {"seconds": [], "processor_seconds": [], "profile": profile}
        for _, profile in prepared
    ]
    for name in turns([*map(str, range(len(wanted)))], request["repeats"]):
        call, calls = prepared[int(name)][0], wanted[int(name)].calls
        if place.processes > 1:
            strategy.barrier()
        busy_before = time.process_time()
        seconds = time_in_turn({name: call}, repeats=1, calls=calls)
        # One untimed call more.
        busy = (time.process_time() - busy_before) / (calls + 1)
        found[int(name)]["seconds"] += seconds[name]
        found[int(name)]["processor_seconds"].append(busy)
    if place.processes > 1:
        strategy.close()  # else the others take the end of this process for a fault
    return found


def _make_strategy(place: Arrangement, rank: int, timeout_seconds: float) -> Any:
    """The strategy of this process, which gets a core of its own if there are enough.

    A logical CPU has one thread, and stands for a core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if 1 < place.processes <= len(cores):
        # Before TensorFlow starts its threads, which inherit the affinity.
        os.sched_setaffinity(0, {cores[rank]})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    if place.processes == 1:
        return tfdp.DataParallelStrategy(tfdp.use_virtual_devices(place.replicas))
    communication = tfdp.Communication(
        engine="sockets", timeout_seconds=timeout_seconds
    )
    return tfdp.MultiHostDataParallelStrategy(
        devices_per_host=place.replicas, communication=communication
    )


def _prepare(
    work: Work, strategy: Any, rank: int
) -> tuple[Callable[[], object], dict[str, Any] | None]:
    """A warmed-up call, and the profile of a model that is timed without sums."""
    if work.kind == "sums":
        return _prepare_sums(work.subject, strategy, rank), None
    model, profile = MODELS[work.subject], None
    if work.kind == "steps":
        timed = make_step(strategy, model)
        timed.warm_up()
    else:
        with without_sums(strategy):
            timed = make_step(strategy, model)
            timed.warm_up()
        inputs, _ = make_images(model, LOCAL_BATCH)
        profile = profile_of(timed.network, [inputs[:LOCAL_BATCH]])
        profile = {**profile, "local_batch": LOCAL_BATCH}
    return lambda: float(timed.step()), profile


def _prepare_sums(subject: str, strategy: Any, rank: int) -> Callable[[], object]:
    devices = strategy.extended.worker_devices
    first = rank * len(devices)
    gradients = {
        first + local: make_gradients(GRADIENT_SETS[subject](), first + local, device)
        for local, device in enumerate(devices)
    }
    reduction = make_reduction(strategy, gradients, read=True)

    def call() -> list[np.ndarray]:
        return [value.numpy() for on_replicas in reduction() for value in on_replicas]

    for _ in range(WARM_UP_CALLS):
        call()
    return call


if __name__ == "__main__":
    answer(sys.argv[1:], _find)
