"""The largest batch that fits, and settings that make a batch fit, with their cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from tfdp.errors import ConfigurationError
from tfdp.plan.options import SHARD_STAGES
from tfdp.tools.planning.memory_plan import (
    MemoryPlan,
    most_peak_bytes,
    needed_for,
    sent_bytes,
)
from tfdp.tools.planning.planner import Planner

# The result is at most this share below the largest batch.
PRECISION = 0.05
# Interpolation is trusted up to this many times fewer or more rows than were traced.
NEAR = 4
# Tracing allocates a batch of zeros; no larger one is tried unless requested.
MOST_BATCH_BYTES = 2**30
MICRO_STEPS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Way:
    """A setting that needs less memory, and its cost.

    `name` is the code to write; `more_flops` a share of the requested step's FLOPs;
    `peak_bytes` and `sent_bytes` of a replica.
    """

    name: str
    peak_bytes: int
    fits: bool
    more_flops: float
    sent_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The peak plus the margin: memory in which it fits."""
        return needed_for(self.peak_bytes)


def largest_batch(
    planner: Planner, memory_bytes: int, remat: bool | str = False
) -> MemoryPlan | None:
    """The plan of the largest local batch that fits; None: not even one row fits.

    The step is traced for two batches; its tensors grow linearly with the rows, so the
    peak for any other batch is interpolated (`InterpolatedStep`) and searched.
    A result far from the traced counts is traced as well. If TensorFlow builds another
    graph for every row count, only the traced counts are tried.

    A batch larger by one part in 20, or by one row, may fit too; with `larger_may_fit`
    one of any size.
    """
    most_rows = max(planner.local_rows, MOST_BATCH_BYTES // max(planner.row_bytes, 1))
    few, many = _two_traced(planner, most_rows, memory_bytes, remat)
    if many is None:
        found = planner.at(few, memory_bytes=memory_bytes, remat=remat)
        return dataclasses.replace(found, larger_may_fit=True) if found.fits else None
    plans = {
        rows: planner.at(rows, memory_bytes=memory_bytes, remat=remat)
        for rows in (few, many)
    }

    def interpolated(rows: int, one_order: bool = True) -> MemoryPlan:
        if rows in plans:
            return plans[rows]
        return planner.interpolated(
            few, many, rows, remat, memory_bytes=memory_bytes, one_order=one_order
        )

    # Search in one order of ops; check the result in all of them.
    if interpolated(most_rows).peak_bytes <= most_peak_bytes(memory_bytes):
        low = most_rows
    else:
        low = _most_that_fits(interpolated, (few, many), most_rows, memory_bytes)
    while low:
        if few // NEAR <= low <= many * NEAR:
            found = interpolated(low, one_order=False)
        else:
            found = planner.at(low, memory_bytes=memory_bytes, remat=remat)
        if found.fits:
            return dataclasses.replace(found, larger_may_fit=low == most_rows)
        low -= max(1, round(PRECISION * low))
    return None


def _two_traced(
    planner: Planner, most_rows: int, memory_bytes: int, remat: bool | str
) -> tuple[int, int | None]:
    """Two row counts that share a graph: the requested one, and one near the answer.

    None: TensorFlow builds another graph for each count.
    """
    requested = max(1, min(planner.local_rows, most_rows))
    plan = planner.at(requested, remat=remat)
    stored = sum(plan.parts.get(part, 0) for part in ("weights", "slots", "state"))
    room = most_peak_bytes(memory_bytes) - stored
    near = requested * max(room, 0) // max(plan.peak_bytes - stored, 1)
    near = min(max(near, 1), most_rows)
    # A single row is broadcast, in a different graph.
    for few, many in (sorted((requested, near)), (2, max(near, 4))):
        few, many = (few, many) if few < many else (max(1, many // 2), 2 * many)
        planner.at(few, remat=remat)
        planner.at(many, remat=remat)
        if planner.share_one_graph(few, many, remat):
            return few, many
    return requested, None


def _most_that_fits(
    interpolated: Callable[[int], MemoryPlan],
    traced: tuple[int, int],
    most_rows: int,
    memory_bytes: int,
) -> int:
    """The most rows whose interpolated plan fits, to `PRECISION`; 0: none."""
    limit = most_peak_bytes(memory_bytes)
    low, high = 0, most_rows + 1
    few, many = traced
    few_bytes, many_bytes = (interpolated(rows).peak_bytes for rows in traced)
    # First where the line through both reaches the limit; then slightly beyond.
    slope = (many_bytes - few_bytes) / (many - few)
    guess = (few + (limit - few_bytes) / slope) if slope > 0 else float(most_rows)
    while high - low > max(1, PRECISION * low):
        rows = min(max(math.floor(guess), low + 1), high - 1)
        peak_bytes = interpolated(rows).peak_bytes
        if peak_bytes <= limit:
            low, guess = rows, rows + max(1.0, PRECISION * rows)
        else:
            high = rows
            guess = rows * (limit / peak_bytes) ** 2 if not low else (low + rows) / 2
    return low


def settings_to_try(
    planner: Planner, remat: bool | str = False
) -> list[tuple[str, bool | str, int]]:
    """(shard, remat, steps of accumulation), cheapest in traffic and FLOPs first.

    `remat`: what was requested, which all have.
    """
    own = str(planner.sharding.what)
    stages = SHARD_STAGES[planner.sharding.stage :] if planner.replicas > 1 else (own,)
    policies: tuple[bool | str, ...] = (remat,) if remat else (False, True, "segments")
    found = [(shard, policy, 1) for shard in stages for policy in policies]
    return [*found[1:], *((own, remat, steps) for steps in MICRO_STEPS)]


def ways_to_fit(
    planner: Planner,
    memory_bytes: int,
    advance: Callable[[float], None] = lambda settings: None,
    remat: bool | str = False,
) -> Iterator[Way]:
    """Yields those of `settings_to_try` that need less memory; they may fit or not.

    Accumulation is computed from the plan of a micro-batch and one more set of
    gradients; the others are traced. `advance` is called after each setting.
    """
    base = planner.at(planner.local_rows, remat=remat)
    calls_remat = bool(base.remat) and not remat  # the model itself
    for shard, policy, steps in settings_to_try(planner, remat):
        way = None
        if not (calls_remat and policy):
            way = _way(planner, memory_bytes, base, shard, policy, steps)
        advance(1)
        if way is not None and way.peak_bytes < base.peak_bytes:
            yield way


def _way(
    planner: Planner,
    memory_bytes: int,
    base: MemoryPlan,
    shard: str,
    remat: bool | str,
    steps: int,
) -> Way | None:
    """None: the setting is impossible for this model or batch."""
    rows = planner.local_rows
    if steps > 1:
        if rows < steps:
            return None
        micro = planner.at(-(-rows // steps), remat=remat)
        return _accumulating(micro, steps, planner, memory_bytes)
    try:
        found = planner.at(rows, shard=shard, remat=remat)
    except ConfigurationError:
        return None  # an optimizer that cannot be sharded, a layer not recomputed
    return Way(
        _code(shard, remat, str(planner.sharding.what)),
        found.peak_bytes,
        found.fits_in(memory_bytes),
        found.flops / base.flops - 1 if base.flops else 0.0,
        found.sent_bytes,
    )


def _code(shard: str, remat: bool | str, own: str) -> str:
    parts = [] if shard == own else [f'shard="{shard}"']
    policy = f', "{remat}"' if isinstance(remat, str) else ""
    return " and ".join([*parts, *([f"tfdp.remat(model{policy})"] if remat else [])])


def _accumulating(
    micro: MemoryPlan, steps: int, planner: Planner, memory_bytes: int
) -> Way:
    stage = planner.sharding.stage
    kept = micro.trainable_bytes // (planner.replicas if stage >= 2 else 1)
    peak_bytes = micro.peak_bytes + kept
    # Accumulated gradients are dense, of tables as well.
    whole = sent_bytes(micro.trainable_bytes, planner.replicas, stage, remat=False)
    one_way = whole // 2
    sent = {2: (steps + 1) * one_way, 3: (3 if micro.remat else 2) * steps * one_way}
    return Way(
        f"gradient_accumulation_steps={steps}, {micro.local_rows} rows at a time",
        peak_bytes,
        micro.is_known and needed_for(peak_bytes) <= memory_bytes,
        0.0,
        sent.get(stage, whole),
    )
