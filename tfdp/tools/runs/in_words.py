"""A run in a few lines of text, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfdp.tools.report.text import bytes_in_words, format_table, seconds_in_words
from tfdp.tools.runs.facts import Facts, Straggler, epochs_of
from tfdp.tools.runs.together import BETWEEN, COMPUTING, INPUT, SENDING, VALIDATION

# Less is not worth a word.
LEAST_SHARE = 0.005
MOST_METRICS = 6


def headline(facts: Facts) -> str:
    """What ran, and for how long."""
    start = facts.run.sessions[-1].first.start
    model = start.settings.get("model", "a model").partition(":")[0]
    workers = "1 worker" if start.workers == 1 else f"{start.workers} workers"
    replicas = "1 replica" if start.replicas == 1 else f"{start.replicas} replicas"
    again = len(facts.starts) - 1
    restarts = f", started again {again} times" if again > 1 else ""
    restarts = ", started again once" if again == 1 else restarts
    return (
        f"{model} on {workers} ({replicas}): {facts.steps:,} steps in "
        f"{seconds_in_words(facts.seconds)}{restarts}"
    )


def summary(facts: Facts) -> str:
    """Lines for a terminal: how fast, where the time went, who was slow, what to do."""
    rows = [*figures(facts), ("next", advice(facts))]
    lines = [headline(facts), *(f"  {name:<16} {text}" for name, text in rows)]
    return "\n".join([*lines, *(f"  note: {note}" for note in facts.notes)])


def figures(facts: Facts) -> list[tuple[str, str]]:
    """What the summary has, by name."""
    parts = sorted(facts.steady_shares.items(), key=lambda each: -each[1])
    went = ", ".join(f"{p} {share:.0%}" for p, share in parts if share >= LEAST_SHARE)
    rows = [
        ("throughput", _throughput(facts)),
        ("first step", _first_step(facts)),
        ("time", went or "not known"),
        ("slowest worker", _slowest(facts)),
        ("memory", _memory(facts)),
        ("sent in a step", _sent(facts)),
    ]
    if facts.hidden_share is not None:
        rows.append(
            ("overlap", f"{facts.hidden_share:.0%} of exchanges behind computing")
        )
    if epochs := epochs_of(facts.run):
        logs = list(epochs[-1].logs.items())[:MOST_METRICS]
        said = ", ".join(f"{name} {value:.4g}" for name, value in logs)
        rows.append((f"epoch {epochs[-1].epoch + 1}", said or "nothing was reported"))
    rows += [("interrupted", text) for text in _interruptions(facts)]
    return [(name, text) for name, text in rows if text]


def side_by_side(runs: Sequence[tuple[str, Facts]]) -> list[list[str]]:
    """A table: a row for each figure, a column for each run; titles first."""
    found = [dict(figures(facts)) for _, facts in runs]
    names = list(dict.fromkeys(name for each in found for name in each))
    return [
        ["", *(name for name, _ in runs)],
        *([name, *(each.get(name, "-") for each in found)] for name in names),
    ]


def compared(runs: Sequence[tuple[str, Facts]]) -> str:
    """Runs in a table for a terminal: speed and parts, the first run as the measure."""
    first = runs[0][1]
    titles = ["run", "steps", "step", "samples/s", "beside the first"]
    rows = []
    for name, facts in runs:
        rate, measure = facts.samples_per_second, first.samples_per_second
        known = rate is not None and measure
        rows.append(
            [
                name,
                f"{facts.steps:,}",
                _step(facts.step_seconds),
                "-" if rate is None else f"{rate:,.4g}",
                f"{rate / measure:.2f}x" if known else "-",  # type: ignore[operator]
                *(f"{share:.0%}" for share in facts.steady_shares.values()),
            ]
        )
    return format_table([[*titles, *first.steady_shares], *rows], left=[0])


def straggler_in_words(straggler: Straggler) -> str:
    """Which, how often, at what cost, and why."""
    more = (
        f", {straggler.more_share:.0%} longer than the others"
        if (straggler.more_share >= LEAST_SHARE)
        else ""
    )
    return (
        f"worker {straggler.worker}: the last one in {straggler.share:.0%} of the "
        f"steps; the others waited {straggler.lost_share:.1%} of the time for it "
        f"({seconds_in_words(straggler.lost_seconds)} each): "
        f"{CAUSES[straggler.cause]}{more}"
    )


def _step(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_in_words(seconds)


def _throughput(facts: Facts) -> str:
    if facts.step_seconds is None:
        return "not known: no step was made after the first one"
    step = f"a step takes {seconds_in_words(facts.step_seconds)} on average"
    if facts.step_spread is not None:
        low, middle, high = map(seconds_in_words, facts.step_spread)
        step += f", half of them up to {middle}, 80% {low} to {high}"
    rate = facts.samples_per_second
    if rate is None:
        per_second = 1 / facts.step_seconds if facts.step_seconds else 0.0
        return f"{per_second:.4g} steps/s; {step}; the samples are not known"
    return f"{rate:,.4g} samples/s; {step}"


def _first_step(facts: Facts) -> str:
    first = [rate.seconds for rate in facts.rates if rate.is_first]
    if not first:
        return ""
    return f"{seconds_in_words(max(first))}, in which TensorFlow traces; left out above"


def _slowest(facts: Facts) -> str:
    stragglers = facts.stragglers
    if stragglers.unknown:
        return stragglers.unknown
    if not stragglers.found:
        return "none: no worker held up the others by more than 5% of a step"
    return straggler_in_words(stragglers.found[0])


def _memory(facts: Facts) -> str:
    return "; ".join(
        f"{what} {bytes_in_words(max(found.values()))} at most (worker {rank})"
        for what, field in (("host", "peak_bytes"), ("GPU", "device_peak_bytes"))
        if (found := facts.most(field))
        for rank in [max(found, key=lambda rank: found[rank])]
    )


def _sent(facts: Facts) -> str:
    parts = []
    for field, where in (("within", "within"), ("between", "between")):
        found = facts.per_step(f"{field}_bytes")
        known = f"{bytes_in_words(max(found.values()))}" if found else "not known"
        parts.append(f"{known} {where} hosts")
    return f"{', '.join(parts)} (of the worker that sends most)"


def _interruptions(facts: Facts) -> list[str]:
    """Of every start but the last, and of that if it has not ended."""
    found = []
    for number, start in enumerate(facts.starts):
        after = facts.starts[number + 1 : number + 2]
        if start.has_ended:
            continue
        at = f"after {seconds_in_words(start.to_seconds)}, {start.steps:,} steps"
        if not after:
            found.append(
                f"{at}: no end was written: the training goes on, or was killed"
            )
            continue
        pause = after[0].from_seconds - start.to_seconds
        text = f"{at}; it went on {seconds_in_words(max(pause, 0.0))} later"
        if start.lost_steps:
            text += f" and made {start.lost_steps:,} steps again"
        found.append(text)
    return found


# What to do next, in a sentence or two, from where the time of a run went.


MOST = 2
# Shares of the time from which a part is worth a word.
INPUT_SHARE, SENDING_SHARE, BETWEEN_SHARE = 0.1, 0.2, 0.1
# What TensorFlow takes to start a step is in the time that it waits for its batch.
INPUT_SECONDS = 0.002
VALIDATION_SHARE, LOST_SHARE, SLOWER, GROWN = 0.3, 0.05, 0.8, 1.3
# Fewer lines say nothing of a trend.
LEAST_LINES = 40

CAUSES = {
    COMPUTING: "it computes for longer (another processor, heat, or other work on it)",
    INPUT: "its input is slower (its disk or network, or the work of its pipeline)",
    BETWEEN: "more happens there between steps (callbacks, writing files)",
    "": "no single part of its steps stands out",
}


def advice(facts: Facts) -> str:
    """The most that can be won first; one or two sentences."""
    found = sorted(_sentences(facts), key=lambda each: -each[0])
    if not found:
        found = [_computing(facts)]
    return " ".join(sentence for _, sentence in found[:MOST])


def _sentences(facts: Facts) -> Iterator[tuple[float, str]]:
    """(the share of the time that it is about, what to do)."""
    if not facts.steady:
        yield (0.0, "No step was made after the first one: there is nothing to tell.")
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
    if shares[INPUT] >= INPUT_SHARE and waited_seconds >= INPUT_SECONDS:
        yield (
            shares[INPUT],
            f"Make the input faster: {shares[INPUT]:.0%} of the time steps wait for "
            "their batch (map with num_parallel_calls, cache, prefetch).",
        )
    if shares[SENDING] >= SENDING_SHARE:
        yield (
            shares[SENDING],
            f"Send less or less often: {shares[SENDING]:.0%} of the time goes into "
            "exchanges between hosts (a larger batch, wire_dtype, compression).",
        )
    if shares[BETWEEN] >= BETWEEN_SHARE:
        yield (
            shares[BETWEEN],
            f"Do less between steps, which takes {shares[BETWEEN]:.0%} of the time: "
            "fewer callbacks, or steps_per_execution above 1.",
        )
    if shares[VALIDATION] >= VALIDATION_SHARE:
        yield (
            shares[VALIDATION],
            f"Validate less often (validation_freq): it takes "
            f"{shares[VALIDATION]:.0%} of the time.",
        )
    yield from _trends(facts)


def _computing(facts: Facts) -> tuple[float, str]:
    """Where there is nothing else to win."""
    share = facts.steady_shares[COMPUTING]
    return (
        share,
        f"Nothing stands out: {share:.0%} of the time steps compute. More can come "
        "from faster devices, mixed precision or a larger batch.",
    )


def _trends(facts: Facts) -> Iterator[tuple[float, str]]:
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
        yield (
            1 - speeds[1] / speeds[0],
            f"Find out what slowed it down: the last quarter made "
            f"{1 - speeds[1] / speeds[0]:.0%} fewer steps per second than the first.",
        )
    for session in facts.run.sessions:
        for rank, worker in session.workers.items():
            sizes = [
                each.resident_bytes for each in worker.steps if each.resident_bytes
            ]
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
