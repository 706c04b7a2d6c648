"""The largest batch that fits; what makes a batch fit that does not, at what cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfdp.errors import ConfigurationError
from tfdp.plan.shards import SHARD_STAGES
from tfdp.planning.plan import MARGIN, MemoryPlan, Planner

__all__ = ["Way", "largest_batch", "ways_to_fit"]

# The batch is as large as was found, or at most this part larger.
PRECISION = 0.03
MOST_TRACES = 6
# A batch is made, of zeros, to trace a step.
MOST_BATCH_BYTES = 2**30
MICRO_STEPS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Way:
    """A setting, what it needs, and what it costs.

    Args:
      name: what to write in the program.
      peak_bytes: per replica.
      fits: whether that is within the memory, margin included.
      more_flops: as a part of those of a step as it was asked about.
      sent_bytes: by a replica in a step.
    """

    name: str
    peak_bytes: int
    fits: bool
    more_flops: float
    sent_bytes: int


def largest_batch(
    planner: Planner,
    memory_bytes: int,
    *,
    shard: str | None = None,
    remat: bool = False,
) -> MemoryPlan | None:
    """The plan of the largest local batch that fits; None: not even one row does.

    What a step needs is nearly a line over the rows. Two traced batches give it; the
    batch where it crosses the memory is traced as well, and the line goes through what
    was found until the largest that fits is within 3% of the least that does not.

    Args:
      planner: of the model.
      memory_bytes: what a replica may take.
      shard: in the place of the planner's own.
      remat: whether layers compute their forward pass twice.

    Returns:
      A plan that was traced, not one that was computed from others.
    """
    limit = memory_bytes / (1 + MARGIN)
    row_bytes = max(planner.row_bytes, 1)
    most_rows = max(1, MOST_BATCH_BYTES // row_bytes)
    found: dict[int, MemoryPlan] = {}

    def traced(rows: int) -> MemoryPlan:
        if rows not in found:
            found[rows] = planner.at(
                rows, shard=shard, remat=remat, memory_bytes=memory_bytes
            )
        return found[rows]

    first = min(planner.local_rows, most_rows)
    traced(first)
    traced(min(2 * first, most_rows) if found[first].fits else max(1, first // 2))
    for _ in range(MOST_TRACES):
        fitting = [rows for rows, plan in found.items() if plan.fits]
        above = [rows for rows, plan in found.items() if not plan.fits]
        low, high = max(fitting, default=0), min(above, default=most_rows + 1)
        if high - low <= max(1, PRECISION * low):
            break
        guess = _crossing(found, limit)
        traced(min(max(guess, low + 1), high - 1))
    fitting = [rows for rows, plan in found.items() if plan.fits]
    return found[max(fitting)] if fitting else None


def _crossing(found: dict[int, MemoryPlan], limit: float) -> int:
    """Where the line through the two batches nearest to the limit reaches it."""
    near = sorted(found, key=lambda rows: abs(found[rows].peak_bytes - limit))[:2]
    few, many = sorted(near)
    rise = found[many].peak_bytes - found[few].peak_bytes
    slope = max(rise / (many - few), 1.0)
    return int(few + (limit - found[few].peak_bytes) / slope)


def ways_to_fit(planner: Planner, memory_bytes: int) -> Iterator[Way]:
    """Each setting that needs less memory, the cheapest in traffic and FLOPs first.

    Args:
      planner: of the model, with the batch that does not fit.
      memory_bytes: what a replica may take.

    Yields:
      Settings, whether they fit or not. Accumulation is computed from the plan of a
      micro-batch and one more set of gradients; the others are traced.
    """
    rows, own = planner.local_rows, str(planner.sharding.what)
    base = planner.at(rows)
    stages = SHARD_STAGES[planner.sharding.stage :] if planner.replicas > 1 else (own,)
    for shard in stages:
        for remat in (False, True):
            if (shard, remat) == (own, False):
                continue
            try:
                found = planner.at(rows, shard=shard, remat=remat)
            except ConfigurationError:
                continue  # an optimizer that cannot be sharded, a layer not recomputed
            yield _way(_words(shard, remat, own), found, base, memory_bytes)
    for steps in MICRO_STEPS:
        if rows // steps >= 1 and steps <= rows:
            micro = planner.at(-(-rows // steps))
            yield _accumulating(micro, base, steps, planner, memory_bytes)


def _words(shard: str, remat: bool, own: str) -> str:
    words = [] if shard == own else [f'shard="{shard}"']
    return " and ".join([*words, *(["tfdp.remat(model)"] if remat else [])])


def _way(name: str, found: MemoryPlan, base: MemoryPlan, memory_bytes: int) -> Way:
    return Way(
        name,
        found.peak_bytes,
        found.fits_in(memory_bytes),
        found.flops / base.flops - 1 if base.flops else 0.0,
        found.sent_bytes,
    )


def _accumulating(
    micro: MemoryPlan,
    base: MemoryPlan,
    steps: int,
    planner: Planner,
    memory_bytes: int,
) -> Way:
    stage = planner.sharding.stage
    kept = micro.trainable_bytes // (planner.replicas if stage >= 2 else 1)
    peak_bytes = micro.peak_bytes + kept
    one_way = base.sent_bytes // 2
    sent = {2: (steps + 1) * one_way, 3: 2 * steps * one_way}
    return Way(
        f"gradient_accumulation_steps={steps}, {micro.local_rows} rows at a time",
        peak_bytes,
        peak_bytes * (1 + MARGIN) <= memory_bytes,
        0.0,
        sent.get(stage, base.sent_bytes),
    )
