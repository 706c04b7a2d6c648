"""The largest batch that fits; what makes a batch fit that does not, at what cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.plan.shards import SHARD_STAGES
from tfdp.tools.planning.memory_plan import (
    MemoryPlan,
    most_peak_bytes,
    needed_for,
    sent_bytes,
)
from tfdp.tools.planning.planner import Planner

# The batch is as large as was found, or at most this part larger.
PRECISION = 0.05
# What is computed is taken for as many times fewer or more rows than were traced.
NEAR = 4
# A batch is made, of zeros, to trace a step; no larger one is looked at, but for one
# that was asked about.
MOST_BATCH_BYTES = 2**30
MICRO_STEPS = (2, 4, 8)


def largest_batch(
    planner: Planner,
    memory_bytes: int,
    *,
    shard: str | None = None,
    remat: bool | str = False,
) -> MemoryPlan | None:
    """The plan of the largest local batch that fits; None: not even one row does.

    Where TensorFlow builds another graph for each number of rows, None says that those
    that were asked about do not fit.

    The step is traced for two batches; as its tensors grow with the rows in a line, its
    peak for any other batch can be computed (`StepOfRows`), and the largest that fits
    is looked for along the line from the fitting to the others. Where it is far from
    what was traced it is traced as well, and a smaller one where that does not fit.

    Args:
      planner: of the model.
      memory_bytes: what a replica may take.
      shard: in the place of the planner's own.
      remat: whether layers compute their forward pass twice.

    Returns:
      The plan. A batch that is larger by one part in 20, or by one row, may fit as
      well; with `larger_may_fit` one of any size: no more rows were looked at.
    """
    setting: dict[str, Any] = {"shard": shard, "remat": remat}
    most_rows = max(planner.local_rows, MOST_BATCH_BYTES // max(planner.row_bytes, 1))
    few, many = _two_traced(planner, most_rows, memory_bytes, setting)
    if many is None:
        found = planner.at(few, memory_bytes=memory_bytes, **setting)
        return dataclasses.replace(found, larger_may_fit=True) if found.fits else None
    plans = {
        rows: planner.at(rows, memory_bytes=memory_bytes, **setting)
        for rows in (few, many)
    }

    def computed(rows: int, quickly: bool = True) -> MemoryPlan:
        if rows in plans:
            return plans[rows]
        return planner.computed(
            few, many, rows, memory_bytes=memory_bytes, quickly=quickly, **setting
        )

    # Looked for in one order of ops; what is answered was looked at in all of them.
    if computed(most_rows).peak_bytes <= most_peak_bytes(memory_bytes):
        low = most_rows
    else:
        low = _most_that_fits(computed, (few, many), most_rows, memory_bytes)
    while low:
        if few // NEAR <= low <= many * NEAR:
            found = computed(low, quickly=False)
        else:
            found = planner.at(low, memory_bytes=memory_bytes, **setting)
        if found.fits:
            return dataclasses.replace(found, larger_may_fit=low == most_rows)
        low -= max(1, round(PRECISION * low))
    return None


def _two_traced(
    planner: Planner, most_rows: int, memory_bytes: int, setting: dict[str, Any]
) -> tuple[int, int | None]:
    """Two numbers of rows of one graph; None: TensorFlow builds another for each.

    The one that was asked about, and one that is near the answer: as many more as the
    memory has for what is not stored.
    """
    asked = max(1, min(planner.local_rows, most_rows))
    plan = planner.at(asked, **setting)
    stored = sum(plan.parts.get(part, 0) for part in ("weights", "slots", "state"))
    room = most_peak_bytes(memory_bytes) - stored
    near = asked * max(room, 0) // max(plan.peak_bytes - stored, 1)
    near = min(max(near, 1), most_rows)
    # What has one row is broadcast, in a graph of its own.
    for few, many in (sorted((asked, near)), (2, max(near, 4))):
        few, many = (few, many) if few < many else (max(1, many // 2), 2 * many)
        planner.at(few, **setting)
        planner.at(many, **setting)
        if planner.are_of_one_graph(few, many, **setting):
            return few, many
    return asked, None


def _most_that_fits(
    computed: Callable[[int], MemoryPlan],
    traced: tuple[int, int],
    most_rows: int,
    memory_bytes: int,
) -> int:
    """The most rows whose computed plan fits, to `PRECISION`; 0: none do."""
    limit = most_peak_bytes(memory_bytes)
    low, high = 0, most_rows + 1
    few, many = traced
    few_bytes, many_bytes = (computed(rows).peak_bytes for rows in traced)
    # Where the line through both meets the limit; then a little beyond what fits.
    slope = (many_bytes - few_bytes) / (many - few)
    guess = (few + (limit - few_bytes) / slope) if slope > 0 else float(most_rows)
    while high - low > max(1, PRECISION * low):
        rows = min(max(math.floor(guess), low + 1), high - 1)
        peak_bytes = computed(rows).peak_bytes
        if peak_bytes <= limit:
            low, guess = rows, rows + max(1.0, PRECISION * rows)
        else:
            high = rows
            guess = rows * (limit / peak_bytes) ** 2 if not low else (low + rows) / 2
    return low


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
        for remat in (False, True, "segments"):
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
            yield _accumulating(micro, steps, planner, memory_bytes)


def _words(shard: str, remat: bool | str, own: str) -> str:
    words = [] if shard == own else [f'shard="{shard}"']
    policy = f', "{remat}"' if isinstance(remat, str) else ""
    return " and ".join([*words, *([f"tfdp.remat(model{policy})"] if remat else [])])


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
    steps: int,
    planner: Planner,
    memory_bytes: int,
) -> Way:
    stage = planner.sharding.stage
    kept = micro.trainable_bytes // (planner.replicas if stage >= 2 else 1)
    peak_bytes = micro.peak_bytes + kept
    # What is accumulated is whole, of tables as well.
    whole = sent_bytes(micro.trainable_bytes, planner.replicas, stage, remat=False)
    one_way = whole // 2
    sent = {2: (steps + 1) * one_way, 3: 2 * steps * one_way}
    return Way(
        f"gradient_accumulation_steps={steps}, {micro.local_rows} rows at a time",
        peak_bytes,
        micro.is_known and needed_for(peak_bytes) <= memory_bytes,
        0.0,
        sent.get(stage, whole),
    )


# `Way`: what makes a batch fit that does not, and what it costs.


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
