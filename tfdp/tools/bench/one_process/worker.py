"""Runs one request in a process of its own, by `python -m`.

Devices and threads are fixed when TensorFlow starts, so each case starts afresh.
"""

from __future__ import annotations

import sys

from tfdp.tools.bench.request import Request
from tfdp.tools.bench.results import CaseResult
from tfdp.tools.bench.worker_process import answer, set_up_devices


def run_request(request: Request) -> CaseResult:
    """Sets up devices and threads, then measures.

    Raises:
      DeviceError: when there are fewer GPUs than asked for.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(request.intra_op_threads)
    devices = set_up_devices(request.device_type, request.devices)
    if request.case.suite == "allreduce":
        from tfdp.tools.bench.one_process.reduction import measure_reduction

        return measure_reduction(request, devices)
    from tfdp.tools.bench.one_process.training import measure_training

    return measure_training(request, devices)


def main(arguments: list[str]) -> None:
    """Entry point of the worker process."""
    answer(arguments, lambda asked: run_request(Request.from_json(asked)).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
