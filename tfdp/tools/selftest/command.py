"""`tfdp selftest`: checks and times this machine's devices in a few minutes."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import time
from collections.abc import Sequence
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.nvidia import ALLOW_GROWTH, gpu_links
from tfdp.errors import DeviceError
from tfdp.files.asked_for import check_output_path, write_json_for
from tfdp.progress_bar import progress_bar
from tfdp.tools.commands.info import format_facts, gather_facts
from tfdp.tools.processes.children import ProcessFailed, ask_child
from tfdp.tools.report.text import format_table
from tfdp.tools.selftest.parts import Part, parts_for

WORKER = "tfdp.tools.selftest.worker"
ALL_RIGHT, SOME_WRONG, FAILED = 0, 1, 2
REPORT = "tfdp-selftest.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp selftest`."""
    add = parser.add_argument
    add(
        "--devices",
        type=integer_from(2),
        metavar="N",
        help="number of GPUs or logical CPUs; one GPU is split into N logical ones "
        "(default: all GPUs; 2 logical devices if there are fewer than two)",
    )
    kinds = "logical CPUs, or GPUs (default: GPUs if there are any)"
    add("--device-type", choices=("cpu", "gpu"), help=kinds)
    limit = "after which a part counts as hanging (default: 300)"
    seconds = integer_from(1)
    add("--timeout-seconds", type=seconds, metavar="S", default=300, help=limit)
    report = f"the report to write (default: {REPORT})"
    add("--json", metavar="PATH", default=REPORT, help=report)


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp selftest`; returns 0 all right, 1 something wrong."""
    check_output_path("--json", options.json)
    # Else this process would take all GPU memory from its workers.
    os.environ.setdefault(*ALLOW_GROWTH)
    facts = gather_facts()
    physical = (facts["devices"] or {}).get("physical", [])
    gpus = sum(device["type"] == "GPU" for device in physical)
    device_type = options.device_type or ("gpu" if gpus else "cpu")
    devices = options.devices or (max(gpus, 2) if device_type == "gpu" else 2)
    # A single GPU is split into logical ones.
    if device_type == "gpu" and gpus < devices and gpus != 1:
        raise DeviceError(
            f"{devices} GPUs were requested, and TensorFlow sees {gpus}. Request fewer "
            "with --devices, or use --device-type cpu."
        )
    print(format_facts(facts), end="\n\n", flush=True)
    what = "logical CPUs"
    if device_type == "gpu":
        what = "logical GPUs of one GPU, and the whole GPU" if gpus == 1 else "GPUs"
    print(f"checking {devices} {what}", flush=True)
    parts = parts_for(device_type, devices)
    found = _run_parts(parts, device_type, devices, options.timeout_seconds)
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
    print(f"written to {options.json}; please attach it to bug reports")
    return SOME_WRONG if wrong else ALL_RIGHT


def _run_parts(
    parts: Sequence[Part], device_type: str, devices: int, timeout_seconds: float
) -> list[dict[str, Any]]:
    width = max(len(part.title) for part in parts)
    found = []
    for part in parts:
        start = time.perf_counter()
        request: dict[str, Any] = {"device_type": device_type, "devices": devices}
        request["part"] = dataclasses.asdict(part)
        try:
            # A process per part: a hang or crash in one does not stop the others.
            with progress_bar(part.title, 0):
                result = ask_child(WORKER, request, timeout_seconds)
        except ProcessFailed as error:
            result = {"state": "FAILED", "said": str(error)}
        seconds = time.perf_counter() - start
        found.append({"title": part.title, **result, "seconds": round(seconds, 2)})
        row = (part.title.ljust(width), result["state"], f"{seconds:5.1f} s")
        print(format_table([(*row, result["said"])]), flush=True)
    return found
