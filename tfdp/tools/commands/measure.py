"""`tfdp measure`: measures this machine and writes the file for `tfdp simulate`."""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from tfdp.checks import integer_from
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_path, written_for
from tfdp.tools.commands.check_target import (
    ScriptRun,
    load_target,
    parse_target,
    training_a_target,
)
from tfdp.tools.commands.tune_processes import TrialFailed, result_of
from tfdp.tools.commands.tune_trial import timed_steps
from tfdp.tools.measuring.machine import (
    LOOPBACK,
    PLACES,
    measure_machine,
)
from tfdp.tools.measuring.models import MODELS
from tfdp.tools.measuring.two_hosts import check_rate
from tfdp.tools.processes.children import answer
from tfdp.tools.processes.devices import find_devices
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel, write_machine
from tfdp.tools.simulator.model import ModelProfile

DEFAULT_MODELS = ("cnn-1m", "mlp-20m", "resnet20")
QUICK_MODELS = ("mlp-tiny",)
DEFAULT_BATCH = 32
FAILED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp measure`."""
    add, whole = parser.add_argument, partial(parser.add_argument, type=integer_from(1))
    add("--output", required=True, metavar="FILE", help="the file to write")
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="MODEL",
        help=f"models to time (default: {', '.join(DEFAULT_MODELS)}); known: "
        f"{', '.join(MODELS)}",
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
    whole("--timeout-seconds", default=900, metavar="S", help="of each measurement")


def run(options: argparse.Namespace) -> int:
    """Measures, writes and prints; returns the exit code."""
    path = pathlib.Path(options.output)
    check_output_path("--output", options.output)
    if options.batch is not None and options.target is None:
        raise ConfigurationError("--batch acts only with --target.")
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
    with written_for("--output", path):
        write_machine(machine, path)
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
# replicas is timed in a process: `python -m tfdp.tools.commands.measure`.


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
    model = ModelProfile.from_plain(name_of_target(text), profile)
    return MeasuredModel(model, samples, seconds)


def _run_process(
    text: str, replicas: int, samples: int, steps: int, timeout_seconds: float
) -> dict[str, Any]:
    request = {"text": text, "replicas": replicas, "samples": samples, "steps": steps}
    try:
        return result_of("tfdp.tools.commands.measure", request, timeout_seconds)
    except (TrialFailed, OSError) as error:
        raise ConfigurationError(
            f"{text}: could not be trained on {replicas} replicas:\n{error}"
        ) from None


def _figures(text: str, replicas: int, samples: int, steps: int) -> dict[str, Any]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    import keras

    import tfdp
    from tfdp.tools.measuring.steps import without_sums

    # As in the benchmarks: one core for each logical CPU.
    devices = find_devices(replicas, intra_op_threads=1)
    strategy = tfdp.DataParallelStrategy(devices)
    script_run = ScriptRun(lambda: strategy, replicas)
    with without_sums(strategy):
        target = load_target(parse_target(text), script_run)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = target.build()
        return timed_steps(model, target.data, samples * replicas, samples, steps)


if __name__ == "__main__":
    with training_a_target():
        answer(sys.argv[1:], lambda request: _figures(**request))
