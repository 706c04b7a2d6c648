"""Groups that exchange compressed gradients: all replicas, or one replica of each host.

An engine has one `PeerGroup`; `of` gives one replica's view of it, which implements
`tfdp.compression.method.Peers`.
"""

from __future__ import annotations

import abc
import dataclasses

import tensorflow as tf

from tfdp.exchange.packing import Tensors


class PeerGroup(abc.ABC):
    """Which replicas exchange, and how. Only they call `sum`, `gather` and
    `all_to_all`; all replicas call `collect` and `distribute`."""

    #: The number of peers.
    size: int

    def speaks(self, rank: int) -> bool:
        """Whether the replica is a peer, a leader of those that are not."""
        return True

    def place(self, rank: int) -> int:
        """The index of a leader among the peers."""
        return rank

    def collect(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """At a leader, the sums over its replicas."""
        return list(tensors)

    @abc.abstractmethod
    def sum(self, tensors: Tensors, rank: int, label: str) -> list[tf.Tensor]:
        """See `tfdp.compression.method.Peers`."""

    @abc.abstractmethod
    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `tfdp.compression.method.Peers`."""

    def gather_ahead(
        self, words: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self.gather(words, rank, label), words

    @abc.abstractmethod
    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `tfdp.compression.method.Peers`."""

    def distribute(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The leaders' tensors on all replicas; others pass tensors of equal shapes."""
        return list(tensors)

    def of(self, rank: int, label: str) -> PeersOfOne:
        """A leader's view of the group, for one exchange."""
        return PeersOfOne(self, rank, label)


@dataclasses.dataclass(frozen=True)
class PeersOfOne:
    """The `tfdp.compression.method.Peers` of one leader and exchange."""

    group: PeerGroup
    rank: int
    label: str

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def place(self) -> int:
        return self.group.place(self.rank)

    def sum(self, tensors: Tensors) -> list[tf.Tensor]:
        return self.group.sum(tensors, self.rank, self.label)

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        return self.group.gather(words, self.rank, self.label)

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.group.gather_ahead(words, self.rank, self.label)

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        return self.group.all_to_all(rows, self.rank, self.label)
