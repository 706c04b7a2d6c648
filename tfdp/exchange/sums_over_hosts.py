"""Sums among groups of replicas that have the same places on each host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.over_link import OverLink
from tfdp.exchange.packing import Tensors
from tfdp.exchange.transport import Transport
from tfdp.plan.shards import Layouts
from tfdp.plan.topology import Groups, Topology

FIRST = 0


class SumsOverHosts(Transport):
    """`all_reduce` for the replicas of each of `groups`, and nothing else.

    The tensors of all groups have the same shapes and types. `inner` is of this host's
    replicas, of which the first calls `sum_of_hosts`; `places` are the ranks of each
    group on one host, which are the same on all.

    Cost per host: for n bytes of tensors in each of G groups 2 G n (H - 1) / H bytes
    cross, in one exchange.
    """

    def __init__(
        self,
        inner: InProcess,
        outer: OverLink,
        sum_of_hosts: Callable[[Tensors, str, str | None], list[tf.Tensor]],
        groups: Groups,
        places: Groups,
    ):
        super().__init__(inner.devices, Topology(outer.replicas, inner.replicas))
        self.name, self.wire_dtype = outer.name, outer.wire_dtype
        self.traffic, self.order = inner.traffic, inner.order
        self.groups, self.replicas = groups, max(map(len, groups))
        self._first_rank = outer.part_of(FIRST) * inner.replicas
        self._inner, self._within = inner, inner.among(places)
        self._sum_of_hosts = sum_of_hosts
        #: The replica of each group that adds what its members on this host have.
        self._roots = [group[0] for group in places]

    def part_of(self, rank: int) -> int:
        return self.groups.place_of(self._first_rank + rank)

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        sums = self._within.reduce(tensors, rank)
        of_groups = [total for own in sums for total in self._to_first(own, rank)]
        if rank == FIRST:
            of_groups = self._sum_of_hosts(of_groups, label, wire_dtype)
        size = len(self._roots)
        totals = [
            self._from_first(of_groups[place * size :][:size], own, rank)
            for place, own in enumerate(sums)
        ]
        return self._within.broadcast(totals, rank)

    def _to_first(self, own: tf.Tensor, rank: int) -> list[tf.Tensor]:
        """The sums of all groups of this host at its first replica; elsewhere none."""
        sent = {FIRST: own} if rank in self._roots else {}
        roots = self._roots if rank == FIRST else []
        return self._inner.swap(sent, dict.fromkeys(roots, _like(own)), rank)

    def _from_first(self, sums: Tensors, own: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum of its group at each root; elsewhere `own`, a tensor of its shape."""
        sent = dict(zip(self._roots, sums, strict=True)) if rank == FIRST else {}
        likes = {FIRST: _like(own)} if rank in self._roots else {}
        got = self._inner.swap(sent, likes, rank)
        return got[0] if got else own

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        self._refuse()

    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        self._refuse()

    def gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        self._refuse()

    def broadcast(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CollectiveError(
            f"The engine {self.name!r} has no exchanges but sums among {self.groups}, "
            "which cross hosts."
        )


def _like(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)
