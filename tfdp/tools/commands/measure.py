"""`tfdp measure`: this machine's numbers, into a file that `tfdp simulate` reads."""

from __future__ import annotations

import argparse
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
from tfdp.files.asked_for import refuse_bad_place, written_for
from tfdp.files.checked_json import parse_json, write_json
from tfdp.tools.bench.processes.two_hosts import check_rate
from tfdp.tools.bench.python_process import ProcessFailed, run_python
from tfdp.tools.commands.check_target import (
    load_target,
    parse_target,
    training_a_target,
)
from tfdp.tools.measuring.machine import (
    CASES_OF_MODELS,
    LOOPBACK,
    PLACES,
    measure_machine,
)
from tfdp.tools.measuring.places import Place
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel, write_machine
from tfdp.tools.simulator.model import Gradient, ModelProfile

DEFAULT_MODELS = ("cnn-1m", "mlp-20m", "resnet20")
QUICK_MODELS = ("mlp-tiny",)
DEFAULT_BATCH = 32
NOT_WRITTEN = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp measure`."""
    parser.add_argument("--output", required=True, metavar="FILE", help="where it goes")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=CASES_OF_MODELS,
        metavar="MODEL",
        help=f"whose steps are timed (default: {', '.join(DEFAULT_MODELS)}); known: "
        f"{', '.join(CASES_OF_MODELS)}",
    )
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="your own model, in one process: path/to/script.py:function or "
        "package.module:function that gives (build, data), as for `tfdp check`",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help=f"with --target: samples of each replica (default: {DEFAULT_BATCH})",
    )
    parser.add_argument(
        "--places",
        nargs="+",
        choices=list(map(str, PLACES)),
        metavar="PxR",
        help="processes x replicas (default: "
        f"{', '.join(map(str, PLACES))}); 1x1 always",
    )
    parser.add_argument(
        "--link",
        default=LOOPBACK,
        metavar="RATE",
        help="between two processes: loopback, or a rate such as 1gbit (needs root)",
    )
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="R", help="figures each (default: 9)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model, 2 repeats: shows that it runs",
    )
    parser.add_argument(
        "--timeout-seconds", type=int, default=900, metavar="S", help="of each arm"
    )


def run(options: argparse.Namespace) -> int:
    """Measures, writes, and says what came out; returns the exit code: 2
    where it could not be written."""
    path = pathlib.Path(options.output)
    try:
        refuse_bad_place("--output", options.output)
    except ConfigurationError as error:
        print(f"tfdp measure: {error}", file=sys.stderr)
        return NOT_WRITTEN
    if options.batch is not None and options.target is None:
        raise ConfigurationError("--batch acts only with --target.")
    for name in ("repeats", "timeout_seconds", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} must be at least 1. Received: {value}."
            )
    if options.link != LOOPBACK:
        check_rate(options.link)
    wanted = {"1x1", *(options.places or map(str, PLACES))}
    places = [place for place in PLACES if str(place) in wanted]
    models = QUICK_MODELS if options.quick else DEFAULT_MODELS
    machine = measure_machine(
        options.models or (models if options.target is None else ()),
        places,
        link=options.link,
        repeats=min(options.repeats, 2) if options.quick else options.repeats,
        quick=options.quick,
        timeout_seconds=options.timeout_seconds,
        say=_say,
        others=_own_models(options, places),
    )
    print(format_machine(machine))
    try:
        with written_for("--output", path):
            write_machine(machine, path)
    except ConfigurationError as error:
        print(f"tfdp measure: {error}", file=sys.stderr)
        return NOT_WRITTEN
    print(f"wrote {path.absolute()}")
    return 0


def _own_models(
    options: argparse.Namespace, places: Sequence[Place]
) -> list[MeasuredModel]:
    if options.target is None:
        return []
    replicas = [place.replicas for place in places if place.processes == 1]
    _say(f"{options.target} on {', '.join(map(str, replicas))} replicas")
    found = measure_target(
        options.target,
        replicas,
        samples=DEFAULT_BATCH if options.batch is None else options.batch,
        steps=2 if options.quick else options.repeats,
        timeout_seconds=options.timeout_seconds,
    )
    return [found]


def _say(line: str) -> None:
    print(f"measuring {line}", file=sys.stderr, flush=True)


def format_machine(machine: MeasuredMachine) -> str:
    """What was measured, as lines for the terminal."""
    lines = [f"{machine.name}, {machine.cores} usable cores, load {machine.load:.1f}"]
    for name, link in (
        ("within a process", machine.within_host),
        (f"between two, {machine.link}", machine.between_hosts),
    ):
        lines.append(
            f"sums {name}: {1e6 * link.latency_seconds:,.0f} us, "
            f"{link.rate / 1e9:.3g} GB/s, {100 * link.compute_share:.0f}% of the cores"
        )
    for name, model in machine.models.items():
        for (processes, replicas), seconds in sorted(model.step_seconds.items()):
            flops = 3 * model.samples * model.profile.forward_flops_per_sample
            rate = flops / seconds / 1e9
            lines.append(
                f"{name} {processes}x{replicas}: {1000 * seconds:.1f} ms a step of "
                f"{model.samples} samples, {rate:.3g} GFLOP/s a replica"
            )
    return "\n".join(lines)


# Steps of the user's own model without sums, for `tfdp measure --target`.
#
# Each number of replicas is timed in a process of its own, since TensorFlow's devices
# are set when it starts: `python -m tfdp.tools.commands.measure ORDERS`, JSON.


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
            run_python(["-m", "tfdp.tools.commands.measure", words], timeout_seconds)
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
