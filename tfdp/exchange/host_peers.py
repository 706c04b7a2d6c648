"""One replica of each host speaks for it, over the link between the hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.exchange.peers import PeerGroup
from tfdp.exchange.two_level import LEADER, AcrossHostsEngine

__all__ = ["HostLeaders"]


class HostLeaders(PeerGroup):
    """The first replica of each host, with the sums over its host.

    Args:
      engine: of several processes.
    """

    def __init__(self, engine: AcrossHostsEngine):
        self._engine = engine
        self._link = engine.link
        self.size = engine.link.workers

    def speaks(self, rank: int) -> bool:
        """See `PeerGroup`."""
        return rank == LEADER

    def place(self, rank: int) -> int:
        """See `PeerGroup`."""
        return self._link.rank

    def collect(self, tensors: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        call = self._engine.next_call_number(rank)
        return self._engine.sums_at_leader(tensors, rank, call)

    def sum(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        return self._engine.sum_of_hosts(tensors, label)

    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        return self.gather_ahead(words, rank, label)[0]

    def gather_ahead(
        self, words: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `PeerGroup`; while it is under way the next one may begin."""

        def gather(channel: str, mine: np.ndarray) -> list[np.ndarray]:
            size = mine.size
            ranges = [(place * size, (place + 1) * size) for place in range(self.size)]
            piece = mine.reshape(-1)
            (whole,) = self._link.all_gather([piece], [ranges], label, channel)
            return [whole.reshape(self.size, *mine.shape)]

        like = tf.TensorSpec([self.size, *words.shape], words.dtype)
        (whole,), begun = self._engine.at_leader_ahead(gather, [words], [like])
        return whole, begun

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        return self._engine.at_leader(
            lambda mine: [self._link.all_to_all(mine, label)], [rows], [rows]
        )[0]

    def hand_out(self, tensors: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        return self._engine.from_leader(tensors, rank)
