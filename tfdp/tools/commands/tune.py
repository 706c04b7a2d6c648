"""The `tfdp tune` command: which settings train a model fastest on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import html
import math
import os
import pathlib
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.machine import installed_versions, usable_cores
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_paths, write_json_for, write_text_for
from tfdp.launch.local import own_gpus
from tfdp.plan.sizes import bytes_of
from tfdp.progress_bar import progress_bar
from tfdp.tools.commands.check_target import end_help
from tfdp.tools.commands.plan_model import BATCH_HELP, FORMS, check_model, parse_model
from tfdp.tools.commands.tune_processes import TrialFailed, Trials
from tfdp.tools.commands.tune_run import Finished, TuneRun, batch_of_script, what_fits
from tfdp.tools.processes.children import ended_together
from tfdp.tools.report.html_page import html_page
from tfdp.tools.report.plots import draw_bars, require_matplotlib
from tfdp.tools.tune.space import LOSSY, Setting, TrialLayout, knobs_of
from tfdp.tools.tune.tuning import Trial
from tfdp.tools.tune.words import changes_in_words

FAILED = 2
DEFAULTS = {"trials": 12, "minutes": 15.0, "steps": 20, "rounds": 3, "finalists": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp tune`."""
    end_help(
        parser,
        f"TARGET is {FORMS}",
        "Exit status: 0 tuned, perhaps with the defaults as the result; 2 nothing was "
        "tuned, or a file could not be written.",
    )
    add = parser.add_argument
    count = partial(parser.add_argument, type=integer_from(1))
    add("target", metavar="TARGET", help="what to train; see below")
    count("--batch", metavar="N", help=BATCH_HELP)
    workers = "processes on this machine, as tfdp launch starts them (default: 1)"
    count("--workers", default=1, metavar="W", help=workers)
    replicas = "of each worker (default: its GPUs, or a logical CPU for each core)"
    count("--replicas", metavar="R", help=replicas)
    lossy = f"also try these, which change the numbers: {', '.join(LOSSY)}"
    names = partial(add, choices=LOSSY, nargs="+", default=[])
    names("--allow-lossy", metavar="NAME", help=lossy)
    add(
        "--memory",
        metavar="SIZE",
        help="of one replica, such as 16GB: also try shards, remat and accumulation, "
        "and nothing that does not fit",
    )
    for name, what in (
        ("trials", "the most settings to try"),
        ("steps", "timed in each trial"),
        ("rounds", "that compare the best settings with the defaults"),
        ("finalists", "number of best settings in these rounds"),
    ):
        default = DEFAULTS[name]
        least = integer_from(2 if name == "rounds" else 1)
        what += f" (default: {default})"
        add(f"--{name}", type=least, default=default, metavar="N", help=what)
    limit = partial(parser.add_argument, type=float)
    minutes = DEFAULTS["minutes"]
    what = f"time limit of the whole command (default: {minutes:g})"
    limit("--minutes", default=minutes, metavar="M", help=what)
    what = "time limit of one trial (default: 300)"
    limit("--timeout-seconds", default=300.0, metavar="S", help=what)
    add("--json", metavar="PATH", help="also write all figures to this file")
    add("--page", metavar="PATH", help="also draw them, as an HTML page")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp tune`; returns 0. Raises where nothing was tuned or written."""
    tuner = _run_of(options)
    with ended_together():
        found = tuner.run()
    if options.json is not None:
        write_json_for("--json", options.json, _document(options, found))
    if options.page is not None:
        title = f"{options.target} on {found.place}, {options.batch:,} rows a step"
        page = draw_trials(title, found.lines, found.trials, found.verdict.winner)
        write_text_for("--page", options.page, page)
        print(f"page with charts: {pathlib.Path(options.page).absolute()}")
    return 0


def _run_of(options: argparse.Namespace) -> TuneRun:
    """Checks all options before minutes of trials, not after them."""
    target = parse_model(options.target, options.arguments, options.batch)
    for name in ("minutes", "timeout_seconds"):
        value = getattr(options, name)
        if not (0 < value < math.inf):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} must be a number above 0. Received: "
                f"{value!r}."
            )
    check_output_paths({"--json": options.json, "--page": options.page})
    if options.page is not None:
        require_matplotlib()
    gpus = len(own_gpus(os.environ))
    each = max(1, (gpus or usable_cores()) // options.workers)
    # The likely choice of `engine="auto"`, until the first trial reports it.
    engine = "in_process" if options.workers == 1 else "sockets"
    engine = "tensorflow" if gpus else engine
    replicas = options.replicas or each
    place = TrialLayout(options.workers, replicas, options.batch or 0, engine)
    memory_bytes = None if options.memory is None else bytes_of(options.memory)
    if place.all_replicas == 1 and memory_bytes is None:
        raise ConfigurationError(
            "One replica sends nothing, so there is nothing to tune. Give --replicas "
            "or --workers, or --memory to try remat and accumulation."
        )
    check_model(target)
    if options.batch is None:
        options.batch = _batch_of_script(options, place.all_replicas)
        place = dataclasses.replace(place, rows=options.batch)
    if place.rows < place.all_replicas:
        raise ConfigurationError(
            f"--batch {place.rows} gives {place.all_replicas} replicas less than a row "
            "each."
        )
    knobs = knobs_of(place, options.allow_lossy, memory_bytes is not None)
    arguments = tuple(options.arguments)
    trials = Trials(
        options.target, place, options.steps, options.timeout_seconds, arguments
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
        fits=partial(what_fits, arguments=arguments),
    )


def _batch_of_script(options: argparse.Namespace, replicas: int) -> int:
    with ended_together(), progress_bar("running the script until its first fit", 0):
        try:
            return batch_of_script(options.target, options.arguments, replicas)
        except TrialFailed as error:
            raise ConfigurationError(
                f"{options.target} failed before its first fit: {error}"
            ) from None


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


COLOURS = {"the winner": "#2f7d4f", "the baseline": "#d9a521", "others": "#9dbbdb"}


def draw_trials(
    title: str, lines: Sequence[str], trials: Sequence[Trial], winner: Setting
) -> str:
    """The HTML page: the winner's code, a bar for each trial, and the log."""
    log = html.escape("\n".join(lines))
    code = html.escape("\n".join(winner.lines))
    return html_page(
        title,
        f"<pre><b>{code}</b></pre>",
        _chart(trials, winner),
        "<p>Bars: samples per second, in the final rounds if there were any, else in "
        "the search. Black: from the slowest to the fastest round.</p>",
        f"<h2>Log</h2>\n<pre>{log}</pre>",
    )


def _chart(trials: Sequence[Trial], winner: Setting) -> str:
    bars, ranges = [], {}
    for trial in trials:
        name = changes_in_words(trial.setting)
        if trial.speed is None:
            bars.append((name, "failed", dict[str, float]()))
            continue
        speed = statistics.median(trial.rounds) if trial.rounds else trial.speed
        kind = "the baseline" if trial is trials[0] else "others"
        kind = "the winner" if trial.setting == winner else kind
        bars.append((name, f"{speed:,.1f}", {kind: speed}))
        if len(trial.rounds) > 1:
            ranges[name] = min(trial.rounds), max(trial.rounds)
    unit = "samples per second"
    return draw_bars("Speed of each trial", bars, COLOURS, unit, ranges=ranges)
