"""What to do next, in a sentence or two, from where the time of a run went."""

from __future__ import annotations

from collections.abc import Iterator

from tfdp.tools.runs.facts import Facts
from tfdp.tools.runs.together import BETWEEN, COMPUTING, INPUT, SENDING, VALIDATION

__all__ = ["advice"]

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
