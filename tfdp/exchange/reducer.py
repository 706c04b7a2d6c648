"""`Reducer`: the one contract between a step and what moves its tensors.

`GradientPipeline` keeps it on CPUs and GPUs, on one host and several, and
`CrossReplicaReducer` on TPUs. All calls but `join_shards` are made once per replica, in
replica context, while a graph is built; eager replicas run one after the other, and
exchange by what TensorFlow offers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout


class Reducer(Protocol):
    """Moves tensors between the replicas of a step."""

    @property
    def compressed(self) -> CompressedSums | None:
        """What sums gradients in fewer bytes than they have; None: nothing does."""

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """Sums of values that `method` makes small, over replicas or hosts.

        Args:
          method: one of `tfdp.compression`.
          across: "hosts" or "replicas"; see `Communication.compression_across`.
        """

    @property
    def late(self) -> AsyncExchange | None:
        """What makes sums while steps go on; None: here they are made at once."""

    def begin_run(self) -> None:
        """Called before the replicas of one `strategy.run` are traced."""

    def end_run(self) -> None:
        """Called when they are traced."""

    @property
    def run_graph(self) -> tf.Graph | None:
        """The graph of the replica function that is being built."""

    def note_branches(self, rank: Any) -> None:
        """Notes the conditionals that are being built now, where all replicas have to
        take the same branch. Exchanges do so themselves."""

    @property
    def branches(self) -> Sequence[tuple[int, tf.Graph]]:
        """The branches of `tf.cond` that were noted in this run, which has been traced,
        each with the rank of the replica whose conditional it is."""

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        state: Sequence[tf.Tensor],
        rank: Any,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """The sums over the replicas of gradients, and of other small values.

        Gradients may be `tf.IndexedSlices`, and may travel in fewer bits than they
        have; `state` travels as it is, in the same buckets where it can. With
        `sum_rows` rows of slices that have one index may be added; with `at_once` all
        may travel together.
        """

    def all_reduce(self, values: Sequence[Any], rank: Any, *, mean: bool) -> list[Any]:
        """The sum or mean of each value over the replicas, bit for bit as they are."""

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The replicas of this process, host by host; None: hosts cannot be told apart
        here, or there is one."""

    def sum_within(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum of `value` over the replicas of the calling replica's host."""

    def broadcast(self, value: Any, rank: Any) -> Any:
        """Replica 0's value."""

    @property
    def shard_parts(self) -> int:
        """Over how many replicas a tensor is sharded."""

    @property
    def first_part(self) -> int:
        """The shard of this process's first replica."""

    def reduce_scatter(
        self,
        gradients: Sequence[Any],
        layouts: Sequence[ShardLayout],
        rank: Any,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient.

        `in_turn`: few of the whole gradients are to be in memory at once. `label`: of
        what, in words that are alike on all hosts, which compare them.
        """

    def all_gather(
        self, shards: Sequence[tf.Tensor], layouts: Sequence[ShardLayout], rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors from everybody's shards."""

    @property
    def holds_first_copy(self) -> bool:
        """Whether the shards of this process are the first of several copies."""

    def sum_of_shards(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum over the shards of what each replica found on its own."""

    def join_shards(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor from the shards of this process, outside of replicas."""
