"""How a tensor is cut into shards, one per replica. Pure; no framework is imported.

The stages are those of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): 1 shards the
optimizer's state, 2 the gradients as well, 3 the parameters as well.
"""

from __future__ import annotations

import dataclasses
import math

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError

__all__ = ["SHARD_STAGES", "ShardLayout", "Sharding", "shard_stage"]

#: What `shard=` takes; the place in the list is the stage.
SHARD_STAGES = ("none", "optimizer", "gradients", "parameters")

# Shards that begin at a multiple of this many elements can be cut out of a tensor
# without a copy: TensorFlow wants 64 bytes, and the narrowest float has one byte.
ALIGNED_ELEMENTS = 64
# Alignment may lengthen a tensor by this part of itself and no more.
MOST_PADDING = 1 / 64


def shard_stage(shard: str | int) -> int:
    """The ZeRO stage that the argument `shard` of a strategy names, 0 to 3.

    Raises:
      ConfigurationError: when it names none.

    >>> shard_stage("parameters"), shard_stage(1)
    (3, 1)
    """
    if shard in SHARD_STAGES:
        return SHARD_STAGES.index(str(shard))
    if is_whole(shard, 0, len(SHARD_STAGES) - 1):
        return shard
    raise ConfigurationError(
        f"shard must be one of {', '.join(map(repr, SHARD_STAGES))}, or the ZeRO stage "
        f"0 to 3. Received: {shard!r}."
    )


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What is sharded.

    Args:
      stage: of ZeRO, 0 to 3.
      min_bytes: variables below this size stay mirrored.
      offload: whether the state of optimizers is kept, and updated, by the host.
    """

    stage: int = 0
    min_bytes: int = 0
    offload: bool = False

    def is_needed(self, parts: int) -> bool:
        """Whether there is anything to do with `parts` replicas."""
        return bool(self.stage) and (parts > 1 or self.offload)


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """A tensor as flat shards of one length, the last ones padded with zeros.

    Args:
      shape: of the whole tensor.
      parts: how many shards there are.

    >>> layout = ShardLayout((5, 3), parts=4)
    >>> layout.shard_elements, [layout.bounds(part) for part in range(4)]
    (4, [(0, 4), (4, 8), (8, 12), (12, 15)])
    """

    shape: tuple[int, ...]
    parts: int

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def shard_elements(self) -> int:
        """Elements of each shard, padding included."""
        least = -(-self.elements // self.parts)
        aligned = -(-least // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        fits = (aligned - least) * self.parts <= self.elements * MOST_PADDING
        return aligned if fits else least

    def bounds(self, part: int) -> tuple[int, int]:
        """Where shard `part` begins and ends in the flat tensor, padding left out."""
        start = min(part * self.shard_elements, self.elements)
        return start, min(start + self.shard_elements, self.elements)

    def length(self, part: int) -> int:
        """Elements of shard `part`, padding left out."""
        start, stop = self.bounds(part)
        return stop - start
