"""Those who exchange what is compressed: all replicas, or one replica of each host.

`PeerGroup` is made once for an engine; `of` gives what one replica sees of it, which
keeps the contract of `tfdp.compression.method.Peers`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf


class PeerGroup(abc.ABC):
    """Who exchanges, and how. All calls are made by every replica that speaks.

    `collect` and `hand_out` are called by the others as well.
    """

    #: How many exchange.
    size: int

    def speaks(self, rank: int) -> bool:
        """Whether the replica exchanges itself."""
        return True

    def place(self, rank: int) -> int:
        """Which of those who exchange a replica that speaks is."""
        return rank

    def collect(self, tensors: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """What a replica that speaks has to say: the sums over those it speaks for."""
        return list(tensors)

    @abc.abstractmethod
    def sum(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        """See `tfdp.compression.method.Peers`."""

    @abc.abstractmethod
    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `tfdp.compression.method.Peers`."""

    def gather_ahead(
        self, words: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `tfdp.compression.method.Peers`."""
        return self.gather(words, rank, label), words

    @abc.abstractmethod
    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `tfdp.compression.method.Peers`."""

    def hand_out(self, tensors: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """What those who speak have found, on every replica.

        Args:
          tensors: where the replica speaks; elsewhere others like them.
          rank: the calling replica.
        """
        return list(tensors)

    def of(self, rank: int, label: str) -> PeersOfOne:
        """What a replica that speaks sees of the group in an exchange."""
        return PeersOfOne(self, rank, label)


@dataclasses.dataclass(frozen=True)
class PeersOfOne:
    """A `tfdp.compression.method.Peers`."""

    group: PeerGroup
    rank: int
    label: str

    @property
    def size(self) -> int:
        """How many there are."""
        return self.group.size

    @property
    def place(self) -> int:
        """Which one this is."""
        return self.group.place(self.rank)

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Peers`."""
        return self.group.sum(tensors, self.rank, self.label)

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        """See `Peers`."""
        return self.group.gather(words, self.rank, self.label)

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Peers`."""
        return self.group.gather_ahead(words, self.rank, self.label)

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """See `Peers`."""
        return self.group.all_to_all(rows, self.rank, self.label)
