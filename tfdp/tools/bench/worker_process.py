"""Runs work in a fresh process, with its own TensorFlow, which may crash or hang.

The request is JSON in the worker's first argument; the result is JSON in the file named
by the second.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.errors import DeviceError
from tfdp.files.checked_json import write_json
from tfdp.tools.bench.python_process import ProcessFailed, run_python

# The most that each logical GPU takes of the one GPU; `tfdp selftest` takes a quarter.
SPLIT_GPU_MIB = 4096


class WorkerFailed(Exception):
    """The worker left no result; `how` it ended, and the last lines of its output."""

    def __init__(self, how: str, last_lines: Sequence[str] = ()):
        super().__init__("\n".join([how, *last_lines]))
        self.how = how
        self.last_lines = tuple(last_lines)

    @property
    def in_a_line(self) -> str:
        return ": ".join([self.how, *self.last_lines[-1:]])


def run_worker(
    module: str, request: Mapping[str, Any], timeout_seconds: float, **more: str
) -> Any:
    """Runs `module`, which calls `answer`, on a plain-data request; returns its result.

    `more` are environment variables. Raises WorkerFailed if it fails or takes longer
    than the timeout; then every process it started is ended.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-") as folder:
        result_path = pathlib.Path(folder, "result.json")
        words = ["-m", module, json.dumps(request), str(result_path)]
        try:
            last_lines = run_python(words, timeout_seconds, **more)
        except ProcessFailed as error:
            raise WorkerFailed(error.how, error.last_lines) from None
        if not result_path.exists():
            raise WorkerFailed("ended without a result", last_lines)
        return json.loads(result_path.read_text("utf-8"))


def answer(arguments: list[str], find: Callable[[dict[str, Any]], Any]) -> None:
    """The worker's side: writes what `find` returns for the request to the file."""
    # TensorFlow's start-up log would bury a worker's own error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request, result_path = arguments
    write_json(result_path, find(json.loads(request)))


def set_up_devices(
    device_type: str, count: int, *, may_split: bool = False
) -> list[str]:
    """Creates the devices, before TensorFlow starts; returns their names.

    Args:
      device_type: "cpu" makes `count` logical CPUs, "gpu" uses the first GPUs.
      may_split: whether a machine's only GPU is split into `count` logical ones.
    """
    import tensorflow as tf

    import tfdp

    if device_type == "cpu":
        # Hide the GPUs: only the logical CPUs are to be used.
        tf.config.set_visible_devices([], "GPU")
        return tfdp.use_virtual_devices(count)
    gpus = tf.config.list_physical_devices("GPU")
    if may_split and len(gpus) == 1 and count > 1:
        part = tf.config.LogicalDeviceConfiguration(memory_limit=SPLIT_GPU_MIB)
        tf.config.set_logical_device_configuration(gpus[0], [part] * count)
    elif len(gpus) < count:
        raise DeviceError(
            f"{count} GPUs were requested, but there are {len(gpus)}. Request fewer, "
            "or use --device-type cpu."
        )
    return [f"GPU:{index}" for index in range(count)]
