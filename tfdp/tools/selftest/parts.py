"""The parts of a self-test, in order. Pure; imports no framework."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

# The engines that work on one host.
ENGINES = ("in_process", "tensorflow")
STAGES = ("none", "optimizer", "gradients", "parameters")
LEAST_FOR_TWO_LEVELS = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """One check, run in its own process."""

    title: str
    kind: str  # "sums", "training", "rates", "memory" or "overhead"
    communication: dict[str, Any] = dataclasses.field(default_factory=dict)
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    jit_compile: bool = False
    policy: str = "float32"  # Keras' dtype policy
    one_replica: bool = False  # on the first device only, unsplit


_one_replica = functools.partial(Part, one_replica=True)
# CPUs have no allocator statistics and no kernels in 16 bits.
ON_ONE_GPU = (
    _one_replica("training, one replica", "training"),
    _one_replica(
        "training, one replica, compiled by XLA", "training", jit_compile=True
    ),
    *(
        _one_replica(f"training, one replica, {policy}", "training", policy=policy)
        for policy in ("mixed_bfloat16", "mixed_float16")
    ),
    _one_replica("memory of a step, one replica", "memory"),
)


def parts_for(device_type: str, devices: int) -> tuple[Part, ...]:
    """The parts for this number of devices, at least two.

    >>> [part.title for part in parts_for("cpu", 2)][:2]
    ['sums, engine in_process', 'sums, engine tensorflow']
    """
    parts = [Part(f"sums, engine {e}", "sums", {"engine": e}) for e in ENGINES]
    if devices >= LEAST_FOR_TWO_LEVELS and not devices % 2:
        for engine in ENGINES:
            options = {"engine": engine, "hierarchy": [2, devices // 2]}
            parts.append(Part(f"sums on two levels, engine {engine}", "sums", options))
    parts += [
        Part(f'training, shard="{stage}"', "training", strategy={"shard": stage})
        for stage in STAGES
    ]
    parts.append(Part("training, compiled by XLA", "training", jit_compile=True))
    if device_type == "gpu":
        parts += ON_ONE_GPU
    for e in ENGINES:
        parts.append(Part(f"speed of sums, engine {e}", "rates", {"engine": e}))
    parts.append(_one_replica("overhead, one replica vs plain Keras", "overhead"))
    return tuple(parts)
