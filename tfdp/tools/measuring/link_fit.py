"""Latency and rate of a link from three sums. Pure.

Of a few tensors, of the same bytes in more tensors, and of many bytes: 4 MB, 4 MB and
102 MB. With t their times and u the units of each, by which a sum has its latency,

    seconds of a unit  c = (t of many - t of few) / (u of many - u of few)
    bytes per second   work of (102 MB - 4 MB)
                       / (t of 102 MB - t of 4 MB - c (u of 102 MB - u of 4 MB))

The many bytes are tensors of all sizes, as a model has them: what is larger than the
caches takes longer, and so does what is packed, and cores share large tensors and small
ones less evenly than equal ones.
Between processes a unit is a bucket: 4 MB are one, or two where tensors have 1 MB: what
a tensor takes besides its bytes is in the rate.
Within a process nothing is packed and a unit is a tensor, of which each replica adds
some: there are 64 at least, so that all cores add.
What a call costs besides, from Python into TensorFlow and back, falls out of both.
"""

from __future__ import annotations

import dataclasses
import math

from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication
from tfdp.tools.bench.subjects.gradient_sets import FLOAT32_BYTES, GRADIENT_SETS
from tfdp.tools.simulator.machine import Link

__all__ = ["BETWEEN_SETS", "WITHIN_SETS", "SumSets", "SumTimes", "fit_link"]

LEAST_SECONDS = 1e-7


@dataclasses.dataclass(frozen=True)
class SumSets:
    """Three of `gradient_sets.GRADIENT_SETS`.

    Args:
      few, many: names, of 4 MB in few and in many equal tensors.
      large: name, of 102 MB.
      packed: whether a unit is a bucket; else it is a tensor.
    """

    few: str
    many: str
    large: str
    packed: bool

    @property
    def names(self) -> tuple[str, str, str]:
        """Of all three."""
        return (self.few, self.many, self.large)

    def tensors(self, name: str) -> list[int]:
        """Of a set, the bytes of each tensor."""
        return [FLOAT32_BYTES * math.prod(shape) for shape in GRADIENT_SETS[name]()]

    def units(self, name: str) -> int:
        """Of a set, as tfdp plans them by default."""
        tensors = self.tensors(name)
        if not self.packed:
            return len(tensors)
        defaults = Communication()
        plan = plan_buckets(
            [TensorInfo(size_bytes, "float32") for size_bytes in tensors],
            bucket_bytes=defaults.bucket_bytes,
            first_bucket_bytes=defaults.first_bucket_bytes,
        )
        return len(plan)


BETWEEN_SETS = SumSets("equal-1x1m", "equal-4x256k", "widening", packed=True)
WITHIN_SETS = SumSets("equal-64x16k", "equal-256x4k", "widening", packed=False)


@dataclasses.dataclass(frozen=True)
class SumTimes:
    """Of one of the sets: seconds of a call, and those of a processor."""

    seconds: float
    processor_seconds: float


def fit_link(
    sets: SumSets,
    times: dict[str, SumTimes],
    bytes_of_work: float,
    rounds: int,
    cores: int,
) -> Link:
    """A link that takes as long as was measured.

    Args:
      sets: what was summed.
      times: of each of them.
      bytes_of_work: for each byte of a sum what is moved, by the simulator's formula:
        replicas + 1 within a host, 2 (p - 1) / p between p processes.
      rounds: latencies of a sum by that formula.
      cores: that the processes may use together.
    """
    few, many, large = (times[name] for name in (sets.few, sets.many, sets.large))
    sizes = {name: sum(sets.tensors(name)) for name in sets.names}
    units = {name: sets.units(name) for name in sets.names}
    more_units = units[sets.many] - units[sets.few]
    unit_seconds = max((many.seconds - few.seconds) / more_units, LEAST_SECONDS)
    longer = max(large.seconds - few.seconds, LEAST_SECONDS)
    busy = (large.processor_seconds - few.processor_seconds) / longer / cores
    in_units = unit_seconds * (units[sets.large] - units[sets.few])
    by_bytes = max(longer - in_units, LEAST_SECONDS)
    more_bytes = sizes[sets.large] - sizes[sets.few]
    return Link(
        latency_seconds=unit_seconds / rounds,
        bytes_per_second=bytes_of_work * more_bytes / by_bytes,
        compute_share=min(max(busy, 0.0), 1.0),
    )
