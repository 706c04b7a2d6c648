"""What `tfdp simulate` says: tables, JSON and a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tfdp.tools.report.curve_page import draw_page
from tfdp.tools.report.text_table import format_table
from tfdp.tools.simulator.known_hardware import HARDWARE
from tfdp.tools.simulator.known_models import MODELS
from tfdp.tools.simulator.published import POINTS
from tfdp.tools.simulator.scaling import lost_shares
from tfdp.tools.simulator.step import PARTS, StepPrediction, Training

__all__ = [
    "curve_page",
    "curve_table",
    "curve_values",
    "known_names",
    "published_table",
]

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
