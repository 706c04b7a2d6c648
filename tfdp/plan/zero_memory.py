"""What the states of a model take on a device, by formula: weights, gradients, slots.

    stage 0    (w + g + s) P
    stage 1    (w + g) P + s P / N
    stage 2    w P + (g + s) P / N
    stage 3    (w + g + s) P / N

for P weights on N replicas, with w, g and s bytes for each weight, its gradient and
what the optimizer keeps of it. Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054,
sections 3.1 and 5. Activations, buffers and gaps are in no such formula: `tfdp plan`
counts them.
"""

from __future__ import annotations

import dataclasses

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.shards import shard_stage


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes for each weight.

    Args:
      weight: of it, as the step reads it.
      gradient: of its gradient.
      slots: of what the optimizer keeps of it, a copy in float32 included.
    """

    weight: int
    gradient: int
    slots: int


#: The paper's: 16 bits, and Adam with a copy of the weights in float32 (K = 12).
MIXED_ADAM = StateBytes(weight=2, gradient=2, slots=12)
#: Keras' Adam, under every policy of types: weights stay float32, and are the copy.
KERAS_ADAM = StateBytes(weight=4, gradient=4, slots=8)

_STAGES = ("optimizer", "gradients", "parameters")
_WEIGHTS = (7.5e9, 128e9, 1e12)
# Table 1 of the paper, GB: by replicas, for each number of weights its three stages.
_TABLE_1: dict[int, tuple[tuple[float, float, float], ...]] = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}
#: (weights, stage, replicas) -> GB of a device, as the paper has it.
PUBLISHED: dict[tuple[float, str, int], float] = {
    (weights, stage, replicas): gigabytes
    for replicas, of_models in _TABLE_1.items()
    for weights, of_stages in zip(_WEIGHTS, of_models, strict=True)
    for stage, gigabytes in zip(_STAGES, of_stages, strict=True)
} | {(7.5e9, "none", 64): 120.0}


def state_bytes(
    weights: float, shard: str | int, replicas: int, of: StateBytes = KERAS_ADAM
) -> float:
    """What a replica holds of a model's states, tensors too small to be cut left out.

    Args:
      weights: how many, above 0.
      shard: "none", "optimizer", "gradients" or "parameters", or 0 to 3.
      replicas: that share the shards, at least 1.
      of: bytes for each weight.

    Returns:
      Bytes.

    Raises:
      ConfigurationError: when an argument is not as above.

    >>> state_bytes(7.5e9, "gradients", 64, MIXED_ADAM) / 1e9
    16.640625
    >>> state_bytes(7.5e9, "gradients", 64, KERAS_ADAM) / 1e9
    31.40625
    """
    stage = shard_stage(shard)
    if not isinstance(weights, int | float) or not 0 < weights < float("inf"):
        raise ConfigurationError(
            f"weights must be a number above 0. Received: {weights!r}."
        )
    if not is_whole(replicas, least=1):
        raise ConfigurationError(
            f"replicas must be an integer of at least 1. Received: {replicas!r}."
        )
    # The stage from which each of them is cut.
    return sum(
        weights * size / (replicas if stage >= first else 1)
        for size, first in ((of.slots, 1), (of.gradient, 2), (of.weight, 3))
    )
