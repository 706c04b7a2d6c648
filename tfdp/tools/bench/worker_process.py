"""Work in a process of its own, which starts TensorFlow afresh and may crash or hang.

What to do comes as JSON in the worker's first argument; what it found goes as JSON into
the file named by the second.
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
    """It left no result; says how it ended, and what it printed last.

    Args:
      how: it ended.
      last_lines: of what it printed.
    """

    def __init__(self, how: str, last_lines: Sequence[str] = ()):
        super().__init__("\n".join([how, *last_lines]))
        self.how = how
        self.last_lines = tuple(last_lines)

    @property
    def in_a_line(self) -> str:
        """How it ended, and the last that it printed."""
        return ": ".join([self.how, *self.last_lines[-1:]])


def run_worker(
    module: str, asked: Mapping[str, Any], timeout_seconds: float, **more: str
) -> Any:
    """What the worker found.

    Args:
      module: run as a program; it calls `answer`.
      asked: plain data for it.
      timeout_seconds: after which it is stopped, with all that it has started.
      **more: variables of its environment.

    Raises:
      WorkerFailed: it ended with an error, or had to be stopped.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-") as folder:
        result_path = pathlib.Path(folder, "result.json")
        words = ["-m", module, json.dumps(asked), str(result_path)]
        try:
            last_lines = run_python(words, timeout_seconds, **more)
        except ProcessFailed as error:
            raise WorkerFailed(error.how, error.last_lines) from None
        if not result_path.exists():
            raise WorkerFailed("ended without a result", last_lines)
        return json.loads(result_path.read_text("utf-8"))


def answer(arguments: list[str], find: Callable[[dict[str, Any]], Any]) -> None:
    """The worker's part: what `find` returns for what was asked goes into the file."""
    # What TensorFlow prints while it starts would bury a worker's own error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    asked, result_path = arguments
    write_json(result_path, find(json.loads(asked)))


def set_up_devices(
    device_type: str, count: int, *, may_split: bool = False
) -> list[str]:
    """Their names; TensorFlow must not have started.

    Args:
      device_type: "cpu" makes `count` logical CPUs, "gpu" takes the first GPUs.
      count: of the devices.
      may_split: whether the only GPU of a machine is cut into `count` logical ones.

    Raises:
      DeviceError: when there are fewer GPUs than asked for.
    """
    import tensorflow as tf

    import tfdp

    if device_type == "cpu":
        # On a machine with GPUs, too, only the logical CPUs are to be used.
        tf.config.set_visible_devices([], "GPU")
        return tfdp.use_virtual_devices(count)
    gpus = tf.config.list_physical_devices("GPU")
    if may_split and len(gpus) == 1 and count > 1:
        part = tf.config.LogicalDeviceConfiguration(memory_limit=SPLIT_GPU_MIB)
        tf.config.set_logical_device_configuration(gpus[0], [part] * count)
    elif len(gpus) < count:
        raise DeviceError(
            f"{count} GPUs were asked for, but there are {len(gpus)}. Ask for fewer, "
            "or for --device-type cpu."
        )
    return [f"GPU:{index}" for index in range(count)]
