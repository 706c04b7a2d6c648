"""Summarizes a run in a few lines of text, and compares runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfdp.tools.report.text import format_bytes, format_seconds, format_table
from tfdp.tools.runs.facts import RunFacts, Straggler, epochs_of
from tfdp.tools.runs.together import BETWEEN, COMPUTING, INPUT, SENDING, VALIDATION

# Smaller shares are omitted.
LEAST_SHARE = 0.005
MOST_METRICS = 6


def headline(facts: RunFacts) -> str:
    """The model, workers, steps and duration."""
    start = facts.run.sessions[-1].first.start
    model = start.settings.get("model", "a model").partition(":")[0]
    workers = "1 worker" if start.workers == 1 else f"{start.workers} workers"
    replicas = "1 replica" if start.replicas == 1 else f"{start.replicas} replicas"
    again = len(facts.starts) - 1
    restarts = f", started again {again} times" if again > 1 else ""
    restarts = ", started again once" if again == 1 else restarts
    return (
        f"{model} on {workers} ({replicas}): {facts.steps:,} steps in "
        f"{format_seconds(facts.seconds)}{restarts}"
    )


def summary(facts: RunFacts) -> str:
    """Lines for a terminal: speed, where the time went, stragglers, advice."""
    rows = [*figures(facts), ("next", advice(facts))]
    lines = [headline(facts), *(f"  {name:<16} {text}" for name, text in rows)]
    return "\n".join([*lines, *(f"  note: {note}" for note in facts.notes)])


def figures(facts: RunFacts) -> list[tuple[str, str]]:
    """The lines of the summary, as (name, text)."""
    parts = sorted(facts.steady_shares.items(), key=lambda each: -each[1])
    went = ", ".join(f"{p} {share:.0%}" for p, share in parts if share >= LEAST_SHARE)
    traced = [rate.seconds for rate in facts.rates if rate.is_first]
    took = format_seconds(max(traced, default=0))
    first = f"{took}, in which TensorFlow traces; left out above" if traced else ""
    rows = [
        ("throughput", _throughput(facts)),
        ("first step", first),
        ("time", went or "not known"),
        ("slowest worker", _slowest(facts)),
        ("last named slow", "".join(said_while_training(facts)[-1:])),
        ("memory", _memory(facts)),
        ("sent in a step", _sent(facts)),
    ]
    if facts.hidden_share is not None:
        text = f"{facts.hidden_share:.0%} of exchanges behind computing"
        rows.append(("overlap", text))
    if epochs := epochs_of(facts.run):
        logs = list(epochs[-1].logs.items())[:MOST_METRICS]
        text = ", ".join(f"{name} {value:.4g}" for name, value in logs)
        rows.append((f"epoch {epochs[-1].epoch + 1}", text or "nothing was reported"))
    rows += [("interrupted", text) for text in _interruptions(facts)]
    return [(name, text) for name, text in rows if text]


def side_by_side(runs: Sequence[tuple[str, RunFacts]]) -> list[list[str]]:
    """A table with a row for each figure and a column for each run; titles first."""
    found = [dict(figures(facts)) for _, facts in runs]
    names = list(dict.fromkeys(name for each in found for name in each))
    return [
        ["", *(name for name, _ in runs)],
        *([name, *(each.get(name, "-") for each in found)] for name in names),
    ]


def compared(runs: Sequence[tuple[str, RunFacts]]) -> str:
    """A table for a terminal: speed and parts of each run, relative to the first."""
    first = runs[0][1]
    titles = ["run", "steps", "step", "samples/s", "vs the first"]
    rows = []
    for name, facts in runs:
        rate, measure = facts.samples_per_second, first.samples_per_second
        seconds = facts.step_seconds
        known = rate is not None and measure
        rows.append(
            [
                name,
                f"{facts.steps:,}",
                "-" if seconds is None else format_seconds(seconds),
                "-" if rate is None else f"{rate:,.4g}",
                f"{rate / measure:.2f}x" if known else "-",  # type: ignore[operator]
                *(f"{share:.0%}" for share in facts.steady_shares.values()),
            ]
        )
    return format_table([[*titles, *first.steady_shares], *rows], left=[0])


def describe_straggler(straggler: Straggler) -> str:
    """Which worker, how often, at what cost, and why."""
    more = ""
    if straggler.more_share >= LEAST_SHARE:
        more = f", {straggler.more_share:.0%} longer than the others"
    return (
        f"worker {straggler.worker}: the last one in {straggler.share:.0%} of the "
        f"steps; the others waited {straggler.lost_share:.1%} of the time for it "
        f"({format_seconds(straggler.lost_seconds)} each): "
        f"{CAUSES[straggler.cause]}{more}"
    )


def said_while_training(facts: RunFacts) -> list[str]:
    """Lines that `callbacks.Stragglers` printed, from the record of each start."""
    said = [one for session in facts.run.sessions for one in session.first.said]
    return [f"step {one.step}: {one.text}" for one in said]


def _throughput(facts: RunFacts) -> str:
    if facts.step_seconds is None:
        return "not known: no step was made after the first one"
    step = f"a step takes {format_seconds(facts.step_seconds)} on average"
    if facts.step_spread is not None:
        low, middle, high = map(format_seconds, facts.step_spread)
        step += f", half of them up to {middle}, 80% {low} to {high}"
    rate = facts.samples_per_second
    if rate is None:
        per_second = 1 / facts.step_seconds if facts.step_seconds else 0.0
        return f"{per_second:.4g} steps/s; {step}; the samples are not known"
    return f"{rate:,.4g} samples/s; {step}"


def _slowest(facts: RunFacts) -> str:
    stragglers = facts.stragglers
    if stragglers.unknown:
        return stragglers.unknown
    if not stragglers.found:
        return "none: no worker held up the others by more than 5% of a step"
    return describe_straggler(stragglers.found[0])


def _memory(facts: RunFacts) -> str:
    return "; ".join(
        f"{what} {format_bytes(max(found.values()))} at most (worker {rank})"
        for what, field in (("host", "peak_bytes"), ("GPU", "device_peak_bytes"))
        if (found := facts.most(field))
        for rank in [max(found, key=lambda rank: found[rank])]
    )


def _sent(facts: RunFacts) -> str:
    parts = []
    for where in ("within", "between"):
        found = facts.per_step(f"{where}_bytes")
        known = format_bytes(max(found.values())) if found else "not known"
        parts.append(f"{known} {where} hosts")
    return f"{', '.join(parts)} (of the worker that sends most)"


def _interruptions(facts: RunFacts) -> list[str]:
    """A text for every start that did not end normally."""
    found = []
    for number, start in enumerate(facts.starts):
        if start.has_ended:
            continue
        at = f"after {format_seconds(start.to_seconds)}, {start.steps:,} steps"
        if start is facts.starts[-1]:
            found.append(f"{at}: no end was written: it still runs, or was killed")
            continue
        pause = facts.starts[number + 1].from_seconds - start.to_seconds
        text = f"{at}; it went on {format_seconds(max(pause, 0.0))} later"
        if start.lost_steps:
            text += f" and made {start.lost_steps:,} steps again"
        found.append(text)
    return found


# A step as short as this takes a large part of its time to be started.
SHORT_SECONDS, STARTED_SHARE = 0.005, 0.3
# At most this many sentences of advice.
MOST = 2
# The time that a step waits for its batch includes TensorFlow's start of the step.
INPUT_SECONDS = 0.002
LOST_SHARE, SLOWER, GROWN = 0.05, 0.8, 1.3
# A trend needs at least this many lines.
LEAST_LINES = 40

CAUSES = {
    COMPUTING: "it computes for longer (another processor, heat, or other work on it)",
    INPUT: "its input is slower (its disk or network, or the work of its pipeline)",
    BETWEEN: "more happens there between steps (callbacks, writing files)",
    "": "no single part of its steps stands out",
}


# Shares of the time from which on to give the advice.
LEAST_SHARES = {INPUT: 0.1, SENDING: 0.2, BETWEEN: 0.1, VALIDATION: 0.3}
ADVICE = {
    INPUT: "Make the input faster: {} of the time steps wait for their batch (map with "
    "num_parallel_calls, cache, prefetch).",
    SENDING: "Send less or less often: {} of the time goes into exchanges between "
    "hosts (a larger batch, wire_dtype, compression).",
    BETWEEN: "Do less between steps, which takes {} of the time: fewer callbacks, or "
    "steps_per_execution above 1.",
    VALIDATION: "Validate less often (validation_freq): it takes {} of the time.",
}


def advice(facts: RunFacts) -> str:
    """One or two sentences on the largest possible gains."""
    found = sorted(_sentences(facts), key=lambda each: -each[0])
    if found:
        return " ".join(sentence for _, sentence in found[:MOST])
    return (
        f"Nothing stands out: {facts.steady_shares[COMPUTING]:.0%} of the time steps "
        "compute. More can come from faster devices, mixed precision or a larger batch."
    )


def _sentences(facts: RunFacts) -> Iterator[tuple[float, str]]:
    """Yields (the share of the time that it concerns, what to do)."""
    if not facts.steady:
        yield (0.0, "No step was made after the first one.")
        return
    shares = facts.steady_shares
    for straggler in facts.stragglers.found[:1]:
        if straggler.lost_share >= LOST_SHARE:
            yield (
                straggler.lost_share,
                f"Look at worker {straggler.worker}, for which the others wait "
                f"{straggler.lost_share:.0%} of the time: {CAUSES[straggler.cause]}.",
            )
    made = len(facts.part_seconds) * sum(rate.steps for rate in facts.steady)
    waited_seconds = sum(p[INPUT] for p in facts.part_seconds.values()) / made
    step_seconds = facts.step_seconds or 0.0
    executed = facts.run.sessions[-1].first.start.settings.get("steps per execution")
    starts_each = step_seconds < SHORT_SECONDS and executed == "1"
    if starts_each:
        yield (
            STARTED_SHARE + shares[BETWEEN],
            f"Make several steps in one call: a step takes "
            f"{format_seconds(step_seconds)}, a good part of it to be started "
            "(compile(steps_per_execution=32); callbacks are then called after every "
            "32 steps).",
        )
    for part, text in ADVICE.items():
        if part == BETWEEN and starts_each:
            continue
        is_enough = part != INPUT or waited_seconds >= INPUT_SECONDS
        if shares[part] >= LEAST_SHARES[part] and is_enough:
            yield shares[part], text.format(f"{shares[part]:.0%}")
    yield from _trends(facts)


def _trends(facts: RunFacts) -> Iterator[tuple[float, str]]:
    steady = facts.steady
    if len(steady) < LEAST_LINES:
        return
    quarter = len(steady) // 4
    first, last = steady[:quarter], steady[-quarter:]
    speeds = [
        sum(rate.steps for rate in part) / sum(rate.seconds for rate in part)
        for part in (first, last)
    ]
    if speeds[1] < SLOWER * speeds[0]:
        loss = 1 - speeds[1] / speeds[0]
        yield (
            loss,
            "Find out what slowed it down: the last quarter made "
            f"{loss:.0%} fewer steps per second than the first.",
        )
    for session in facts.run.sessions:
        for rank, worker in session.workers.items():
            sizes = [s.resident_bytes for s in worker.steps if s.resident_bytes]
            if len(sizes) < LEAST_LINES:
                continue
            half, end = sizes[len(sizes) // 2], sizes[-1]
            if end > GROWN * half:
                yield (
                    0.0,
                    f"Memory of worker {rank} grew from {half / 1e9:.2f} to "
                    f"{end / 1e9:.2f} GB in the second half of its steps: look for "
                    "what keeps growing.",
                )
                return
