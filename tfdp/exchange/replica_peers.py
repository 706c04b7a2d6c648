"""All replicas exchange what is compressed, each with all others."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp.exchange.engine import Engine
from tfdp.exchange.peers import PeerGroup

__all__ = ["AllReplicas"]


class AllReplicas(PeerGroup):
    """Every replica speaks, over an engine of one process."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.size = engine.replicas

    def sum(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        """See `PeerGroup`."""
        return self._engine.all_reduce_bucket(tensors, rank, label)

    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        return self._engine.all_gather_alike(words, rank)

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        return self._engine.all_to_all(rows, rank)
