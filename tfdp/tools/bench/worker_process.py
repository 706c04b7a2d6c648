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
from tfdp.files.checked_json import parse_json, write_json
from tfdp.tools.bench.python_process import ProcessFailed, run_python

# The most that each logical GPU takes of the one GPU; `tfdp selftest` takes a quarter.
SPLIT_GPU_MIB = 4096


def run_worker(
    module: str,
    request: Mapping[str, Any],
    timeout_seconds: float,
    launcher: Sequence[str] = (),
    **more: str,
) -> Any:
    """Runs `module`, which calls `answer`, on a plain-data request; returns its result.

    `launcher`: arguments of Python before the module; `more`: environment variables.
    Raises ProcessFailed if it fails or takes longer than the timeout; then every
    process it started is ended.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-") as folder:
        result_path = pathlib.Path(folder, "result.json")
        words = [*launcher, "-m", module, json.dumps(request), str(result_path)]
        last_lines = run_python(words, timeout_seconds, **more)
        if not result_path.exists():
            raise ProcessFailed("ended without a result", last_lines, False)
        return parse_json(result_path.read_text("utf-8"))


def answer(arguments: list[str], find: Callable[[dict[str, Any]], Any]) -> None:
    """The worker's side: writes what `find` returns for the request to the file.

    None: another worker answers.
    """
    # TensorFlow's start-up log would bury a worker's own error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request, result_path = arguments
    found = find(json.loads(request))
    if found is not None:
        write_json(result_path, found)


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


def find_devices(count: int, intra_op_threads: int | None = None) -> list[str]:
    """The first GPUs, or logical CPUs where there are fewer; before TensorFlow starts.

    `intra_op_threads`: of an operation on CPUs; None: TensorFlow's default.
    """
    import tensorflow as tf

    import tfdp

    if len(tf.config.list_physical_devices("GPU")) >= count:
        return [f"GPU:{index}" for index in range(count)]
    if intra_op_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    return tfdp.use_virtual_devices(count)
