"""`tfdp measure`: measures this machine and writes the file for `tfdp simulate`."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_path, written_for
from tfdp.files.checked_json import write_json
from tfdp.tools.bench.processes.two_hosts import check_rate
from tfdp.tools.commands.check_target import (
    load_target,
    parse_target,
    training_a_target,
)
from tfdp.tools.commands.tune_processes import TrialFailed, result_of
from tfdp.tools.measuring.machine import (
    CASES_OF_MODELS,
    LOOPBACK,
    PLACES,
    measure_machine,
)
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel, write_machine
from tfdp.tools.simulator.model import Gradient, ModelProfile

DEFAULT_MODELS = ("cnn-1m", "mlp-20m", "resnet20")
QUICK_MODELS = ("mlp-tiny",)
DEFAULT_BATCH = 32
NOT_WRITTEN = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp measure`."""
    add, whole = parser.add_argument, partial(parser.add_argument, type=int)
    add("--output", required=True, metavar="FILE", help="the file to write")
    add(
        "--models",
        nargs="+",
        choices=CASES_OF_MODELS,
        metavar="MODEL",
        help=f"models to time (default: {', '.join(DEFAULT_MODELS)}); known: "
        f"{', '.join(CASES_OF_MODELS)}",
    )
    add(
        "--target",
        metavar="TARGET",
        help="your own model, in one process: path/to/script.py:function or "
        "package.module:function that returns (build, data), as for `tfdp check`",
    )
    samples = f"with --target: samples of each replica (default: {DEFAULT_BATCH})"
    whole("--batch", metavar="B", help=samples)
    names = list(map(str, PLACES))
    places = f"processes x replicas (default: {', '.join(names)}); 1x1 always"
    add("--places", nargs="+", choices=names, metavar="PxR", help=places)
    link = "between two processes: loopback, or a rate such as 1gbit (needs root)"
    add("--link", default=LOOPBACK, metavar="RATE", help=link)
    whole("--repeats", default=9, metavar="R", help="of each (default: 9)")
    add("--quick", action="store_true", help="smoke test: a tiny model, 2 repeats")
    whole("--timeout-seconds", default=900, metavar="S", help="of each arm")


def run(options: argparse.Namespace) -> int:
    """Measures, writes and prints; returns the exit code: 2 if it cannot write."""
    path = pathlib.Path(options.output)
    try:
        check_output_path("--output", options.output)
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
    others = []
    if options.target is not None:
        replicas = [place.replicas for place in places if place.processes == 1]
        _say(f"{options.target} on {', '.join(map(str, replicas))} replicas")
        model = measure_target(
            options.target,
            replicas,
            samples=options.batch or DEFAULT_BATCH,
            steps=2 if options.quick else options.repeats,
            timeout_seconds=options.timeout_seconds,
        )
        others.append(model)
    machine = measure_machine(
        options.models or (models if options.target is None else ()),
        places,
        link=options.link,
        repeats=min(options.repeats, 2) if options.quick else options.repeats,
        quick=options.quick,
        timeout_seconds=options.timeout_seconds,
        say=_say,
        others=others,
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


def _say(line: str) -> None:
    print(f"measuring {line}", file=sys.stderr, flush=True)


def format_machine(machine: MeasuredMachine) -> str:
    """The measured numbers, as lines for the terminal."""
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


# The user's own model. TensorFlow fixes its devices when it starts, so each number of
# replicas is timed in a process: `python -m tfdp.tools.commands.measure ORDERS` (JSON).
WARM_UP_STEPS = 3


def name_of_target(text: str) -> str:
    """The model's name in the machine's file.

    >>> name_of_target("models/nets.py:small"), name_of_target("pkg.nets:small")
    ('nets:small', 'nets:small')
    """
    module, colon, function = text.rpartition(":")
    if not colon:
        return pathlib.Path(function).stem
    is_script = module.endswith(".py")
    stem = pathlib.Path(module).stem if is_script else module.split(".")[-1]
    return f"{stem}:{function}"


def measure_target(
    text: str,
    replicas: Sequence[int],
    *,
    samples: int,
    steps: int,
    timeout_seconds: float,
) -> MeasuredModel:
    """Times a model's steps without sums, in one process.

    Args:
      text: the target: path/to/script.py:function or package.module:function.
      replicas: the numbers of replicas to time; 1 among them.
      samples: of each replica.
      steps: timed for each number of replicas.
      timeout_seconds: for each number of replicas.

    Raises:
      ConfigurationError: there is no such target, or it failed; with its last lines.
    """
    parse_target(text)  # fails before a process starts
    seconds: dict[tuple[int, int], float] = {}
    profile: dict[str, Any] = {}
    for number in replicas:
        found = _run_process(text, number, samples, steps, timeout_seconds)
        seconds[1, number] = statistics.median(found["seconds"])
        profile = found["profile"]
    gradients = tuple(Gradient(*each) for each in profile["gradients"])
    flops = profile["forward_flops_per_sample"]
    model = ModelProfile(name_of_target(text), gradients, flops)
    return MeasuredModel(model, samples, seconds)


def _run_process(
    text: str, replicas: int, samples: int, steps: int, timeout_seconds: float
) -> dict[str, Any]:
    orders = {"text": text, "replicas": replicas, "samples": samples, "steps": steps}
    words = ["-m", "tfdp.tools.commands.measure"]
    try:
        return result_of(words, orders, timeout_seconds)
    except (TrialFailed, OSError) as error:
        raise ConfigurationError(
            f"{text}: could not be trained on {replicas} replicas:\n{error}"
        ) from None


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    orders = json.loads(arguments[0])
    path = orders.pop("result_path")
    with training_a_target():
        figures = _figures(**orders)
    write_json(path, figures)


def _figures(text: str, replicas: int, samples: int, steps: int) -> dict[str, Any]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    import keras
    import tensorflow as tf

    import tfdp
    from tfdp.tools.bench.processes.arms import without_sums
    from tfdp.tools.planning.keras_profile import inputs_of, profile_of
    from tfdp.tools.testing.batches import collect_batches, row_count, take_rows

    if len(tf.config.list_physical_devices("GPU")) >= replicas:
        devices = [f"GPU:{number}" for number in range(replicas)]
    else:
        # As in the benchmarks: one core for each logical CPU.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        devices = tfdp.use_virtual_devices(replicas)
    strategy = without_sums(tfdp.DataParallelStrategy(devices))
    target = load_target(parse_target(text))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = target.build()
    rows = samples * replicas
    (batch,) = collect_batches(target.data, 1, rows)
    own = row_count(batch)
    batch = take_rows(batch, [row % own for row in range(rows)])
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    local_batch = take_rows(batch, list(range(samples)))
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    count = WARM_UP_STEPS + steps
    model.fit(dataset, steps_per_epoch=count, verbose=0, callbacks=[clock])
    return {
        "profile": profile_of(model, inputs_of(model, local_batch)),
        "seconds": [
            after - before
            for before, after in itertools.pairwise(ends[WARM_UP_STEPS - 1 :])
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
