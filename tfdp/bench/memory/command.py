"""`tfdp bench memory`: what each replica holds, beside what ZeRO's formulas say."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from tfdp.bench.memory.worker import MemoryFigures, MemoryRequest
from tfdp.bench.worker_process import WorkerFailed, run_worker
from tfdp.files.asked_for import write_json_for
from tfdp.plan.shards import SHARD_STAGES

__all__ = ["MEMORY_SUITE", "expected_bytes", "run_memory"]

MEMORY_SUITE = "memory"
# 12 layers of 2,896 x 2,896: 100.6 million weights.
LAYERS, WIDTH = 12, 2896
QUICK_LAYERS, QUICK_WIDTH = 3, 256
# Of a model that takes what its graph takes, and next to nothing else.
NARROW = 96
FLOAT_BYTES = 4
# TensorFlow then returns what it frees to the system, so that resident memory tells
# what lives: no pool of its own (its oneDNN build has one, with oneDNN off as well), no
# pool of the C library.
ENVIRONMENT = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}


def expected_bytes(request: MemoryRequest) -> MemoryFigures:
    """What the formulas say, in bytes per replica; float32 and Adam.

    With P parameters and N replicas: weights 4 P, slots 8 P and gradients 4 P, each
    divided by N from stage 3, 1 and 2 on; stage 3 has one gathered layer besides.

    Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.

    >>> figures = expected_bytes(MemoryRequest(devices=2, stage=1, layers=1, width=10))
    >>> figures.peak  # 8 P + 8 P / N
    1200.0
    """
    whole = FLOAT_BYTES * request.parameters
    shard = whole / request.devices
    weights = shard if request.stage >= 3 else whole
    slots = 2 * (shard if request.stage >= 1 else whole)
    gradients = shard if request.stage >= 2 else whole
    gathered = FLOAT_BYTES * request.width**2 if request.stage >= 3 else 0
    return MemoryFigures(
        weights=float(weights),
        slots=float(slots),
        at_rest=float(weights + slots),
        peak=float(weights + slots + gradients + gathered),
    )


def run_memory(
    devices: Sequence[int],
    *,
    quick: bool,
    json_path: str | None,
    timeout_seconds: float,
) -> int:
    """Measures every stage on every number of replicas; returns the exit code.

    Args:
      devices: numbers of replicas.
      quick: a small model, which shows only that it runs.
      json_path: also write all figures here.
      timeout_seconds: the most that one measurement may take.
    """
    if not pathlib.Path("/proc/self/clear_refs").exists():
        print("tfdp bench memory needs Linux: it reads /proc/self", file=sys.stderr)
        return 2
    layers, width = (QUICK_LAYERS, QUICK_WIDTH) if quick else (LAYERS, WIDTH)
    rows, failed = [], 0
    print(
        f"Adam on {layers * width**2 / 1e6:.1f}M float32 weights, {layers} layers; MB "
        "per replica, and as a share of what the formula says; the graph's own memory, "
        "in the last column, is taken off\n\n"
        f"{'N':>2} {'shard':>11} {'weights':>8} {'slots':>8} {'at rest':>15} "
        f"{'peak of a step':>17} {'graph':>6}",
        flush=True,
    )
    for number in devices:
        for stage, name in enumerate(SHARD_STAGES):
            request = MemoryRequest(number, stage, layers, width)
            try:
                graph = _graph_bytes(request, timeout_seconds)
                found = _measure(request, timeout_seconds)
            except WorkerFailed as error:
                failed = 1
                why = error.in_a_line
                print(f"{number:>2} {name:>11} failed: {why}", file=sys.stderr)
                continue
            found = dataclasses.replace(
                found, at_rest=found.at_rest - graph, peak=found.peak - graph
            )
            expected = expected_bytes(request)
            print(_format_row(number, name, found, expected, graph), flush=True)
            rows.append(
                {
                    **dataclasses.asdict(request),
                    "measured": dataclasses.asdict(found),
                    "expected": dataclasses.asdict(expected),
                    "graph_bytes": graph,
                }
            )
    if json_path:
        write_json_for("--json", json_path, {"suite": MEMORY_SUITE, "rows": rows})
    return failed


def _format_row(
    devices: int,
    name: str,
    found: MemoryFigures,
    expected: MemoryFigures,
    graph_bytes: float,
) -> str:
    def compared(key: str) -> str:
        measured, formula = getattr(found, key), getattr(expected, key)
        return f"{measured / 1e6:,.0f} ({measured / formula:.3f})"

    return (
        f"{devices:>2} {name:>11} {found.weights / 1e6:>8,.0f} "
        f"{found.slots / 1e6:>8,.0f} {compared('at_rest'):>15} {compared('peak'):>17} "
        f"{graph_bytes / 1e6:>6,.0f}"
    )


def _graph_bytes(request: MemoryRequest, timeout_seconds: float) -> float:
    """What the graph of such a model takes per replica, whatever its width."""
    narrow = _measure(dataclasses.replace(request, width=NARROW), timeout_seconds)
    return narrow.at_rest - narrow.weights - narrow.slots


def _measure(request: MemoryRequest, timeout_seconds: float) -> MemoryFigures:
    worker, asked = "tfdp.bench.memory.worker", dataclasses.asdict(request)
    return MemoryFigures(**run_worker(worker, asked, timeout_seconds, **ENVIRONMENT))
