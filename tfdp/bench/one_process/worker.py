"""Runs one request in a process of its own: `python -m tfdp.bench.one_process.worker`.

Devices and threads are fixed when TensorFlow starts, so each case starts afresh. The
request comes as JSON in the first argument; the result goes as JSON into the file
named by the second.
"""

from __future__ import annotations

import json
import os
import sys

from tfdp.bench.json_file import write_json
from tfdp.bench.request import Request
from tfdp.bench.results import CaseResult
from tfdp.errors import DeviceError

__all__ = ["main", "run_request"]


def run_request(request: Request) -> CaseResult:
    """Sets up devices and threads, then measures.

    Raises:
      DeviceError: when there are fewer GPUs than asked for.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(request.intra_op_threads)
    devices = _set_up_devices(request)
    if request.case.work == "allreduce":
        from tfdp.bench.one_process.reduction import measure_reduction

        return measure_reduction(request, devices)
    from tfdp.bench.one_process.training import measure_training

    if request.case.work == "epoch":
        from tfdp.bench.one_process.epochs import make_epoch_arm

        return measure_training(request, devices, make_epoch_arm)
    return measure_training(request, devices)


def _set_up_devices(request: Request) -> list[str]:
    import tensorflow as tf

    import tfdp

    if request.device_type == "cpu":
        # On a machine with GPUs, too, only the logical CPUs are to be used.
        tf.config.set_visible_devices([], "GPU")
        return tfdp.use_virtual_devices(request.devices)
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < request.devices:
        raise DeviceError(
            f"The benchmark was asked for {request.devices} GPUs, but there are "
            f"{len(gpus)}. Ask for fewer, or take --device-type cpu."
        )
    return [f"GPU:{index}" for index in range(request.devices)]


def main(arguments: list[str]) -> None:
    """Entry point of the worker process."""
    # What TensorFlow prints while it starts would bury a worker's own error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request_json, result_path = arguments
    request = Request(**json.loads(request_json))
    write_json(result_path, run_request(request).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
