"""Steps of the user's own model without sums, for `tfdp measure --target`.

Each number of replicas is timed in a process of its own, since TensorFlow's devices are
set when it starts: `python -m tfdp.tools.commands.measure_target ORDERS`, JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import parse_json
from tfdp.files.json_file import write_json
from tfdp.tools.bench.python_process import ProcessFailed, run_python
from tfdp.tools.commands.check_target import (
    load_target,
    parse_target,
    training_a_target,
)
from tfdp.tools.simulator.measured import MeasuredModel
from tfdp.tools.simulator.model import Gradient, ModelProfile

__all__ = ["Orders", "main", "measure_target", "name_of_target"]

WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a process is told.

    Args:
      target: as `tfdp check` takes it.
      replicas: on as many GPUs, or logical CPUs.
      samples: the local batch.
      steps: that are timed.
      result_path: where the figures go.
    """

    target: str
    replicas: int
    samples: int
    steps: int
    result_path: str


def name_of_target(text: str) -> str:
    """What the model is called in the file.

    >>> name_of_target("models/nets.py:small"), name_of_target("pkg.nets:small")
    ('nets:small', 'nets:small')
    """
    module, colon, function = text.rpartition(":")
    if not colon:
        return pathlib.Path(function).stem
    stem = (
        pathlib.Path(module).stem if module.endswith(".py") else module.split(".")[-1]
    )
    return f"{stem}:{function}"


def measure_target(
    text: str,
    replicas: Sequence[int],
    *,
    samples: int,
    steps: int,
    timeout_seconds: float,
) -> MeasuredModel:
    """A model's steps, without sums, in one process.

    Args:
      text: the target: path/to/script.py:function or package.module:function.
      replicas: numbers of them; 1 among them.
      samples: the local batch.
      steps: that are timed, for each number.
      timeout_seconds: the most that one number may take.

    Raises:
      ConfigurationError: there is no such target, or it failed; with its last lines.
    """
    parse_target(text)  # before anything is started
    seconds: dict[tuple[int, int], float] = {}
    profile: dict[str, Any] = {}
    for number in replicas:
        found = _run_process(text, number, samples, steps, timeout_seconds)
        seconds[1, number] = statistics.median(found["seconds"])
        profile = found["profile"]
    gradients = tuple(Gradient(*each) for each in profile["gradients"])
    return MeasuredModel(
        ModelProfile(
            name_of_target(text), gradients, profile["forward_flops_per_sample"]
        ),
        samples,
        seconds,
    )


def _run_process(
    text: str, replicas: int, samples: int, steps: int, timeout_seconds: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfdp-measure-") as folder:
        path = pathlib.Path(folder, "result.json")
        orders = Orders(text, replicas, samples, steps, str(path))
        words = json.dumps(dataclasses.asdict(orders))
        try:
            run_python(
                ["-m", "tfdp.tools.commands.measure_target", words], timeout_seconds
            )
            return parse_json(path.read_text("utf-8"))
        except (ProcessFailed, OSError) as error:
            more = ""
            if isinstance(error, ProcessFailed) and error.took_too_long:
                more = " Give --timeout-seconds."
            raise ConfigurationError(
                f"{text}: could not be trained on {replicas} replicas:\n{error}{more}"
            ) from None


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    orders = Orders(**json.loads(arguments[0]))
    with training_a_target():
        figures = _figures(orders)
    write_json(orders.result_path, figures)


def _figures(orders: Orders) -> dict[str, Any]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    import keras
    import tensorflow as tf

    import tfdp
    from tfdp.tools.bench.processes.arms import without_sums
    from tfdp.tools.planning.keras_profile import inputs_of, profile_of
    from tfdp.tools.testing.batches import collect_batches, row_count, take_rows

    if len(tf.config.list_physical_devices("GPU")) >= orders.replicas:
        devices = [f"GPU:{number}" for number in range(orders.replicas)]
    else:
        # As in the benchmarks: a logical CPU stands for one core.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        devices = tfdp.use_virtual_devices(orders.replicas)
    strategy = without_sums(tfdp.DataParallelStrategy(devices))
    found = load_target(parse_target(orders.target))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = found.build()
    rows = orders.samples * orders.replicas
    (batch,) = collect_batches(found.data, 1, rows)
    count = row_count(batch)
    batch = take_rows(batch, [row % count for row in range(rows)])
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    steps = WARM_UP_STEPS + orders.steps
    own = list(range(orders.samples))
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    return {
        "profile": profile_of(model, inputs_of(model, take_rows(batch, own))),
        "seconds": [after - before for before, after in itertools.pairwise(ends)][
            WARM_UP_STEPS - 1 :
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
