"""Simulated hosts in one process: the first replica of each speaks for it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp.exchange.hand_over import sum_in_order
from tfdp.exchange.in_process import InProcessEngine
from tfdp.exchange.peers import PeerGroup

__all__ = ["LevelLeaders"]


class LevelLeaders(PeerGroup):
    """The first replica of each host of `Communication(hierarchy=(hosts, devices))`.

    Args:
      engine: with two levels.
    """

    def __init__(self, engine: InProcessEngine):
        self._engine = engine
        self._topology = engine.topology
        self._leaders = engine.topology.across_host_groups[0]
        self.size = len(self._leaders)

    def speaks(self, rank: int) -> bool:
        """See `PeerGroup`."""
        return self._topology.local_rank_of(rank) == 0

    def place(self, rank: int) -> int:
        """See `PeerGroup`."""
        return self._topology.host_of(rank)

    def collect(self, tensors: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        return self._engine.sum_at_first(tensors, rank)

    def sum(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        parts = [tf.unstack(self._gathered(t, rank), self.size) for t in tensors]
        return [sum_in_order(of_tensor) for of_tensor in parts]

    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        return self._gathered(words, rank)

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        outgoing = tf.unstack(rows, self.size)
        return self._engine.swap_among(outgoing, rank, self._leaders)

    def _gathered(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        everywhere = [tensor] * self.size
        return self._engine.swap_among(everywhere, rank, self._leaders)

    def hand_out(self, tensors: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        return self._engine.share_from_first(tensors, rank)
