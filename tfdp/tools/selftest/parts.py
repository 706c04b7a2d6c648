"""What a self-test looks at, in order. Pure; no framework is imported."""

from __future__ import annotations

import dataclasses
from typing import Any

# Of the engines that can act on one host.
ENGINES = ("in_process", "tensorflow")
STAGES = ("none", "optimizer", "gradients", "parameters")
LEAST_FOR_TWO_LEVELS = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """One process' worth of looking.

    Args:
      title: for people.
      kind: "sums", "training", "rates", "memory" or "overhead".
      communication: arguments of `Communication`.
      strategy: further arguments of `DataParallelStrategy`.
      jit_compile: of the model that trains.
      policy: Keras' dtype policy, under which the model is made.
      one_replica: on the first of the devices alone, and on the whole of it.
    """

    title: str
    kind: str
    communication: dict[str, Any] = dataclasses.field(default_factory=dict)
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    jit_compile: bool = False
    policy: str = "float32"
    one_replica: bool = False


# Whose allocator tells what is in use, and whose kernels compute in 16 bits.
ON_ONE_GPU = (
    Part("training, one replica", "training", one_replica=True),
    Part(
        "training, one replica, compiled by XLA",
        "training",
        jit_compile=True,
        one_replica=True,
    ),
    *(
        Part(
            f"training, one replica, {policy}",
            "training",
            policy=policy,
            one_replica=True,
        )
        for policy in ("mixed_bfloat16", "mixed_float16")
    ),
    Part("memory of a step, one replica", "memory", one_replica=True),
)


def parts_for(device_type: str, devices: int) -> tuple[Part, ...]:
    """What can be looked at on so many devices.

    Args:
      device_type: "cpu" or "gpu".
      devices: at least two.

    >>> [part.title for part in parts_for("cpu", 2)][:2]
    ['sums, engine in_process', 'sums, engine tensorflow']
    """
    parts = [
        Part(f"sums, engine {engine}", "sums", {"engine": engine}) for engine in ENGINES
    ]
    if devices >= LEAST_FOR_TWO_LEVELS and not devices % 2:
        hierarchy = [2, devices // 2]
        parts += [
            Part(
                f"sums on two levels, engine {engine}",
                "sums",
                {"engine": engine, "hierarchy": hierarchy},
            )
            for engine in ENGINES
        ]
    parts += [
        Part(f'training, shard="{stage}"', "training", strategy={"shard": stage})
        for stage in STAGES
    ]
    parts.append(Part("training, compiled by XLA", "training", jit_compile=True))
    if device_type == "gpu":
        parts += ON_ONE_GPU
    parts += [
        Part(f"speed of sums, engine {engine}", "rates", {"engine": engine})
        for engine in ENGINES
    ]
    parts.append(
        Part("overhead, one replica beside plain Keras", "overhead", one_replica=True)
    )
    return tuple(parts)
