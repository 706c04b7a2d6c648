"""The `tfdp report` command: a training run as text and as one HTML page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from os.path import realpath
from pathlib import Path

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_paths, write_json_for, write_text_for
from tfdp.progress_bar import progress_bar
from tfdp.tools.runs.entries import printable
from tfdp.tools.runs.facts import RunFacts, facts_of
from tfdp.tools.runs.in_words import compared, summary
from tfdp.tools.runs.page import draw_comparison, draw_run
from tfdp.tools.runs.read import is_record_file, read_run

EPILOG = (
    "RUN is the directory of a tfdp.callbacks.RunRecord. The page is one "
    "self-contained file: report.html in the directory of the (first) run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp report`."""
    parser.epilog = EPILOG
    add = parser.add_argument
    runs = "directory of a run; several runs are compared"
    add("runs", metavar="RUN", nargs="+", help=runs)
    add("--page", metavar="PATH", help="write the page to this file instead")
    add("--json", metavar="PATH", help="also write the figures to this file")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp report`; returns the exit code."""
    check_output_paths({"--page": options.page, "--json": options.json})
    names = _names(options.runs)
    for option, path in (("--page", options.page), ("--json", options.json)):
        _protect_record(option, path, options.runs)
    page = Path(options.page or Path(options.runs[0], "report.html"))
    if options.json is not None and realpath(options.json) == realpath(page):
        raise ConfigurationError(
            f"--json {options.json}: the page is written to the same file. Give "
            "another name, or change the page's: --page PATH."
        )
    found: list[tuple[str, RunFacts]] = []
    with progress_bar("reading", len(names)) as advance:
        for name, directory in zip(names, options.runs, strict=True):
            found.append((name, facts_of(read_run(directory))))
            advance(1)
    print("\n\n".join(summary(facts) for _, facts in found))
    if len(found) > 1:
        print(f"\n{compared(found)}")
    if options.json is not None:
        values = {name: facts.to_json() for name, facts in found}
        write_json_for("--json", options.json, values)
    # Last, because it may lack matplotlib.
    if len(found) > 1:
        text = draw_comparison(found, " vs ".join(names))
    else:
        folder = os.path.relpath(options.runs[0], page.absolute().parent)
        text = draw_run(found[0][1], f"Run {names[0]}", folder)
    write_text_for("--page", page, text)
    print(f"\npage with charts: {printable(str(page.absolute()))}")
    return 0


def _names(directories: Sequence[str]) -> list[str]:
    """Unique names of the runs: the directories' names, or their paths."""
    places = [realpath(directory) for directory in directories]
    if len(set(places)) < len(places):
        raise ConfigurationError("The same run is given twice. Give each one once.")
    names = [Path(directory).absolute().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    return [printable(name) for name in names]


def _protect_record(option: str, path: str | None, directories: Sequence[str]) -> None:
    if path is None:
        return
    folders = {realpath(directory) for directory in directories}
    place = Path(realpath(path))
    if is_record_file(place.name) and str(place.parent) in folders:
        raise ConfigurationError(
            f"{option} {path} would overwrite a file of the run's own record. Give "
            "another name."
        )
