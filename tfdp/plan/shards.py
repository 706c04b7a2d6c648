"""How a tensor is cut into shards, one per replica. Pure; no framework is imported.

The ZeRO stages (Rajbhandari et al. 2020, arXiv 1910.02054): 1 shards the optimizer's
state, 2 the gradients as well, 3 the parameters as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from tfdp.errors import ConfigurationError
from tfdp.plan.options import OPTIONS, SHARD_STAGES, Given, refuse_options
from tfdp.plan.topology import Groups

# A shard that begins at a multiple of this many elements is a view: TensorFlow aligns
# to 64 bytes, and the narrowest float has one byte.
ALIGNED_ELEMENTS = 64
# The most padding that alignment may add, as a part of the tensor.
MOST_PADDING = 1 / 64
#: The options of a `Sharding`, in the order of its fields.
NAMES = ("shard", "shard_group", "shard_min_bytes", "offload")


def shard_stage(shard: str | int) -> int:
    """The ZeRO stage, 0 to 3, of the argument `shard` of a strategy.

    Raises `ConfigurationError` if there is none.

    >>> shard_stage("parameters"), shard_stage(1)
    (3, 1)
    """
    OPTIONS["shard"].check(shard)
    return SHARD_STAGES.index(shard) if isinstance(shard, str) else shard


@dataclasses.dataclass(frozen=True)
class Sharding:
    """All of a strategy's sharding options as one value, for its argument `shard=`.

    Args:
      what: "none" (0), "optimizer" (1: its state), "gradients" (2: and gradients) or
        "parameters" (3: and weights); the numbers are the stages of ZeRO.
      group: which replicas share the shards: "all", or those of each "host".
      min_bytes: smaller variables stay whole.
      offload: "optimizer": the host keeps and updates the optimizers' state.

    Raises:
      ConfigurationError: when one is out of range, or has no effect.

    ```python
    import tfdp

    sharding = tfdp.Sharding("optimizer", min_bytes=0)
    strategy = tfdp.DataParallelStrategy(shard=sharding)
    print(strategy.shard, strategy.shard_min_bytes)
    ```

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.
    """

    what: str | int = "none"
    group: str = "all"
    min_bytes: int = 32 * 1024
    offload: str = "none"

    def __post_init__(self) -> None:
        # Normalized, so that equal values are equal.
        object.__setattr__(self, "what", SHARD_STAGES[shard_stage(self.what)])
        values = dict(zip(NAMES, dataclasses.astuple(self), strict=True))
        refuse_options(Given(values=values))

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return shard_stage(self.what)

    @property
    def offloads(self) -> bool:
        """Whether the host keeps the optimizers' state."""
        return self.offload == "optimizer"

    def is_needed(self, parts: int) -> bool:
        """Whether this has an effect with `parts` replicas."""
        return bool(self.stage) and (parts > 1 or self.offloads)


def sharding_of(shard: str | int | Sharding, **others: Any) -> Sharding:
    """The sharding of a strategy's arguments: a name, a stage, or all in one value.

    `others` are its `group`, `min_bytes` and `offload`.
    """
    if not isinstance(shard, Sharding):
        return Sharding(shard, **others)
    defaults = {field.name: field.default for field in dataclasses.fields(Sharding)}
    for name, value in others.items():
        if value != defaults[name]:
            raise ConfigurationError(
                f"shard={shard!r} has {name}={getattr(shard, name)!r}, and the "
                f"strategy has {value!r}. Give it once, in the Sharding."
            )
    return shard


def sharding_in(given: Given) -> Sharding:
    """The sharding in the options of a strategy."""
    return Sharding(*map(given.__getitem__, NAMES))


class WithOptions:
    """A strategy's sharding options as attributes."""

    #: The options of this strategy.
    given: Given

    @property
    def shard(self) -> str:
        """The sharded state: "none", "optimizer", "gradients" or "parameters"."""
        return str(self.given["shard"])

    @property
    def shard_group(self) -> str:
        """Which replicas share the shards: "all", or those of each "host"."""
        return str(self.given["shard_group"])

    @property
    def shard_min_bytes(self) -> int:
        """The bytes below which a variable stays whole."""
        return int(self.given["shard_min_bytes"])

    @property
    def offload(self) -> str:
        """The state that the host keeps for the devices: "none" or "optimizer"."""
        return str(self.given["offload"])


def overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The begin and end of what two ranges have in common; empty if begin >= end."""
    return max(one[0], other[0]), min(one[1], other[1])


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """A tensor of `shape` as `parts` flat shards of one length, padded with zeros.

    >>> layout = ShardLayout((5, 3), parts=4)
    >>> layout.shard_elements, [layout.bounds(part) for part in range(4)]
    (4, [(0, 4), (4, 8), (8, 12), (12, 15)])
    """

    shape: tuple[int, ...]
    parts: int

    @property
    def elements(self) -> int:
        """The elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def groups(self) -> Groups | None:
        """The replicas that share the parts, if the layout says so; None: all."""
        return None

    @property
    def copies(self) -> Groups | None:
        """The replicas that hold the same part, if the layout says so."""
        return None

    @property
    def shard_elements(self) -> int:
        """The elements of each shard, with padding; of an owned one, on average."""
        least = -(-self.elements // self.parts)
        aligned = -(-least // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        fits = (aligned - least) * self.parts <= self.elements * MOST_PADDING
        return aligned if fits else least

    def bounds(self, part: int) -> tuple[int, int]:
        """The begin and end of shard `part` in the flat tensor, without padding."""
        start = min(part * self.shard_elements, self.elements)
        return start, min(start + self.shard_elements, self.elements)

    def length(self, part: int) -> int:
        """The elements of shard `part`, without padding."""
        start, stop = self.bounds(part)
        return stop - start

    def shard_shape(self, part: int) -> tuple[int, ...]:
        """The shape in which the replica of shard `part` stores it."""
        return (self.shard_elements,)

    @property
    def flat(self) -> ShardLayout:
        """The same parts of the tensor as it travels: one after the other."""
        return self

    def of_hosts(self, replicas_per_host: int) -> ShardLayout:
        """The same shards, those of each host's replicas joined to one.

        >>> layout = ShardLayout((5, 3), parts=4).of_hosts(2)
        >>> [layout.bounds(host) for host in range(2)]
        [(0, 8), (8, 15)]
        """
        hosts, joined = self.parts // replicas_per_host, self.shard_elements
        return JoinedShards(self.shape, hosts, joined * replicas_per_host)


Layouts: TypeAlias = Sequence[ShardLayout]


@dataclasses.dataclass(frozen=True)
class JoinedShards(ShardLayout):
    """Flat shards of a given length."""

    joined_elements: int

    @property
    def shard_elements(self) -> int:
        return self.joined_elements


@dataclasses.dataclass(frozen=True)
class RowLayout(ShardLayout):
    """A table of which each shard has equally many whole rows, padded with zeros.

    >>> layout = RowLayout((5, 3), parts=2)
    >>> [layout.bounds(part) for part in range(2)], layout.shard_shape(1)
    ([(0, 9), (9, 15)], (3, 3))
    """

    @property
    def rows(self) -> int:
        """The rows of each shard."""
        return -(-self.shape[0] // self.parts)

    @property
    def shard_elements(self) -> int:
        return self.rows * math.prod(self.shape[1:])

    def shard_shape(self, part: int) -> tuple[int, ...]:
        return (self.rows, *self.shape[1:])


@dataclasses.dataclass(frozen=True)
class OwnedLayout(ShardLayout):
    """A tensor of which shard `owner` is the whole, and all other shards are empty.

    The sum of gradients by this layout is a reduction to the owner, and its gather a
    broadcast from there.

    >>> layout = OwnedLayout((5, 3), parts=3, owner=1)
    >>> [layout.bounds(part) for part in range(3)], layout.shard_shape(1)
    ([(0, 0), (0, 15), (15, 15)], (5, 3))
    """

    owner: int

    def bounds(self, part: int) -> tuple[int, int]:
        edges = (0, self.elements)
        return edges[part > self.owner], edges[part >= self.owner]

    def shard_shape(self, part: int) -> tuple[int, ...]:
        return self.shape if part == self.owner else (0,)

    def of_hosts(self, replicas_per_host: int) -> ShardLayout:
        hosts = self.parts // replicas_per_host
        return OwnedLayout(self.shape, hosts, self.owner // replicas_per_host)


@dataclasses.dataclass(frozen=True)
class StageLayout(ShardLayout):
    """A weight of a stage of a pipeline: member `owner` of each group has the whole.

    All members update it: those without it update nothing of it, but take part in what
    an optimizer sums (norms of all weights).

    >>> pairs = Groups([(0, 1), (2, 3)]), Groups([(0, 2), (1, 3)])
    >>> layout = StageLayout((5, 3), 2, 1, *pairs)
    >>> layout.bounds(0), layout.shard_shape(0), layout.shard_shape(1)
    ((0, 0), (0,), (5, 3))
    """

    owner: int
    members: Groups
    same: Groups

    @property
    def groups(self) -> Groups:
        return self.members

    @property
    def copies(self) -> Groups:
        return self.same

    def bounds(self, part: int) -> tuple[int, int]:
        edges = (0, self.elements)
        return edges[part > self.owner], edges[part >= self.owner]

    def shard_shape(self, part: int) -> tuple[int, ...]:
        return self.shape if part == self.owner else (0,)

    def of_hosts(self, replicas_per_host: int) -> ShardLayout:
        # The replicas of one host have all stages.
        return ShardLayout(self.shape, 1)
