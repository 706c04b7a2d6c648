"""What the scripts share: their options, and figures in words."""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tfdp.checks import integer_from
from tfdp.cluster.machine import describe_machine
from tfdp.errors import ConfigurationError, DeviceError
from tfdp.files.asked_for import check_output_paths, write_json_for
from tfdp.tools.processes.children import ProcessFailed, answer

__all__ = [
    "Load",
    "add_devices",
    "ask_in_turn",
    "in_a_line",
    "least_to_most",
    "make_parser",
    "needs_proc",
    "run_script",
    "write_report",
]

Request = TypeVar("Request")
Found = TypeVar("Found")

# What `python -m benchmarks.X` is started with as a worker: JSON, not an option.
JSON_STARTS = "{"


def make_parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """The options that every script has.

    Args:
      description: what it measures.
      repeats: the default of `--repeats`.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--repeats",
        type=integer_from(1),
        default=repeats,
        metavar="R",
        help=f"figures of each kind (default: {repeats})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny subjects: shows that it runs"
    )
    parser.add_argument("--json", metavar="PATH", help="also write all figures here")
    parser.add_argument(
        "--timeout-seconds",
        type=integer_from(1),
        default=900,
        metavar="S",
        help="the most that one measurement may take (default: 900)",
    )
    return parser


def add_devices(parser: argparse.ArgumentParser, default: Sequence[int]) -> None:
    """The option `--devices`: numbers of replicas."""
    parser.add_argument(
        "--devices",
        nargs="+",
        type=integer_from(1),
        default=list(default),
        metavar="N",
        help=f"numbers of replicas (default: {' '.join(map(str, default))})",
    )


def run_script(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    find: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Ends the process with what `run` returns, or works for another one of the script.

    Args:
      parser: of the options.
      run: the script: from the options to the exit code.
      find: what a worker process measures: from the request to plain data.
    """
    words = sys.argv[1:]
    if find is not None and words and words[0].startswith(JSON_STARTS):
        answer(words, find)
        sys.exit()
    options = parser.parse_args(words)
    try:
        places = {"--json": options.json, "--plot": getattr(options, "plot", None)}
        check_output_paths(places)
        sys.exit(run(options))
    except (ConfigurationError, DeviceError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


class Load:
    """The load of the machine while something is measured."""

    def __init__(self) -> None:
        self.figures = [os.getloadavg()[0]]

    def note(self) -> None:
        """Takes one more figure."""
        self.figures.append(os.getloadavg()[0])

    def __str__(self) -> str:
        self.note()
        least, most = min(self.figures), max(self.figures)
        return f"load of the machine {least:.1f} to {most:.1f}"


def ask_in_turn(
    requests: Sequence[Request], repeats: int, ask: Callable[[Request], Found]
) -> tuple[dict[Request, list[Found]], Load, int]:
    """What `ask` finds for each request, in `repeats` turns; prints what has failed.

    Returns what was found, by request; the load meanwhile; and the exit status.
    """
    found: dict[Request, list[Found]] = {request: [] for request in requests}
    load, failed = Load(), 0
    for _ in range(repeats):
        for request in requests:
            try:
                found[request].append(ask(request))
            except ProcessFailed as error:
                failed = 1
                print(f"{request}: {in_a_line(error)}", file=sys.stderr)
            load.note()
    return found, load, failed


def write_report(path: str | None, suite: str, **more: Any) -> None:
    """Writes the figures as JSON, with the machine; nothing without a path."""
    if path:
        report: Mapping[str, Any] = {"suite": suite, "machine": describe_machine()}
        write_json_for("--json", path, {**report, **more})
        print(f"written to {path}")


def needs_proc() -> None:
    """Refuses systems where the peak of memory cannot be read.

    Raises:
      DeviceError: this is not Linux.
    """
    if not pathlib.Path("/proc/self/clear_refs").exists():
        raise DeviceError("Memory is read in /proc/self: this needs Linux.")


def in_a_line(error: ProcessFailed) -> str:
    """How a process failed, and the last line of its output."""
    return ": ".join([error.how, *error.last_lines[-1:]])


def least_to_most(figures: Sequence[float], form: str, unit: str = "") -> str:
    """Median and extremes in words.

    >>> least_to_most([3.0, 1.0, 2.5], ".1f", " s")
    '2.5 s (1.0 to 3.0)'
    """
    middle = f"{statistics.median(figures):{form}}{unit}"
    return f"{middle} ({min(figures):{form}} to {max(figures):{form}})"
