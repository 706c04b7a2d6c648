"""`tfdp bench first-step`: the first step of `fit`, over numbers of replicas."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tfdp.bench.first_step.worker import FirstStepFigures, FirstStepRequest
from tfdp.bench.worker_process import WorkerFailed, run_worker
from tfdp.cluster.machine import describe_machine
from tfdp.files.asked_for import write_json_for

__all__ = ["run_first_step"]

SUBJECTS, QUICK_SUBJECTS = ("resnet50", "transformer-12"), ("transformer-tiny",)
# TensorFlow's oneDNN build keeps a pool of what it once took.
ENVIRONMENT = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
WORKER = "tfdp.bench.first_step.worker"
COLUMNS = "{:>16} {:>2} {:>22} {:>24} {:>12} {:>13} {:>10} {:>11} {:>12} {:>11}"
TITLES = (
    *("model", "N", "first step, s", "processor, s", "next step, s"),
    *("processor, s", "ready, MB", "graph, MB", "at rest, MB", "peaks, MB"),
)


def run_first_step(
    devices: Sequence[int],
    *,
    repeats: int,
    quick: bool,
    json_path: str | None,
    timeout_seconds: float,
) -> int:
    """Measures every model on every number of replicas; returns the exit code.

    Args:
      devices: numbers of replicas; 1 is a training without a strategy.
      repeats: how often; models and numbers take turns, each in a process of its own.
      quick: a small model, which shows only that it runs.
      json_path: also write all figures here.
      timeout_seconds: the most that one measurement may take.
    """
    if not pathlib.Path("/proc/self/clear_refs").exists():
        print("tfdp bench first-step needs Linux: it reads /proc/self", file=sys.stderr)
        return 2
    requests = [
        FirstStepRequest(number, model)
        for model in (QUICK_SUBJECTS if quick else SUBJECTS)
        for number in devices
    ]
    found: dict[FirstStepRequest, list[FirstStepFigures]] = {r: [] for r in requests}
    failed, loads = 0, [os.getloadavg()[0]]
    for _ in range(repeats):
        for request in requests:
            try:
                found[request].append(_measure(request, timeout_seconds))
            except WorkerFailed as error:
                failed = 1
                why = error.in_a_line
                print(f"{request.model}, {request.devices}: {why}", file=sys.stderr)
            loads.append(os.getloadavg()[0])
    print(
        f"fit to the end of its first step, Adam, {requests[0].local_batch} samples a "
        f"replica; medians (least to most) of {repeats}; next: a step that has its "
        "graph; ready: the peak before the first step computes anything, with weights "
        "and TensorFlow; at rest: weights, slots, TensorFlow; peaks: of the first "
        "step, of the next\n\n" + COLUMNS.format(*TITLES)
    )
    for request, figures in found.items():
        if figures:
            print(_line(request, figures))
    print(f"\nload of the machine {min(loads):.1f} to {max(loads):.1f}", flush=True)
    if json_path:
        rows = [
            {**dataclasses.asdict(r), "figures": [dataclasses.asdict(f) for f in of]}
            for r, of in found.items()
        ]
        report = {"suite": "first-step", "machine": describe_machine()}
        write_json_for("--json", json_path, report | {"loads": loads, "rows": rows})
    return failed


def _line(request: FirstStepRequest, figures: Sequence[FirstStepFigures]) -> str:
    def all_of(key: str) -> list[float]:
        return [getattr(figure, key) for figure in figures]

    def middle(key: str, factor: float = 1.0, form: str = ".0f") -> str:
        return format(statistics.median(all_of(key)) * factor, form)

    def spread(key: str) -> str:
        values = all_of(key)
        return f"{middle(key, form='.1f')} ({min(values):.1f} .. {max(values):.1f})"

    peaks = [middle(f"{of}_peak_bytes", 1e-6) for of in ("first", "next")]
    return COLUMNS.format(
        request.model,
        request.devices,
        spread("first_seconds"),
        spread("first_processor_seconds"),
        middle("next_seconds", form=".2f"),
        middle("next_processor_seconds", form=".2f"),
        middle("ready_peak_bytes", 1e-6),
        middle("graph_bytes", 1e-6),
        middle("stored_bytes", 1e-6),
        ", ".join(peaks),
    )


def _measure(request: FirstStepRequest, timeout_seconds: float) -> FirstStepFigures:
    found: dict[str, Any] = {}
    for stops in (False, True):
        asked = dataclasses.asdict(dataclasses.replace(request, stops=stops))
        found |= run_worker(WORKER, asked, timeout_seconds, **ENVIRONMENT)
    return FirstStepFigures(**found)
