"""`tfdp measure`: this machine's numbers, into a file that `tfdp simulate` reads."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import refuse_bad_place, written_for
from tfdp.tools.bench.processes.two_hosts import check_rate
from tfdp.tools.commands.measure_target import measure_target
from tfdp.tools.measuring.machine import (
    CASES_OF_MODELS,
    LOOPBACK,
    PLACES,
    measure_machine,
)
from tfdp.tools.measuring.places import Place
from tfdp.tools.simulator.machine_file import write_machine
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel

__all__ = ["add_arguments", "format_machine", "run"]

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
