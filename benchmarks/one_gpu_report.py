"""The machine's facts, and the rows of `one_gpu.py` as one page of Markdown."""

from __future__ import annotations

import datetime
import hashlib
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
QUERY_SECONDS = 20
# There where the driver is, and the machine, or container, was given a GPU.
CONTROL_FILE = pathlib.Path("/dev/nvidiactl")
REHEARSAL = (
    "**Rehearsal on logical CPUs at tiny sizes: no GPU was used, and the figures say "
    "nothing of one.**"
)
# Section -> its title, and how to read its rows.
SECTIONS = {
    "facts": ("Versions", ""),
    "overhead": (
        "Overhead at one replica",
        "Blocks of steps in turn, in one process; medians. `ratio` is the time beside "
        "plain Keras in the same turn, with the lowest and the highest turn. First "
        "steps of the two large models ran while other processes did, and the first "
        "arm's also loads kernels.",
    ),
    "sums": ("Sums, bit for bit", "On logical GPUs of the card, against NumPy."),
    "stages": (
        "Training on two logical GPUs beside one device",
        "Largest difference of weights after four steps, in units in the last place "
        "(ULP) of float32: of the largest number of the tensor, and of the number "
        "itself. The rows `yardstick` are plain Keras on one device, each batch added "
        "from two halves: what another order of additions does. Deterministic ops, no "
        "TF32; float16 with an infinity on one replica in the second step.",
    ),
    "halves": (
        "Two logical GPUs",
        "Beside `MirroredStrategy`; both replicas share the one card.",
    ),
    "packing": (
        "Packing, adding and copying",
        "ResNet-50's gradients; bytes read and written by the time.",
    ),
    "memory": (
        "Peak memory of a step",
        "By the allocator, of each of two logical GPUs, beside `tfdp.planning.plan`.",
    ),
    "timeline": (
        "Sums beside backprop",
        "An encoder on two logical GPUs. Streams of both replicas count: what computes "
        "beside a sum may be the other replica.",
    ),
    "drift": ("Embeddings on two logical GPUs", "`ReplicaCheck` in 32 steps."),
    "programs": (
        "Programs",
        "`sockets` is README's example in two processes on the one card.",
    ),
}


def machine_facts(root: pathlib.Path, command: Sequence[str]) -> dict[str, Any]:
    """Card, driver, commit, date: what needs no TensorFlow."""
    asked = "name,driver_version,memory.total,power.limit"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    smi = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    gpus = _said(smi).splitlines()
    if not gpus and CONTROL_FILE.exists():
        gpus = ["a GPU of which nvidia-smi says nothing"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "gpus": [] if hidden else gpus,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": _commit(root),
        "command": " ".join(["python", *command]),
    }


def _said(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _commit(root: pathlib.Path) -> str:
    """The commit; of a tree without one, a checksum of the package's files."""
    git = ["git", "-C", str(root)]
    if commit := _said([*git, "rev-parse", "HEAD"]):
        changed = _said([*git, "status", "--porcelain", "--untracked-files=no"])
        return commit + (" with changes" if changed else "")
    checksum = hashlib.sha256()
    for path in sorted((root / "tfdp").rglob("*.py")):
        checksum.update(path.relative_to(root).as_posix().encode())
        checksum.update(path.read_bytes())
    return f"unknown; SHA-256 of tfdp/**/*.py: {checksum.hexdigest()[:16]}"


def line_of(row: Row) -> str:
    """A row for people who watch: name, seconds, figures."""
    name = ": ".join(filter(None, [row["group"], row["row"]]))
    figures = ", ".join(
        f"{key} {_figure(value)}" for key, value in (row.get("figures") or {}).items()
    )
    said = row.get("said") or ""
    if row["state"] == "ok" and figures:
        said = ""
    told = "; ".join(filter(None, [figures, said]))
    mark = "" if row["state"] == "ok" else f"{row['state']}: "
    return f"{name} ({row['seconds']:.1f} s): {mark}{told}"[:500]


def report_text(machine: Mapping[str, Any], rows: Sequence[Row], ended: str) -> str:
    """The page."""
    versions: Row = next((r["figures"] for r in rows if r["group"] == "versions"), {})
    name = versions.get("GPU") or ""
    lines = [f"# tfdp on one GPU: {name}" if name else REHEARSAL, ""]
    if machine["gpus"] and not name:
        lines = ["**TensorFlow has not said that it sees the GPU.**", ""]
    elsewhere = sorted(
        {r["group"] for r in rows if r.get("device") == "CPU"} - {"plan"}
    )
    if name and elsewhere:
        lines += [f"On the CPU, not on the GPU, ran: {', '.join(elsewhere)}.", ""]
    if ended:
        lines += [f"The run was {ended}.", ""]
    facts = {
        "card, driver, memory, power limit": "; ".join(machine["gpus"]) or "none",
        **{key: value for key, value in versions.items() if key != "GPU"},
        "tfdp's commit": machine["commit"],
        "Python": machine["python"],
        "cores": machine["cores"],
        "date": machine["date"],
        "command": f"`{machine['command']}`",
        "seconds": machine.get("seconds", "still running"),
    }
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {_figure(value)} |" for key, value in facts.items()]
    wrong = [row for row in rows if row["state"] != "ok"]
    if wrong:
        lines += ["", "## Not right, or not run", ""]
        lines += [f"- {_cell(line_of(row), 400)}" for row in wrong]
    for section, (title, note) in SECTIONS.items():
        good = [
            row for row in rows if row["section"] == section and row["state"] == "ok"
        ]
        if section == "facts" or not good:
            continue
        if section == "memory":
            good = _with_errors(good)
        lines += ["", f"## {title}", ""] + ([note, ""] if note else [])
        lines += _table(good)
    return "\n".join(lines) + "\n"


def _with_errors(rows: Sequence[Row]) -> list[Row]:
    """What was measured, with what was planned for it and the error in percent."""
    planned = {r["row"]: r["figures"] for r in rows if r["group"] == "plan"}
    joined = []
    for row in rows:
        figures = dict(row.get("figures") or {})
        case = row["row"]
        if row["group"] == "plan":
            continue
        if case in planned:
            figures |= planned[case]
            if figures.get("peak MB") and figures.get("planned MB"):
                error = figures["planned MB"] / figures["peak MB"] - 1
                figures["error %"] = 100 * error
        joined.append({**row, "figures": figures})
    measured = {row["row"] for row in joined}
    joined += [r for r in rows if r["group"] == "plan" and r["row"] not in measured]
    return joined


def _table(rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(k for row in rows for k in row.get("figures") or {}))
    lines = [
        f"| | {' | '.join([*columns, 'seconds'])} |",
        "| --- |" + " --- |" * (len(columns) + 1),
    ]
    for row in rows:
        name = ": ".join(filter(None, [row["group"], row["row"]]))
        figures = row.get("figures") or {}
        cells = [_cell(_figure(figures.get(key, ""))) for key in columns]
        lines.append(f"| {' | '.join([name, *cells, str(row['seconds'])])} |")
    return lines


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str, most: int = 160) -> str:
    return text.replace("|", "/").replace("\n", " ")[:most]
