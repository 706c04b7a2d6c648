"""The `tfdp tune` command: which settings train a model fastest, here."""

from __future__ import annotations

import argparse
import dataclasses
import html
import math
import os
import pathlib
import statistics
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.machine import installed_versions, usable_cores
from tfdp.errors import ConfigurationError, TfdpError
from tfdp.files.asked_for import refuse_bad_places, write_json_for, write_text_for
from tfdp.launch.local import own_gpus
from tfdp.tools.bench.python_process import ended_together
from tfdp.tools.commands.check_target import parse_target
from tfdp.tools.commands.plan_model import FORMS, bytes_of
from tfdp.tools.commands.tune_processes import Trials
from tfdp.tools.commands.tune_run import Finished, TuneRun
from tfdp.tools.report.html_page import html_page, legend, svg_line, svg_text
from tfdp.tools.tune.space import LOSSY, Place, Setting, knobs_of
from tfdp.tools.tune.tuning import Trial
from tfdp.tools.tune.words import changes_in_words

TUNED, NOT_TUNED = 0, 2
EPILOG = "\n".join(
    textwrap.fill(text, 80)
    for text in (
        f"TARGET is {FORMS}.",
        "Exit status: 0 there is an answer, and it may be that the defaults stay; 2 "
        "nothing was tuned, or what was asked for could not be written.",
    )
)
DEFAULTS = {"trials": 12, "minutes": 15.0, "steps": 20, "rounds": 3, "finalists": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp tune`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="TARGET", help="what trains; see below")
    parser.add_argument(
        "--batch",
        type=integer_from(1),
        metavar="N",
        required=True,
        help="rows of the global batch, of all replicas together",
    )
    parser.add_argument(
        "--workers",
        type=integer_from(1),
        default=1,
        metavar="W",
        help="processes on this machine, as tfdp launch starts them (default: 1)",
    )
    parser.add_argument(
        "--replicas",
        type=integer_from(1),
        metavar="R",
        help="of each worker (default: its GPUs, or a logical CPU for each core)",
    )
    _add_what_may_be_tried(parser)
    _add_budget(parser)
    parser.add_argument("--json", metavar="PATH", help="also write all figures here")
    parser.add_argument(
        "--page", metavar="PATH", help="also draw them, as an HTML page"
    )


def _add_what_may_be_tried(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-lossy",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"these may be tried, too, though they change the numbers: "
        f"{', '.join(LOSSY)}",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="of one replica, such as 16GB: shards, remat and accumulation are tried, "
        "too, and nothing that does not fit",
    )


def _add_budget(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("trials", "the most settings to try"),
        ("steps", "that are timed in each trial"),
        ("rounds", "in which the best meet the defaults"),
        ("finalists", "how many of them"),
    ):
        parser.add_argument(
            f"--{name}",
            type=integer_from(2 if name == "rounds" else 1),
            default=DEFAULTS[name],
            metavar="N",
            help=f"{what} (default: {DEFAULTS[name]})",
        )
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULTS["minutes"],
        metavar="M",
        help=f"the most that all of it may take (default: {DEFAULTS['minutes']:g})",
    )
    parser.add_argument(
        "--timeout-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="the most that one trial may take (default: 300)",
    )


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp tune`; returns the exit status: 0 an answer, 2 none."""
    try:
        tuner = _run_of(options)
        with ended_together():
            found = tuner.run()
    except TfdpError as error:
        print(f"tfdp tune: {error}", file=sys.stderr)
        return NOT_TUNED
    try:
        _write(found, options)
    except TfdpError as error:
        print(f"tfdp tune: {error}", file=sys.stderr)
        return NOT_TUNED
    return TUNED


def _write(found: Finished, options: argparse.Namespace) -> None:
    if options.json is not None:
        write_json_for("--json", options.json, _document(options, found))
    if options.page is not None:
        title = f"{options.target} on {found.place}, {options.batch:,} rows a step"
        page = draw_trials(title, found.lines, found.trials, found.verdict.winner)
        write_text_for("--page", options.page, page)
        print(f"the trials in a picture: {pathlib.Path(options.page).absolute()}")


def _run_of(options: argparse.Namespace) -> TuneRun:
    """What is asked for, refused before minutes of trials and not after."""
    if not options.target.isidentifier():
        parse_target(options.target)
    for name in ("minutes", "timeout_seconds"):
        value = getattr(options, name)
        if not (0 < value < math.inf):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} must be a number above 0. Received: "
                f"{value!r}."
            )
    refuse_bad_places({"--json": options.json, "--page": options.page})
    gpus = len(own_gpus(os.environ))
    each = max(1, (gpus or usable_cores()) // options.workers)
    place = Place(
        options.workers,
        options.replicas or each,
        options.batch,
        _automatic_engine(options.workers, gpus),
    )
    memory_bytes = None if options.memory is None else bytes_of(options.memory)
    if place.all_replicas == 1 and memory_bytes is None:
        raise ConfigurationError(
            "One replica sends nothing, so there is nothing to tune. Give --replicas "
            "or --workers; with --memory, remat and accumulation are tried."
        )
    if place.rows < place.all_replicas:
        raise ConfigurationError(
            f"--batch {place.rows} gives {place.all_replicas} replicas less than a row "
            "each."
        )
    knobs = knobs_of(place, options.allow_lossy, memory_bytes is not None)
    trials = Trials(
        options.target,
        options.batch,
        place.processes,
        place.replicas,
        options.steps,
        options.timeout_seconds,
    )
    return TuneRun(
        trials,
        place,
        knobs,
        memory_bytes=memory_bytes,
        most_trials=options.trials,
        rounds=options.rounds,
        finalists=options.finalists,
        minutes=options.minutes,
    )


def _automatic_engine(workers: int, gpus: int) -> str:
    """What `engine="auto"` will be, until a trial has said what it is."""
    if gpus:
        return "tensorflow"
    return "in_process" if workers == 1 else "sockets"


def _document(options: argparse.Namespace, found: Finished) -> dict[str, Any]:
    return {
        "target": options.target,
        "place": dataclasses.asdict(found.place),
        "versions": installed_versions(),
        "load": list(found.load),
        "seconds": found.seconds,
        "winner": found.verdict.winner.as_json(),
        "lines": found.verdict.winner.lines,
        "gains": [
            {"setting": setting.as_json(), **dataclasses.asdict(gain)}
            for setting, gain in found.verdict.gains.items()
        ],
        "trials": [dataclasses.asdict(trial) for trial in found.trials],
        "log": found.lines,
    }


# The trials of `tfdp tune` as one HTML page.


COLOURS = {"the winner": "#2f7d4f", "the baseline": "#d9a521", "others": "#9dbbdb"}
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 1200, 620, 110, 22, 8, 10


def draw_trials(
    title: str, lines: Sequence[str], trials: Sequence[Trial], winner: Setting
) -> str:
    """The page: what is chosen, a bar for each trial, and the log.

    Args:
      title: the heading.
      lines: the explanation; the last ones are to be pasted.
      trials: the baseline first.
      winner: what is chosen.
    """
    said = "\n".join(html.escape(line) for line in lines)
    paste = "\n".join(html.escape(line) for line in winner.lines)
    return html_page(
        title,
        f"<pre><b>{paste}</b></pre>",
        legend(COLOURS),
        _picture(trials, winner),
        "<p>Bars: samples per second, in the rounds where there were any, else in the "
        "search. Black: from the slowest to the fastest round.</p>",
        f"<h2>Log</h2>\n<pre>{said}</pre>",
    )


def _picture(trials: Sequence[Trial], winner: Setting) -> str:
    ran = [trial for trial in trials if trial.speed is not None]
    most = max([max([t.speed or 0.0, *t.rounds]) for t in ran], default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + len(trials) * (_BAR + _GAP)
    lines = [
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'role="img" aria-label="samples per second by setting">'
    ]
    for number, trial in enumerate(trials):
        y = _TOP + number * (_BAR + _GAP)
        lines.append(
            svg_text(_LEFT - 8, y + 15, changes_in_words(trial.setting), "end")
        )
        if trial.speed is None:
            lines.append(svg_text(_LEFT + 4, y + 15, "failed", "start"))
            continue
        speed = statistics.median(trial.rounds) if trial.rounds else trial.speed
        kind = "the baseline" if trial is trials[0] else "others"
        colour = COLOURS["the winner" if trial.setting == winner else kind]
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{speed * scale:.1f}" height="{_BAR}" '
            f'fill="{colour}"/>'
        )
        if len(trial.rounds) > 1:
            ends = [
                _LEFT + each * scale for each in (min(trial.rounds), max(trial.rounds))
            ]
            lines.append(
                svg_line(ends[0], y + _BAR / 2, ends[1], y + _BAR / 2, "#000", 2)
            )
        x = _LEFT + max([speed, *trial.rounds]) * scale + 6
        lines.append(svg_text(x, y + 15, f"{speed:,.1f}", "start"))
    return "\n".join([*lines, "</svg>"])
