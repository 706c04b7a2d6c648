"""Who exchanges compressed gradients over an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.exchange.engine import Engine
from tfdp.exchange.in_process import InProcessEngine
from tfdp.exchange.peers import PeerGroup
from tfdp.exchange.send_receive import sum_in_order
from tfdp.exchange.two_level import LEADER, AcrossHostsEngine


def peer_group(engine: Engine, across: str) -> PeerGroup:
    """All replicas of an engine, or one of each host.

    Args:
      engine: what moves the tensors.
      across: "hosts" or "replicas"; see `Communication`.

    Raises:
      ConfigurationError: where an engine cannot do so.
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


# One replica of each host speaks for it, over the link between the hosts.


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


# Simulated hosts in one process: the first replica of each speaks for it.


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


# All replicas exchange what is compressed, each with all others.


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
        return self._engine.all_gather_equal(words, rank)

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        """See `PeerGroup`."""
        return self._engine.all_to_all(rows, rank)
