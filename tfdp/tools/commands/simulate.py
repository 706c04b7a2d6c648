"""`tfdp simulate`: predicts how long a step takes on other hardware."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_path, write_text_for
from tfdp.files.checked_json import finite
from tfdp.plan.options import OPTIONS
from tfdp.tools.report.html_page import html_page
from tfdp.tools.report.plots import Chart, draw_chart, require_matplotlib
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
from tfdp.tools.simulator.waiting import Delays, WaitingWorkers, compare_policies

MOST_DEVICES = 16_384
DEFAULT_BATCH = 32
FAILED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp simulate`."""
    _add_training(parser)
    _add_hardware(parser)
    add, number = parser.add_argument, partial(parser.add_argument, type=float)
    number("--jitter", default=JITTER, help=f"of a step, relative (default: {JITTER})")
    number("--input-samples-per-second", metavar="R", help="of a host's input pipeline")
    number(
        "--device-hours-between-failures",
        metavar="H",
        help="of one device; adds checkpoints and failures to the prediction",
    )
    number("--restart-seconds", metavar="S")
    number("--checkpoint-pause-seconds", metavar="S")
    best = "(default: the best, by Daly's formula)"
    number("--checkpoint-interval-seconds", metavar="S", help=best)
    number("--price-per-device-hour", default=0.0, metavar="P")
    _add_delays(parser)
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="PATH", help="also draw the curve, as an HTML page")
    add("--list", action="store_true", help="list models and hardware, with sources")
    published = "compare predictions with runs that papers published"
    add("--published", action="store_true", help=published)


def _add_delays(parser: argparse.ArgumentParser) -> None:
    delays = parser.add_argument_group(
        "slow workers", "each compares all policies, such as DiLoCo(quorum=...)"
    )
    number = partial(delays.add_argument, type=float, metavar="S")
    number("--slow-factor", metavar="F", help="how much longer one worker computes")
    number("--tail-seconds", help="the mean of an exponential time added to a step")
    number("--pause-seconds", help="of a pause of a worker")
    number("--pause-every-seconds", help="the mean time between pauses of a worker")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add, whole = parser.add_argument, partial(parser.add_argument, type=int)
    rate = partial(parser.add_argument, type=float, metavar="R")
    add("--model", metavar="NAME", help="from --list, or from the --machine's file")
    whole(
        "--batch",
        metavar="B",
        help=f"samples of each replica (default: {DEFAULT_BATCH}, or as measured)",
    )
    rate("--samples-per-second", help="of one device alone; otherwise from FLOPs")
    rate("--flops-per-second", help="of a device, instead of the hardware's")
    for name in ("bucket_bytes", "first_bucket_bytes"):
        default = OPTIONS[f"Communication.{name}"].default
        flag = f"--{name.replace('_', '-')}"
        whole(flag, default=default, help=f"(default: {default})")
    add("--no-overlap", action="store_true", help="sums wait for all of backprop")
    ways = f"gradient compression: {', '.join(KNOWN_WAYS)}"
    add("--lossy", choices=KNOWN_WAYS, metavar="WAY", help=ways)
    rate(
        "--coding-bytes-per-second",
        help="with --lossy: gradient bytes that a host encodes and decodes, including "
        "error feedback",
    )
    add("--shard", choices=("parameters",), help="sharded weights, gathered twice")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, partial(parser.add_argument, type=float)
    add("--hardware", choices=HARDWARE, help="a known machine")
    add("--machine", metavar="FILE", help="a machine measured by `tfdp measure`")
    counts = f"numbers of devices (default: 1 to {MOST_DEVICES:,})"
    add("--devices", type=int, nargs="+", metavar="N", help=counts)
    add("--devices-per-host", type=int, metavar="D")
    default = "of the sums (default: two_level; sockets with --machine)"
    add("--algorithm", choices=ALGORITHMS, help=default)
    for level in ("within", "between"):
        link = f"of the link {level} hosts, instead of the hardware's"
        number(f"--{level}-bytes-per-second", metavar="R", help=link)
        number(f"--{level}-latency-seconds", metavar="S")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp simulate`; returns the exit code."""
    if options.list or options.published:
        _reject_other_options(options)
        print(known_names() if options.list else published_table())
        return 0
    check_output_path("--plot", options.plot)
    if options.plot is not None:
        require_matplotlib()
    training = training_of(options)
    devices = options.devices or device_counts(
        1, MOST_DEVICES, training.machine.devices_per_host
    )
    curve = scaling_curve(training, devices)
    delays = _delays(options)
    if delays is not None:
        print(policies_table(training, curve, delays))
        return 0
    if options.json:
        values = curve_values(training, curve)
        print(json.dumps(finite(values, lambda _: None), indent=1))
    else:
        print(curve_table(training, curve))
    if options.plot is not None:
        write_text_for("--plot", options.plot, curve_page(training, curve))
        print(f"drawn in {pathlib.Path(options.plot).absolute()}", file=sys.stderr)
    return 0


def _reject_other_options(options: argparse.Namespace) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = "list" if options.list else "published"
    for name, default in vars(parser.parse_args([])).items():
        if name != text and getattr(options, name) != default:
            raise ConfigurationError(
                f"--{text} prints a text, on which --{name.replace('_', '-')} has no "
                "effect: leave one of both out."
            )


def training_of(options: argparse.Namespace) -> Training:
    """The training that the options describe."""
    if bool(options.hardware) == bool(options.machine):
        raise ConfigurationError(
            f"Give either --hardware, one of {', '.join(HARDWARE)}, or --machine with "
            "a file of `tfdp measure`."
        )
    make_training = _measured_training if options.machine else _known_training
    training = make_training(options)
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
            raise ConfigurationError("--coding-bytes-per-second: only with --lossy.")
        return None
    if options.shard == "parameters" and KNOWN_WAYS[options.lossy].keeps:
        raise ConfigurationError(
            f"--lossy {options.lossy} sums whole gradients, which --shard parameters "
            "does not: use bfloat16 or float16, or leave one of both out."
        )
    if options.machine:
        way = read_machine(options.machine).lossy(options.lossy)
    elif rate is None:
        raise ConfigurationError(
            f"How fast {options.hardware} compresses gradients is not known: give "
            "--coding-bytes-per-second. `tfdp measure` measures it for a core."
        )
    else:
        # A GPU compresses while it computes, which slows down the computing.
        way = KNOWN_WAYS[options.lossy]
    if rate is not None:
        positive("", "--coding-bytes-per-second", rate)
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
    whole("", "--batch", samples)
    if options.samples_per_second is not None:
        if options.flops_per_second is not None:
            raise ConfigurationError(
                "--samples-per-second and --flops-per-second both set how fast a "
                "device is: leave one out."
            )
        positive("", "--samples-per-second", options.samples_per_second)
        seconds = samples / options.samples_per_second
        return Training(model, Compute.from_seconds(seconds, samples), machine)
    flops_per_second = options.flops_per_second
    if flops_per_second is None:
        flops_per_second = machine.flops_per_second
    if flops_per_second is None:
        raise ConfigurationError(
            f"The FLOP/s that a device of {machine.name} reaches are not known: give "
            "--samples-per-second of one device, or --flops-per-second."
        )
    compute = Compute.from_flops(model, samples, flops_per_second)
    return Training(model, compute, machine)


def _measured_training(options: argparse.Namespace) -> Training:
    measured = read_machine(options.machine)
    for option in ("batch", "samples_per_second", "flops_per_second"):
        if getattr(options, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise ConfigurationError(
                f"{name}: with --machine the measured value is used; leave it out, or "
                "use --hardware."
            )
    name = options.model
    if name is None and len(measured.models) == 1:
        (name,) = measured.models
    found = measured.model(name or "(none given)")
    most = max(replicas for processes, replicas in found.step_seconds if processes == 1)
    if options.devices_per_host is not None:
        most = options.devices_per_host
    return measured.training(name, most)


def _with_other_links(machine: Machine, options: argparse.Namespace) -> Machine:
    def other(link: Link, level: str) -> Link:
        for field in ("bytes_per_second", "latency_seconds"):
            value = getattr(options, f"{level}_{field}")
            if value is not None:
                link = dataclasses.replace(link, **{field: value})
        return link

    within = other(machine.within_host, "within")
    between = other(machine.between_hosts, "between")
    return dataclasses.replace(machine, within_host=within, between_hosts=between)


def _reliability(options: argparse.Namespace) -> Reliability | None:
    if options.device_hours_between_failures is None:
        for option in ("restart", "checkpoint_pause", "checkpoint_interval"):
            if getattr(options, f"{option}_seconds") is not None:
                raise ConfigurationError(
                    f"--{option.replace('_', '-')}-seconds acts only with "
                    "--device-hours-between-failures."
                )
        return None
    pause = options.checkpoint_pause_seconds
    return Reliability(
        options.device_hours_between_failures,
        restart_seconds=options.restart_seconds or 0.0,
        checkpoint_pause_seconds=1.0 if pause is None else pause,
        checkpoint_interval_seconds=options.checkpoint_interval_seconds,
    )


def _delays(options: argparse.Namespace) -> Delays | None:
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Delays)
        if getattr(options, field.name) is not None
    }
    if not given:
        return None
    if ("pause_seconds" in given) != ("pause_every_seconds" in given):
        raise ConfigurationError(
            "--pause-seconds and --pause-every-seconds describe pauses together: give "
            "both."
        )
    if options.json or options.plot or len(options.devices or ()) != 1:
        raise ConfigurationError(
            "Slow workers (--slow-factor, --tail-seconds, --pause-seconds) print a "
            "table for one number of devices: give one --devices, without --json and "
            "--plot."
        )
    return Delays(**given)


def policies_table(
    training: Training, curve: Sequence[StepPrediction], delays: Delays
) -> str:
    """A row for each policy against slow workers."""
    (step,) = curve
    seconds = step.part_seconds
    cluster = WaitingWorkers(
        step.topology.hosts,
        seconds["compute"] + seconds["sharing cores"],
        seconds["communication"],
        delays,
    )
    rows = [["policy", "update, s", "efficiency", "dropped", "staleness"]]
    rows += [
        [
            found.policy,
            f"{found.update_seconds:.4g}",
            f"{found.efficiency:.1%}",
            f"{found.dropped:.1%}",
            f"{found.staleness:.2g}",
        ]
        for found in compare_policies(cluster)
    ]
    heading = (
        f"{training.model.name} on {cluster.workers} workers. A step computes for "
        f"{cluster.step_seconds:.4g} s, exchanges for {cluster.exchange_seconds:.4g} "
        "s. Efficiency: gradients that count, relative to workers without delays and "
        "exchanges"
    )
    return "\n".join([heading, "", format_table(rows, left=(0,))])


def curve_table(training: Training, curve: Sequence[StepPrediction]) -> str:
    """A row for each number of devices, with the shares of parts that take any time."""
    shown = _parts_of(curve)
    has_price = training.price_per_device_hour > 0
    titles = ["devices", "step, s", "samples/s", "efficiency", *shown]
    rows = [titles + ["price of 1M samples"] * has_price]
    for step in curve:
        shares, rate = _shares(step), step.samples_per_second
        row = [
            f"{step.devices:,}",
            f"{step.step_seconds:.4g}",
            f"{rate:,.4g}" if rate < 1e4 else f"{rate:,.0f}",
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
    most = f"largest loss: {last.largest_loss}, on {last.devices:,} devices"
    return "\n".join([heading, "", format_table(rows, left=()), "", most])


def curve_values(training: Training, curve: Sequence[StepPrediction]) -> dict[str, Any]:
    """The curve as plain data."""
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
                "step_seconds": step.step_seconds,
                "samples_per_second": step.samples_per_second,
                "efficiency": step.efficiency,
                "part_seconds": step.part_seconds,
                "sum_seconds": step.sum_seconds,
                "largest_loss": step.largest_loss,
                "price_per_million_samples": step.price_per_million_samples,
            }
            for step in curve
        ],
    }


def curve_page(training: Training, curve: Sequence[StepPrediction]) -> str:
    """An HTML page: efficiency, samples per second, and the parts of a step."""
    one = training.compute.samples / training.compute.seconds

    def chart(title: str, lines: Mapping[str, Sequence[float]]) -> str:
        devices = [_short(step.devices) for step in curve]
        points = {
            name: list(zip(devices, values, strict=True))
            for name, values in lines.items()
        }
        return draw_chart(Chart(title, points, "devices"))

    shares = [_shares(step) for step in curve]
    return html_page(
        f"{training.model.name} on {training.machine.name}",
        chart("efficiency, %", {"": [100 * step.efficiency for step in curve]}),
        chart(
            "samples per second, logarithm to base 10",
            {
                "linear": [math.log10(one * step.devices) for step in curve],
                "predicted": [_log10(step.samples_per_second) for step in curve],
            },
        ),
        chart(
            "share of a step, %",
            {part: [100 * of[part] for of in shares] for part in _parts_of(curve)},
        ),
    )


def known_names() -> str:
    """The known models and hardware, with the sources of their numbers."""
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
    """Published and predicted figures, as a Markdown table."""
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
    return [part for part in PARTS if any(step.part_seconds[part] for step in curve)]


def _shares(step: StepPrediction) -> dict[str, float]:
    if math.isinf(step.step_seconds):
        return {part: float(math.isinf(step.part_seconds[part])) for part in PARTS}
    return lost_shares(step)


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def _short(number: int) -> str:
    """A number of devices as a short label, such as 512, 1k, 16k, 1500."""
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)
