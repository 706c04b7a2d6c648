"""The `tfdp report` command: what a training run did, as text and as one page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import refuse_bad_places, write_json_for, write_text_for
from tfdp.progress_bar import progress_bar
from tfdp.tools.runs.facts import Facts, facts_of
from tfdp.tools.runs.in_words import compared, summary
from tfdp.tools.runs.page import draw_comparison, draw_run
from tfdp.tools.runs.read import is_read, read_run

EPILOG = (
    "RUN is the directory that tfdp.callbacks.RunRecord was given. The page is one "
    "file that needs no other: report.html in the directory of the (first) run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp report`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="directory of a run; several are shown side by side",
    )
    parser.add_argument("--page", metavar="PATH", help="write the page there instead")
    parser.add_argument("--json", metavar="PATH", help="also write the figures here")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp report`; returns the exit code."""
    refuse_bad_places({"--page": options.page, "--json": options.json})
    names = _names(options.runs)
    for option, path in (("--page", options.page), ("--json", options.json)):
        _refuse_record(option, path, options.runs)
    page = Path(options.page or Path(options.runs[0], "report.html"))
    if options.json is not None and _same_place(options.json, page):
        raise ConfigurationError(
            f"--json {options.json}: the page is written to the same file. Give "
            "another name, or the page one: --page PATH."
        )
    found: list[tuple[str, Facts]] = []
    with progress_bar("reading", len(names)) as advance:
        for name, directory in zip(names, options.runs, strict=True):
            found.append((name, facts_of(read_run(directory))))
            advance(1)
    print("\n\n".join(summary(facts) for _, facts in found))
    if len(found) > 1:
        print(f"\n{compared(found)}")
        text = draw_comparison(found, " beside ".join(names))
    else:
        folder = os.path.relpath(options.runs[0], page.absolute().parent)
        text = draw_run(found[0][1], f"Run {names[0]}", folder)
    write_text_for("--page", page, text)
    if options.json is not None:
        values = {name: facts.to_json() for name, facts in found}
        write_json_for("--json", options.json, values)
    print(f"\nin pictures: {page.absolute()}")
    return 0


def _same_place(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to one file."""
    return os.path.realpath(one) == os.path.realpath(other)


def _names(directories: Sequence[str]) -> list[str]:
    """What the runs are called: by their directories, each once."""
    places = [os.path.realpath(directory) for directory in directories]
    if len(set(places)) < len(places):
        raise ConfigurationError("The same run is given twice. Give each one once.")
    names = [Path(directory).absolute().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    return names


def _refuse_record(option: str, path: str | None, directories: Sequence[str]) -> None:
    if path is None:
        return
    folders = {os.path.realpath(directory) for directory in directories}
    place = Path(os.path.realpath(path))
    if is_read(place.name) and str(place.parent) in folders:
        raise ConfigurationError(
            f"{option} {path} is a part of the run's own record, which would be lost. "
            "Give another name."
        )
