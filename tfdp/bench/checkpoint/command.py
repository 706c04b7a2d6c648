"""`tfdp bench checkpoint`: what it takes to write and read, and what it costs `fit`."""

from __future__ import annotations

from tfdp.bench.checkpoint.in_fit import measure_fits, table_of_fits
from tfdp.bench.checkpoint.ways import measure_ways, table_of_ways
from tfdp.files.asked_for import write_json_for

__all__ = ["run_checkpoint"]


def run_checkpoint(*, repeats: int, quick: bool, json_path: str | None) -> int:
    """Runs `tfdp bench checkpoint`; returns the exit code."""
    size_bytes, seconds = measure_ways(repeats=repeats, quick=quick)
    print(table_of_ways(size_bytes, repeats, seconds), end="\n\n", flush=True)
    fits = measure_fits(repeats=repeats, quick=quick)
    print(table_of_fits(repeats, quick, fits))
    if json_path:
        figures = {"bytes": size_bytes, "seconds": seconds, "step_seconds": fits}
        write_json_for("--json", json_path, figures)
        print(f"written to {json_path}")
    return 0
