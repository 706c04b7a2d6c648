"""Trains programs of libraries that build on Keras on one device and on two replicas.

Each library is installed, in the release named here, into an environment of its own
that sees the packages of this one, so TensorFlow and Keras are those that tfdp is
tested with. Needs a package index.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import venv
from typing import Any

from benchmarks.shared import make_parser, run_script, write_report

#: By the module of its programs: the releases to install.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "keras_itself": ("scikit-learn==1.9.1",),
    "keras_hub": ("keras-hub==0.32.0",),
    "keras_rs": ("keras-rs==0.4.0",),
    "keras_tuner": ("keras-tuner==1.4.8",),
    "bayesflow": ("bayesflow==2.0.12",),
    "datasets": ("datasets==5.2.0",),
    "scikeras": ("scikeras==0.13.0",),
    "trackers": (
        "mlflow-skinny==3.17.2",
        "tensorboard",
        "pandas",
        "sqlalchemy",
        "alembic",
    ),
}
ROOT = pathlib.Path(__file__).parents[2]


class NotInstalled(RuntimeError):
    """pip could not install a release."""


def _install(folder: pathlib.Path, requirements: tuple[str, ...]) -> pathlib.Path:
    """Returns the Python of an environment that has the releases, and this one's."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", query], capture_output=True, text=True)
    site = pathlib.Path(found.stdout.strip())
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    listed = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    frozen = subprocess.run(listed, capture_output=True, text=True).stdout
    kept = [line for line in frozen.splitlines() if "==" in line]
    own = {requirement.partition("==")[0] for requirement in requirements}
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "\n".join(line for line in kept if line.partition("==")[0] not in own)
    )
    install = ["-m", "pip", "install", "-q", "-c", str(constraints), *requirements]
    done = subprocess.run([str(python), *install], capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(done.stderr.strip().splitlines()[-1])
    return python


def _outcomes(
    python: pathlib.Path, library: str, seconds: int, names: list[str]
) -> list[dict[str, Any]]:
    """Returns what each program of a library came to, in a process of its own."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
    }
    command = [str(python), "-m", "benchmarks.downstream.one", library, *names]
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=python.parents[1],
                timeout=seconds,
            )
            output, end = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output, end = _text(error.stdout), f"no end within {seconds} s"
        found = [
            json.loads(line)
            for line in output.splitlines()
            if line.startswith('{"case"')
        ]
        if end != "exit code 0":
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
            found.append(
                {
                    "case": "(all)",
                    "state": "fails",
                    "largest": None,
                    "words": f"{end}: {last}",
                }
            )
    return found


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def run(options: argparse.Namespace) -> int:
    """Prints a line for each program, and a row of the table for each library."""
    table, rows = [], []
    for library in options.only or LIBRARIES:
        requirements = LIBRARIES[library]
        with tempfile.TemporaryDirectory(prefix="downstream-") as folder:
            try:
                python = _install(pathlib.Path(folder), requirements)
            except NotInstalled as error:
                print(f"{library}: not installed: {error}", flush=True)
                continue
            names = options.case if options.case else []
            found = _outcomes(python, library, options.timeout_seconds, names)
        for one in found:
            largest = "" if one["largest"] is None else f"{one['largest']:.1e}"
            words = (
                one["words"] if len(one["words"]) < 200 else one["words"][:197] + "..."
            )
            print(
                f"{library:13} {one['case']:45} {one['state']:13} {largest:8} {words}",
                flush=True,
            )
        states = collections.Counter(one["state"] for one in found)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        table.append(f"| {', '.join(requirements[:2])} | {len(found)} | {counts} |")
        rows += [{"library": library, **one} for one in found]
    print("\n| library | programs | outcomes |\n| --- | --- | --- |")
    print("\n".join(table))
    write_report(options.json, "downstream", rows=rows)
    # A program that plain Keras cannot run says nothing about tfdp.
    return int(any(one["state"] == "fails" for one in rows))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument(
        "--only", nargs="+", choices=LIBRARIES, metavar="LIBRARY", help="only these"
    )
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these programs")
    run_script(parser, run)
