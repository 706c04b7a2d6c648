"""Runs one request in a fresh process, by `python -m`: devices are fixed at start."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.bench.request import Request
from tfdp.tools.processes.children import answer
from tfdp.tools.processes.devices import set_up_devices


def measure(plain: dict[str, Any]) -> dict[str, Any]:
    """Sets up devices and threads, then measures a request; both as plain data."""
    import tensorflow as tf

    request = Request.from_json(plain)
    tf.config.threading.set_intra_op_parallelism_threads(request.intra_op_threads)
    devices = set_up_devices(request.device_type, request.devices)
    if request.case.suite == "allreduce":
        from benchmarks.bench.one_process.reduction import measure_reduction

        return measure_reduction(request, devices).to_json()
    from benchmarks.bench.one_process.training import measure_training

    return measure_training(request, devices).to_json()


if __name__ == "__main__":
    answer(sys.argv[1:], measure)
