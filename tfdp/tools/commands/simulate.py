"""`tfdp simulate`: how long a step would take on hardware that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import refuse_bad_place, write_text_for
from tfdp.tools.report.learning_curve import draw_page
from tfdp.tools.report.text import format_table
from tfdp.tools.simulator.failures import Jitter, Reliability
from tfdp.tools.simulator.known import HARDWARE, MODELS
from tfdp.tools.simulator.lossy import KNOWN_WAYS, Lossy
from tfdp.tools.simulator.machine import Link, Machine, positive, whole
from tfdp.tools.simulator.measured import read_machine
from tfdp.tools.simulator.model import Compute
from tfdp.tools.simulator.published import JITTER, POINTS
from tfdp.tools.simulator.scaling import device_counts, lost_shares, scaling_curve
from tfdp.tools.simulator.step import PARTS, InputRate, StepPrediction, Training
from tfdp.tools.simulator.sums import ALGORITHMS

MOST_DEVICES = 16_384
DEFAULT_BATCH = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp simulate`."""
    _add_what(parser)
    _add_where(parser)
    _add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", metavar="PATH", help="also draw the curve here, as an HTML page"
    )
    parser.add_argument(
        "--list", action="store_true", help="list models and hardware, with sources"
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="predict runs that papers published, and say how far off that is",
    )


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="of --list, or of the --machine's file"
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help=f"samples of each replica (default: {DEFAULT_BATCH}, or as measured)",
    )
    parser.add_argument(
        "--samples-per-second",
        type=float,
        metavar="R",
        help="of one device alone with this batch; otherwise from FLOPs",
    )
    parser.add_argument(
        "--flops-per-second",
        type=float,
        metavar="F",
        help="that a device reaches, instead of the hardware's",
    )
    parser.add_argument(
        "--bucket-bytes", type=int, default=25 << 20, help="(default: 26214400)"
    )
    parser.add_argument(
        "--first-bucket-bytes", type=int, default=1 << 20, help="(default: 1048576)"
    )
    parser.add_argument(
        "--no-overlap", action="store_true", help="sums wait for all of backprop"
    )
    parser.add_argument(
        "--lossy",
        choices=KNOWN_WAYS,
        metavar="WAY",
        help=f"gradients cross in fewer bytes: {', '.join(KNOWN_WAYS)}",
    )
    parser.add_argument(
        "--coding-bytes-per-second",
        type=float,
        metavar="R",
        help="with --lossy: of gradients, that a host makes small and reads, what it "
        "keeps for the next step included",
    )
    parser.add_argument(
        "--shard",
        choices=("parameters",),
        help="weights in parts, gathered for forward and for backward",
    )


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", choices=HARDWARE, help="a known machine")
    parser.add_argument(
        "--machine", metavar="FILE", help="a machine that `tfdp measure` has measured"
    )
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        metavar="N",
        help=f"numbers of devices (default: 1 to {MOST_DEVICES:,})",
    )
    parser.add_argument("--devices-per-host", type=int, metavar="D")
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        help="of the sums (default: two_level; sockets with --machine)",
    )
    for level in ("within", "between"):
        parser.add_argument(
            f"--{level}-bytes-per-second",
            type=float,
            metavar="R",
            help=f"of the link {level} hosts, instead of the hardware's",
        )
        parser.add_argument(f"--{level}-latency-seconds", type=float, metavar="S")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jitter",
        type=float,
        default=JITTER,
        help=f"standard deviation of a step, as a share of it (default: {JITTER})",
    )
    parser.add_argument(
        "--input-samples-per-second",
        type=float,
        metavar="R",
        help="that the input pipeline of a host makes",
    )
    parser.add_argument(
        "--device-hours-between-failures",
        type=float,
        metavar="H",
        help="of one device; with it checkpoints and failures count",
    )
    parser.add_argument("--restart-seconds", type=float, metavar="S")
    parser.add_argument("--checkpoint-pause-seconds", type=float, metavar="S")
    parser.add_argument(
        "--checkpoint-interval-seconds",
        type=float,
        metavar="S",
        help="(default: the best, by Daly's formula)",
    )
    parser.add_argument("--price-per-device-hour", type=float, default=0.0, metavar="P")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp simulate`; returns the exit code."""
    if options.list or options.published:
        _refuse_others(options)
        print(known_names() if options.list else published_table())
        return 0
    try:
        refuse_bad_place("--plot", options.plot)
    except ConfigurationError as error:
        print(f"tfdp simulate: {error}", file=sys.stderr)
        return 2
    training = training_of(options)
    devices = options.devices or device_counts(
        1, MOST_DEVICES, training.machine.devices_per_host
    )
    curve = scaling_curve(training, devices)
    if options.json:
        print(json.dumps(curve_values(training, curve), indent=1))
    else:
        print(curve_table(training, curve))
    if options.plot is not None:
        write_text_for("--plot", options.plot, curve_page(training, curve))
        print(f"drawn in {pathlib.Path(options.plot).absolute()}", file=sys.stderr)
    return 0


def _refuse_others(options: argparse.Namespace) -> None:
    """Refuses what says something of a curve, where a text is printed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        is_text = name == ("list" if options.list else "published")
        if not is_text and getattr(options, name) != default:
            which = "--list" if options.list else "--published"
            raise ConfigurationError(
                f"{which} prints a text, of which --{name.replace('_', '-')} says "
                "nothing: leave one of both out."
            )


def training_of(options: argparse.Namespace) -> Training:
    """What the options describe.

    Raises:
      ConfigurationError: they contradict each other, or a number means nothing.
      DataError: the machine's file is no such file.
    """
    if bool(options.hardware) == bool(options.machine):
        raise ConfigurationError(
            "Say on what: either --hardware, one of "
            f"{', '.join(HARDWARE)}, or --machine with a file of `tfdp measure`."
        )
    if options.machine:
        training = _measured_training(options)
    else:
        training = _known_training(options)
    return dataclasses.replace(
        training,
        machine=_with_other_links(training.machine, options),
        algorithm=options.algorithm or training.algorithm,
        bucket_bytes=options.bucket_bytes,
        first_bucket_bytes=options.first_bucket_bytes,
        overlap=not options.no_overlap,
        gather_parts=options.shard == "parameters",
        lossy=_lossy(options),
        jitter=Jitter(options.jitter),
        input_rate=InputRate(options.input_samples_per_second),
        reliability=_reliability(options),
        price_per_device_hour=options.price_per_device_hour,
    )


def _lossy(options: argparse.Namespace) -> Lossy | None:
    rate = options.coding_bytes_per_second
    if options.lossy is None:
        if rate is not None:
            raise ConfigurationError(
                "--coding-bytes-per-second acts only with --lossy."
            )
        return None
    if options.shard == "parameters" and KNOWN_WAYS[options.lossy].keeps:
        raise ConfigurationError(
            f"--lossy {options.lossy} sums whole gradients, which --shard parameters "
            "does not: take bfloat16 or float16, or leave one of both out."
        )
    if options.machine:
        way = read_machine(options.machine).lossy(options.lossy)
    elif rate is None:
        raise ConfigurationError(
            f"How fast {options.hardware} makes gradients small is not known: give "
            "--coding-bytes-per-second. `tfdp measure` measures it of a core."
        )
    else:
        # A card does it beside what it computes at the cost of that.
        way = KNOWN_WAYS[options.lossy]
    if rate is not None:
        positive("tfdp simulate", "--coding-bytes-per-second", rate)
        way = dataclasses.replace(way, bytes_per_second=rate, keeps=False)
    return way


def _known_training(options: argparse.Namespace) -> Training:
    if options.model not in MODELS:
        raise ConfigurationError(
            f"--model must be one of {', '.join(MODELS)}. Received: "
            f"{options.model!r}; other models: `tfdp measure --target`, then --machine."
        )
    model, machine = MODELS[options.model](), HARDWARE[options.hardware]
    if options.devices_per_host is not None:
        machine = dataclasses.replace(
            machine, devices_per_host=options.devices_per_host
        )
    samples = DEFAULT_BATCH if options.batch is None else options.batch
    whole("tfdp simulate", "--batch", samples)
    if options.samples_per_second is not None:
        if options.flops_per_second is not None:
            raise ConfigurationError(
                "--samples-per-second and --flops-per-second both say how fast a "
                "device is: leave one out."
            )
        positive("tfdp simulate", "--samples-per-second", options.samples_per_second)
        seconds = samples / options.samples_per_second
        return Training(model, Compute.from_seconds(seconds, samples), machine)
    flops_per_second = options.flops_per_second
    if flops_per_second is None:
        flops_per_second = machine.flops_per_second
    if flops_per_second is None:
        raise ConfigurationError(
            f"What a device of {machine.name} reaches is not known in FLOPs: give "
            "--samples-per-second of one device, or --flops-per-second."
        )
    return Training(
        model, Compute.from_flops(model, samples, flops_per_second), machine
    )


def _measured_training(options: argparse.Namespace) -> Training:
    measured = read_machine(options.machine)
    for option in ("batch", "samples_per_second", "flops_per_second"):
        if getattr(options, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise ConfigurationError(
                f"{name}: with --machine that is what was measured; leave it out, or "
                "take --hardware."
            )
    name = options.model
    if name is None and len(measured.models) == 1:
        (name,) = measured.models
    found = measured.model(name or "(none given)")
    most = max(replicas for processes, replicas in found.step_seconds if processes == 1)
    devices_per_host = options.devices_per_host
    return measured.training(
        name, most if devices_per_host is None else devices_per_host
    )


def _with_other_links(machine: Machine, options: argparse.Namespace) -> Machine:
    def other(link: Link, level: str) -> Link:
        for field in ("bytes_per_second", "latency_seconds"):
            value = getattr(options, f"{level}_{field}")
            if value is not None:
                link = dataclasses.replace(link, **{field: value})
        return link

    return dataclasses.replace(
        machine,
        within_host=other(machine.within_host, "within"),
        between_hosts=other(machine.between_hosts, "between"),
    )


def _reliability(options: argparse.Namespace) -> Reliability | None:
    if options.device_hours_between_failures is None:
        for option in ("restart", "checkpoint_pause", "checkpoint_interval"):
            if getattr(options, f"{option}_seconds") is not None:
                raise ConfigurationError(
                    f"--{option.replace('_', '-')}-seconds acts only with "
                    "--device-hours-between-failures."
                )
        return None
    pause, restart = options.checkpoint_pause_seconds, options.restart_seconds
    return Reliability(
        options.device_hours_between_failures,
        restart_seconds=0.0 if restart is None else restart,
        checkpoint_pause_seconds=1.0 if pause is None else pause,
        checkpoint_interval_seconds=options.checkpoint_interval_seconds,
    )


# What `tfdp simulate` says: tables, JSON and a page.


# As a picture has room for them.
SHORT_NAMES = dict(
    zip(
        PARTS,
        ("compute", "cores", "sums", "waiting", "input", "saving", "failures"),
        strict=True,
    )
)
LINES_OF_A_PANEL = 4


def curve_table(training: Training, curve: Sequence[StepPrediction]) -> str:
    """A line for each number of devices, with the share of a step that each part takes;
    parts that nowhere take anything are left out."""
    shown = _parts_of(curve)
    has_price = training.price_per_device_hour > 0
    titles = ["devices", "step, s", "samples/s", "efficiency", *shown]
    rows = [titles + ["price of 1M samples"] * has_price]
    for step in curve:
        shares = _shares(step)
        row = [
            f"{step.devices:,}",
            f"{step.step_seconds:.4g}",
            f"{step.samples_per_second:,.4g}"
            if step.samples_per_second < 1e4
            else f"{step.samples_per_second:,.0f}",
            f"{100 * step.efficiency:.1f}%",
            *[f"{100 * shares[part]:.1f}%" for part in shown],
        ]
        rows.append(row + [f"{step.price_per_million_samples:,.4g}"] * has_price)
    heading = (
        f"{training.model.name}, {training.compute.samples:,} samples a replica, on "
        f"{training.machine.name}, {training.machine.devices_per_host} devices a host; "
        f"{training.algorithm}, {len(training.buckets)} buckets, "
        f"{training.model.gradient_bytes / 1e6:,.1f} MB of gradients"
        f"{f', sent as {training.lossy.name}' if training.lossy else ''}"
    )
    last = curve[-1]
    most = f"most is lost to: {last.largest_loss}, on {last.devices:,} devices"
    return "\n".join([heading, "", format_table(rows, left=()), "", most])


def curve_values(training: Training, curve: Sequence[StepPrediction]) -> dict[str, Any]:
    """The same as plain data; what is infinite is None."""
    return {
        "model": training.model.name,
        "machine": training.machine.name,
        "source": training.machine.source,
        "algorithm": training.algorithm,
        "samples_per_replica": training.compute.samples,
        "gradient_bytes": training.model.gradient_bytes,
        "lossy": training.lossy.name if training.lossy else None,
        "buckets": len(training.buckets),
        "points": [
            {
                "devices": step.devices,
                "hosts": step.topology.hosts,
                "step_seconds": _finite(step.step_seconds),
                "samples_per_second": step.samples_per_second,
                "efficiency": step.efficiency,
                "part_seconds": {
                    part: _finite(seconds)
                    for part, seconds in step.part_seconds.items()
                },
                "sum_seconds": step.sum_seconds,
                "largest_loss": step.largest_loss,
                "price_per_million_samples": _finite(step.price_per_million_samples),
            }
            for step in curve
        ],
    }


def curve_page(training: Training, curve: Sequence[StepPrediction]) -> str:
    """One HTML page: efficiency, samples a second, and the parts of a step."""
    shown = _parts_of(curve)
    one = training.compute.samples / training.compute.seconds
    panels: dict[str, dict[str, Sequence[float]]] = {
        "efficiency, %": {"": [100 * step.efficiency for step in curve]},
        "samples per second, logarithm to base 10": {
            "linear": [math.log10(one * step.devices) for step in curve],
            "predicted": [_log10(step.samples_per_second) for step in curve],
        },
    }
    for first in range(0, len(shown), LINES_OF_A_PANEL):
        # Panels are told apart by their names.
        more = ", more of it" if first else ""
        panels[f"share of a step, %{more}"] = {
            SHORT_NAMES[part]: [100 * _shares(step)[part] for step in curve]
            for part in shown[first : first + LINES_OF_A_PANEL]
        }
    return draw_page(
        panels,
        f"{training.model.name} on {training.machine.name}",
        places=[_short(step.devices) for step in curve],
        place_name="devices",
    )


def known_names() -> str:
    """Models and hardware, with where their numbers are from."""
    rows = [["model", "gradients, MB", "forward GFLOPs a sample"]]
    for name, make in MODELS.items():
        profile = make()
        flops = profile.forward_flops_per_sample / 1e9
        rows.append([name, f"{profile.gradient_bytes / 1e6:,.0f}", f"{flops:,.1f}"])
    lines = [format_table(rows, left=()), ""]
    for machine in HARDWARE.values():
        lines.append(f"{machine.name}: {machine.source}")
    return "\n".join(lines)


def published_table() -> str:
    """Each published figure with the predicted one, as a table of Markdown."""
    lines = [
        "| run | published | predicted | off by | quantity | source |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for point in POINTS:
        predicted = point.predict()
        fitted = " (fitted)" if point.is_fitted else ""
        lines.append(
            f"| {point.name} | {point.published:.3f} | {predicted:.3f} | "
            f"{100 * point.error:+.1f}% | {point.quantity}{fitted} | {point.source} |"
        )
    return "\n".join(lines)


def _parts_of(curve: Sequence[StepPrediction]) -> list[str]:
    """Those that take time anywhere."""
    return [part for part in PARTS if any(step.part_seconds[part] for step in curve)]


def _shares(step: StepPrediction) -> dict[str, float]:
    if math.isinf(step.step_seconds):
        return {part: float(math.isinf(step.part_seconds[part])) for part in PARTS}
    return lost_shares(step)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def _short(number: int) -> str:
    """As few signs as say it.

    >>> [_short(number) for number in (512, 1024, 16384, 1500)]
    ['512', '1k', '16k', '1500']
    """
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)
