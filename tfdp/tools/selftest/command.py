"""`tfdp selftest`: the devices of this machine, looked at in some minutes."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.nvidia import ALLOW_GROWTH, gpu_links
from tfdp.errors import ConfigurationError, DeviceError
from tfdp.files.asked_for import refuse_bad_place, write_json_for
from tfdp.progress_bar import progress_bar
from tfdp.tools.bench.worker_process import WorkerFailed, run_worker
from tfdp.tools.commands.info import format_facts, gather_facts
from tfdp.tools.report.text import format_table
from tfdp.tools.selftest.parts import Part, parts_for

WORKER = "tfdp.tools.selftest.worker"
ALL_RIGHT, SOME_WRONG, NOT_WRITTEN = 0, 1, 2
REPORT = "tfdp-selftest.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp selftest`."""
    parser.add_argument(
        "--devices",
        type=integer_from(2),
        metavar="N",
        help="so many GPUs, or logical CPUs; a single GPU is split into so many "
        "(default: all GPUs; 2 logical devices where there are fewer than two)",
    )
    parser.add_argument(
        "--device-type",
        choices=("cpu", "gpu"),
        help="logical CPUs, or GPUs (default: GPUs where there are any)",
    )
    parser.add_argument(
        "--timeout-seconds",
        type=integer_from(1),
        metavar="S",
        default=300,
        help="after which a part counts as hanging (default: 300)",
    )
    parser.add_argument(
        "--json",
        metavar="PATH",
        default=REPORT,
        help=f"where the report is written (default: {REPORT})",
    )


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp selftest`; returns the exit code.

    0 all is right, 1 something is not, 2 the report cannot be written.

    Raises:
      DeviceError: there are fewer GPUs than were asked for.
    """
    try:
        refuse_bad_place("--json", options.json)
        return _run(options)
    except ConfigurationError as error:
        print(f"tfdp selftest: {error}", file=sys.stderr)
        return NOT_WRITTEN


def _run(options: argparse.Namespace) -> int:
    # Or this process would keep all memory of the GPUs from those that look at them.
    os.environ.setdefault(*ALLOW_GROWTH)
    facts = gather_facts()
    gpus = _count_gpus(facts)
    device_type, devices = _choose(gpus, options.device_type, options.devices)
    print(format_facts(facts), end="\n\n", flush=True)
    what = "logical CPUs"
    if device_type == "gpu":
        what = (
            "logical GPUs of one GPU, and at the whole of it" if gpus == 1 else "GPUs"
        )
    print(f"looking at {devices} {what}", flush=True)
    found = _look_at_all(
        parts_for(device_type, devices), device_type, devices, options.timeout_seconds
    )
    wrong = [each["title"] for each in found if each["state"] != "right"]
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "facts": facts,
        "gpu_links": gpu_links(),
        "device_type": device_type,
        "devices": devices,
        "parts": found,
    }
    if wrong:
        print(f"{len(wrong)} of {len(found)} NOT right: {'; '.join(wrong)}")
    else:
        print(f"all {len(found)} right")
    write_json_for("--json", options.json, report)
    print(f"written to {options.json}, which is worth sending with a report")
    return SOME_WRONG if wrong else ALL_RIGHT


def _count_gpus(facts: dict[str, Any]) -> int:
    listed = (facts["devices"] or {}).get("physical", [])
    return sum(device["type"] == "GPU" for device in listed)


def _choose(gpus: int, device_type: str | None, devices: int | None) -> tuple[str, int]:
    if device_type is None:
        device_type = "gpu" if gpus else "cpu"
    if devices is None:
        devices = max(gpus, 2) if device_type == "gpu" else 2
    # One is split into as many logical ones.
    if device_type == "gpu" and gpus < devices and gpus != 1:
        raise DeviceError(
            f"{devices} GPUs were asked for, and TensorFlow sees {gpus}. Ask for fewer "
            "with --devices, or for --device-type cpu."
        )
    return device_type, devices


def _look_at_all(
    parts: Sequence[Part], device_type: str, devices: int, timeout_seconds: float
) -> list[dict[str, Any]]:
    width = max(len(part.title) for part in parts)
    found = []
    for part in parts:
        start = time.perf_counter()
        asked = {
            "part": dataclasses.asdict(part),
            "device_type": device_type,
            "devices": devices,
        }
        try:
            # In a process of its own: a collective that hangs, or crashes, is one
            # part's, and the report is written all the same.
            with progress_bar(part.title, 0):
                result = run_worker(WORKER, asked, timeout_seconds)
        except WorkerFailed as error:
            result = {"state": "FAILED", "said": str(error)}
        seconds = time.perf_counter() - start
        found.append({"title": part.title, **result, "seconds": round(seconds, 2)})
        row = (part.title.ljust(width), result["state"], f"{seconds:5.1f} s")
        print(format_table([(*row, result["said"])]), flush=True)
    return found
