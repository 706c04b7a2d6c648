"""`Reducer`: the protocol between a step and what moves its tensors.

`GradientPipeline` implements it on CPUs and GPUs, on one host and several, and
`CrossReplicaReducer` on TPUs. Every replica makes all calls except `join_shards` once,
in replica context, while a graph is built; eager replicas run one after the other and
exchange by TensorFlow's own means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.exchange.packing import Layouts, Tensors
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout


class Reducer(Protocol):
    """Moves tensors between the replicas of a step."""

    @property
    def compressed(self) -> CompressedSums | None:
        """Sums of compressed gradients; None: gradients are not compressed."""

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """Sums of values that `method`, of `tfdp.compression`, compresses.

        `across`: "hosts" or "replicas"; see `Communication.compression_across`.
        """

    @property
    def late(self) -> AsyncExchange | None:
        """Asynchronous sums between hosts; None: not supported here."""

    def begin_run(self) -> None:
        """Called before the replicas of one `strategy.run` are traced."""

    def end_run(self) -> None:
        """Called when all replicas are traced."""

    @property
    def run_graph(self) -> tf.Graph | None:
        """The graph of the replica function under construction."""

    def note_branches(self, rank: Any) -> None:
        """Records the conditionals under construction, in which all replicas must take
        the same branch. Exchanges record theirs themselves."""

    @property
    def branches(self) -> Sequence[tuple[int, tf.Graph]]:
        """The branches of `tf.cond` recorded in this run, after its tracing, each with
        the rank of its replica."""

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        state: Tensors,
        rank: Any,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """The sums over the replicas of gradients, and of other small values.

        Gradients may be `tf.IndexedSlices`, and may travel rounded or compressed;
        `state` travels exactly, in the same buckets where possible. With `sum_rows`
        rows of equal index may be added; with `at_once` all may travel together.
        """

    def all_reduce(self, values: Sequence[Any], rank: Any, *, mean: bool) -> list[Any]:
        """The exact sum or mean of each value over the replicas."""

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The replicas of this process, host by host; None: one host, or hosts cannot
        be distinguished here."""

    def sum_within(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum of `value` over the replicas of the calling replica's host."""

    def broadcast(self, value: Any, rank: Any) -> Any:
        """Replica 0's value."""

    @property
    def shard_parts(self) -> int:
        """The number of shards of a tensor."""

    @property
    def first_part(self) -> int:
        """The shard of this process's first replica."""

    def reduce_scatter(
        self,
        gradients: Sequence[Any],
        layouts: Layouts,
        rank: Any,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient.

        `in_turn`: keep few of the whole gradients in memory at once. `label`: of the
        gradients, the same on all hosts, which compare it.
        """

    def all_gather(
        self, shards: Tensors, layouts: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors from all replicas' shards."""

    @property
    def holds_first_copy(self) -> bool:
        """Whether this process holds the first of several copies of its shards."""

    def sum_of_shards(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum over the shards of each replica's value."""

    def join_shards(
        self, shards: Tensors, layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor from this process's shards, in cross-replica context."""
