"""Groups that exchange compressed gradients: all replicas, or one replica of each host.

`PeerGroup.of` gives one replica's view of the group, which implements
`tfdp.compression.method.Peers`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.exchange.packing import Tensors
from tfdp.exchange.transport import Transport


@dataclasses.dataclass(frozen=True)
class PeerGroup:
    """The replicas that exchange over `transport`; all replicas call `collect` and
    `distribute`. With `inner`, an `InProcess`, they are the first of each host."""

    transport: Transport
    inner: Any = None

    @property
    def size(self) -> int:
        """The number of peers."""
        return self.transport.replicas

    def speaks(self, rank: int) -> bool:
        """Whether the replica is a peer."""
        return self.inner is None or rank % self.inner.replicas == 0

    def collect(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The sums over the replicas of a host, at its peer."""
        return list(tensors if self.inner is None else self.inner.reduce(tensors, rank))

    def distribute(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The peers' tensors on all replicas; others pass tensors of equal shapes."""
        if self.inner is None:
            return list(tensors)
        return self.inner.broadcast(tensors, rank)

    def of(self, rank: int, label: str) -> PeersOfOne:
        """A peer's view of the group, for one exchange."""
        return PeersOfOne(self, rank, label)


def peer_group(transport: Transport, across: str) -> PeerGroup:
    """All replicas of a transport, or the first replica of each host.

    `across` is "hosts" or "replicas"; see `Communication`.
    """
    is_one_process = transport.replicas == len(transport.devices)
    if across == "replicas" and is_one_process:
        return PeerGroup(transport)
    if transport.outer is None:
        raise ConfigurationError(
            f"The engine {transport.name!r} has no simulated hosts to compress "
            "between. Use engine='in_process', or compression_across='replicas'."
        )
    return PeerGroup(transport.outer, transport.inner)


@dataclasses.dataclass(frozen=True)
class PeersOfOne:
    """The `tfdp.compression.method.Peers` of one peer and exchange."""

    group: PeerGroup
    rank: int
    label: str

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def place(self) -> int:
        inner, rank = self.group.inner, self.rank
        place = rank if inner is None else rank // inner.replicas
        return self.group.transport.first_part + place

    def sum(self, tensors: Tensors) -> list[tf.Tensor]:
        return self.group.transport.all_reduce(tensors, self.rank, self.label)

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        return self.gather_ahead(words)[0]

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.group.transport.start(words, self.rank, self.label)

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        return self.group.transport.all_to_all(rows, self.rank, self.label)
