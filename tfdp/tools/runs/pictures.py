"""The pictures of a run, each as HTML for its page."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from tfdp.tools.report.plots import Chart, Point, draw_bars, draw_chart, thinned
from tfdp.tools.report.text import format_seconds
from tfdp.tools.runs.facts import Rate, RunFacts, epochs_of, merged
from tfdp.tools.runs.together import COMPUTING, FIRST, PARTS, WAITING
from tfdp.tools.runs.traces import ReplicaTrace

COLOURS_OF_PARTS = "#9dbbdb #7a4fa0 #c2571a #d9a521 #777777 #2f7d4f #cccccc".split()
PART_COLOURS = dict(zip(PARTS, COLOURS_OF_PARTS, strict=True))
STEADY_COLOURS = {part: PART_COLOURS[part] for part in PARTS if part != FIRST}
TRACE_COLOURS = {
    "computing": "#9dbbdb",
    "exchange behind computing": "#7a4fa0",
    "exchange alone": "#c2571a",
    "update of weights": "#d9a521",
    "nothing": "#dddddd",
}
MOST_BARS, MOST_PANELS = 64, 24
# Points of a rate; finer ones show noise.
MOST_RATES = 100
MOST_LINES = 4
# (from this many seconds on, seconds of the unit, its name)
UNITS = ((172800, 86400.0, "days"), (7200, 3600.0, "hours"), (120, 60.0, "min"))


def rate_pictures(facts: RunFacts) -> list[str]:
    """Samples per second, and the duration of a step, over the run's time."""
    unit, name = _time_unit(facts.seconds)
    restarts = [start.from_seconds / unit for start in facts.starts[1:]]
    rates, steps = list[Point](), list[Point]()
    known = facts.samples_per_second is not None
    rate_name = "samples per second" if known else "steps per second"
    for stretch in _stretches(facts):
        if rates:
            rates.append((rates[-1][0], math.nan))
            steps.append((steps[-1][0], math.nan))
        for rate in stretch:
            ends = (rate.at_seconds - rate.seconds, rate.at_seconds)
            speed, step_ms = _speed(facts, rate), 1e3 * rate.seconds / rate.steps
            rates += [(end_seconds / unit, speed) for end_seconds in ends]
            steps += [(end_seconds / unit, step_ms) for end_seconds in ends]
    return [
        draw_chart(Chart(title, {"": points}, name, restarts, from_zero=True))
        for title, points in ((rate_name, rates), ("ms per step", steps))
        if points
    ]


def part_picture(facts: RunFacts) -> str:
    """Draws where the time of each worker went, without steps in which it traced."""
    bars = []
    for rank, parts in facts.part_seconds.items():
        mine = {part: parts[part] for part in STEADY_COLOURS}
        total = sum(mine.values())
        share = mine[COMPUTING] / total if total else 0.0
        end = f"{format_seconds(total)}, {share:.0%} computing"
        bars.append((f"worker {rank}", end, mine))
    return _bars("Time of each worker", bars, STEADY_COLOURS, "s")


def wait_picture(facts: RunFacts) -> str:
    """How long each worker waited for others; the others wait for the lowest."""
    found = facts.stragglers.waited_seconds
    bars = [
        (f"worker {rank}", f"waited {format_seconds(seconds)}", {WAITING: seconds})
        for rank, seconds in found.items()
    ]
    return _bars("Waiting of each worker", bars, {WAITING: PART_COLOURS[WAITING]}, "s")


def trace_picture(replicas: Sequence[ReplicaTrace]) -> str:
    """The parts of each replica's time in the steps of a trace."""
    bars = []
    for replica in replicas:
        hidden = replica.hidden_share
        end = "no exchange" if hidden is None else f"{hidden:.0%} of exchanges hidden"
        parts = {part: 1e3 * s for part, s in replica.part_seconds.items()}
        bars.append((f"replica {replica.rank}", end, parts))
    return _bars("Time of each replica in the trace", bars, TRACE_COLOURS, "ms")


def size_pictures(facts: RunFacts) -> list[str]:
    """Memory of the host and of GPUs, and bytes sent per step, over time."""
    titles = {
        "resident_bytes": "memory of the process in GB",
        "device_bytes": "memory of the fullest GPU in GB",
        "within_bytes": "MB per step within hosts",
        "between_bytes": "MB per step between hosts",
    }
    return [
        _over_time(facts, field, title)
        for field, title in titles.items()
        if any(facts.per_step(field).values())
    ]


def learning_pictures(facts: RunFacts) -> list[str]:
    """The loss step by step, and Keras' metrics of epochs."""
    pictures = []
    points: list[Point] = []
    done = 0
    for session in facts.run.sessions:
        if points:
            points.append((points[-1][0], math.nan))
        done = session.first.first_step or done
        steps = session.first.steps
        losses = [(float(done + s.step), s.loss) for s in steps if s.loss is not None]
        points += thinned(losses)
        done += steps[-1].step if steps else 0
    if points:
        title = "loss (of the epoch so far)"
        pictures.append(draw_chart(Chart(title, {"": points}, "steps")))
    metrics: dict[str, dict[str, list[Point]]] = {}
    for epoch in epochs_of(facts.run):
        for name, value in epoch.logs.items():
            if not name.startswith("bytes_"):
                kind = "validation" if name.startswith("val_") else "training"
                lines = metrics.setdefault(name.removeprefix("val_"), {})
                lines.setdefault(kind, []).append((epoch.epoch + 1, value))
    return pictures + _metric_pictures(metrics)


def _metric_pictures(metrics: Mapping[str, Mapping[str, list[Point]]]) -> list[str]:
    """The first metrics over the epochs."""
    return [
        draw_chart(Chart(metric.replace("_", " "), lines, "epoch"))
        for metric, lines in itertools.islice(metrics.items(), MOST_PANELS)
    ]


def compared_bars(runs: Sequence[tuple[str, RunFacts]]) -> str:
    """Draws where the time of a step went, on the mean worker of each run."""
    bars = []
    for name, facts in runs:
        count = max(1, facts.steps) * max(1, len(facts.part_seconds))
        workers = facts.part_seconds.values()
        parts = {p: 1e3 * sum(w[p] for w in workers) / count for p in STEADY_COLOURS}
        bars.append((name, f"{sum(parts.values()):.4g} ms per step", parts))
    return _bars("Time of a step in each run", bars, STEADY_COLOURS, "ms")


def compared_pictures(runs: Sequence[tuple[str, RunFacts]]) -> list[str]:
    """Throughput and metrics of the first runs, one colour each."""
    runs = runs[:MOST_LINES]
    rates, metrics = {}, dict[str, dict[str, list[Point]]]()
    for name, facts in runs:
        rates_of_run = [rate for stretch in _stretches(facts) for rate in stretch]
        steps = itertools.accumulate(rate.steps for rate in rates_of_run)
        speeds = [_speed(facts, rate) for rate in rates_of_run]
        rates[name] = list(zip(map(float, steps), speeds, strict=True))
        for epoch in epochs_of(facts.run):
            for metric, value in epoch.logs.items():
                if not metric.startswith("bytes_"):
                    line = metrics.setdefault(metric, {}).setdefault(name, [])
                    line.append((epoch.epoch + 1, value))
    speed = Chart("samples or steps per second", rates, "steps", from_zero=True)
    drawn = [draw_chart(speed)] if any(rates.values()) else []
    return drawn + _metric_pictures(metrics)


def _bars(
    title: str,
    bars: Sequence[tuple[str, str, Mapping[str, float]]],
    colours: Mapping[str, str],
    unit: str,
) -> str:
    """Draws the first `MOST_BARS` bars."""
    drawn = draw_bars(title, bars[:MOST_BARS], colours, unit)
    more = len(bars) - MOST_BARS
    return drawn + (f"<p>{more} more are not drawn.</p>" if more > 0 else "")


def _speed(facts: RunFacts, rate: Rate) -> float:
    if facts.samples_per_second is not None:
        return rate.samples_per_second or 0.0
    return rate.steps / rate.seconds


def _stretches(facts: RunFacts) -> list[list[Rate]]:
    """The steady rates of each start that has any, merged to a visible width."""
    width = math.ceil(len(facts.steady) / MOST_RATES)
    found = []
    for start in facts.starts:
        mine = [
            rate
            for rate in facts.steady
            if start.from_seconds < rate.at_seconds <= start.to_seconds
        ]
        if mine:
            places = range(0, len(mine), width)
            found.append([merged(mine[place : place + width]) for place in places])
    return found


def _time_unit(seconds: float) -> tuple[float, str]:
    found = [(unit, name) for least, unit, name in UNITS if seconds >= least]
    return found[0] if found else (1.0, "seconds")


def _over_time(facts: RunFacts, field: str, title: str) -> str:
    """A line per worker; for more than four the least, the median and the most."""
    unit, name = _time_unit(facts.seconds)
    lines: dict[str, list[Point]] = {}
    for session, start in zip(facts.run.sessions, facts.starts, strict=True):
        for rank, worker in session.workers.items():
            mine = []
            for line in worker.steps:
                found = getattr(line, field)
                if found is not None:
                    is_memory = title.endswith("GB")
                    value = found / 1e9 if is_memory else found / line.steps / 1e6
                    at_seconds = start.from_seconds + line.at_seconds
                    mine.append((at_seconds / unit, value))
            if mine:
                points = lines.setdefault(f"worker {rank}", [])
                # A gap between two starts.
                points += [(points[-1][0], math.nan)] if points else []
                points += thinned(mine)
    if len(lines) > MOST_LINES:
        lines = _spread(list(lines.values()))
    return draw_chart(Chart(title, lines, name, from_zero=True))


def _spread(lines: Sequence[Sequence[Point]]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {"least": [], "median": [], "most": []}
    for here in zip(*lines, strict=False):
        values = sorted(y for _, y in here)
        picked = (values[0], statistics.median(values), values[-1])
        for points, y in zip(found.values(), picked, strict=True):
            points.append((here[0][0], y))
    return found
