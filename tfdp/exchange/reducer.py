"""What sharded variables need of the code that moves tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.plan.shards import ShardLayout

__all__ = ["ShardReducer"]


class ShardReducer(Protocol):
    """What moves shards between replicas, in replica context."""

    @property
    def shard_parts(self) -> int:
        """Over how many replicas a tensor is sharded."""

    @property
    def first_part(self) -> int:
        """The shard of this process's first replica."""

    def join_shards(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor from the shards of this process, outside of replicas."""

    @property
    def run_graph(self) -> tf.Graph | None:
        """The graph of the replica function that is being built."""

    def reduce_scatter(
        self,
        values: Sequence[Any],
        layouts: Sequence[ShardLayout],
        rank: Any,
        *,
        in_turn: bool = False,
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each value.

        `in_turn`: few of the whole values are to be in memory at once.
        """

    def all_gather(
        self, shards: Sequence[tf.Tensor], layouts: Sequence[ShardLayout], rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors from everybody's shards."""

    def sum_of_shards(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum over the shards of what each replica found on its own."""
