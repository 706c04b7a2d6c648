"""Peer groups that exchange compressed gradients over an engine."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.exchange.engine import Engine
from tfdp.exchange.in_process import InProcessEngine
from tfdp.exchange.packing import Tensors
from tfdp.exchange.peers import PeerGroup
from tfdp.exchange.send_receive import sum_in_order
from tfdp.exchange.two_level import LEADER, AcrossHostsEngine


def peer_group(engine: Engine, across: str) -> PeerGroup:
    """All replicas of an engine, or the first replica of each host.

    `across` is "hosts" or "replicas"; see `Communication`.
    """
    if isinstance(engine, AcrossHostsEngine):
        return HostLeaders(engine)
    if across == "replicas":
        return AllReplicas(engine)
    if isinstance(engine, InProcessEngine):
        return LevelLeaders(engine)
    raise ConfigurationError(
        f"The engine {engine.name!r} has no simulated hosts to compress between. Use "
        "engine='in_process', or compression_across='replicas'."
    )


class HostLeaders(PeerGroup):
    """The first replica of each host of several processes, with its host's sums."""

    def __init__(self, engine: AcrossHostsEngine):
        self._engine = engine
        self._link = engine.link
        self.size = engine.link.workers

    def speaks(self, rank: int) -> bool:
        return rank == LEADER

    def place(self, rank: int) -> int:
        return self._link.rank

    def collect(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        call = self._engine.next_call_number(rank)
        return self._engine.sums_at_leader(tensors, rank, call)

    def sum(self, tensors: Tensors, rank: int, label: str) -> list[tf.Tensor]:
        return self._engine.sum_of_hosts(tensors, label)

    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        return self.gather_ahead(words, rank, label)[0]

    def gather_ahead(
        self, words: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `PeerGroup`; the next gather may begin while it is in flight."""

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
        return self._engine.at_leader(
            lambda mine: [self._link.all_to_all(mine, label)], [rows], [rows]
        )[0]

    def distribute(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        return self._engine.from_leader(tensors, rank)


class LevelLeaders(PeerGroup):
    """The first replica of each host of `Communication(hierarchy=(hosts, devices))`."""

    def __init__(self, engine: InProcessEngine):
        self._engine = engine
        self._topology = engine.topology
        self._leaders = engine.topology.across_host_groups[0]
        self.size = len(self._leaders)

    def speaks(self, rank: int) -> bool:
        return self._topology.local_rank_of(rank) == 0

    def place(self, rank: int) -> int:
        return self._topology.host_of(rank)

    def collect(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        return self._engine.sum_at_first(tensors, rank)

    def sum(self, tensors: Tensors, rank: int, label: str) -> list[tf.Tensor]:
        parts = [tf.unstack(self._gathered(t, rank), self.size) for t in tensors]
        return [sum_in_order(of_tensor) for of_tensor in parts]

    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        return self._gathered(words, rank)

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        outgoing = tf.unstack(rows, self.size)
        return self._engine.all_to_all_among(outgoing, rank, self._leaders)

    def _gathered(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        everywhere = [tensor] * self.size
        return self._engine.all_to_all_among(everywhere, rank, self._leaders)

    def distribute(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        return self._engine.share_from_first(tensors, rank)


class AllReplicas(PeerGroup):
    """All replicas of one process."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.size = engine.replicas

    def sum(self, tensors: Tensors, rank: int, label: str) -> list[tf.Tensor]:
        return self._engine.all_reduce_bucket(tensors, rank, label)

    def gather(self, words: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        return self._engine.all_gather_equal(words, rank)

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        return self._engine.all_to_all(rows, rank)
