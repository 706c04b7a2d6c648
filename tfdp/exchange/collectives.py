"""TensorFlow's own collectives: NCCL on GPUs, its ring on CPUs.

One level: one all-reduce per buffer. Two levels, for a buffer of n bytes on g devices
per host: reduce-scatter within the host (each device then holds the host's sum of n/g
bytes), all-reduce of that part across hosts, all-gather within. So the slow link
carries n/g bytes per device instead of n.

The keys of an exchange are fixed while the graph is built, so that it can run inside
conditionals and loops. TensorFlow remembers the shape that a key was first used with,
so a tensor of unknown shape gets a group of its own and its size as the instance key.
With NCCL each group is a communicator, which takes memory of every GPU and is never
freed: there such a tensor is filled up to one of few sizes, which have keys within the
group that is there (`round_sizes`).
Each launch carries a resource of its device (the ordering token) so that conditionals
of two replicas are not chained, and is marked independent, so that several buffers are
in flight: a buffer waits for nothing but its own tensors.
Within one process NCCL launches are put in one order by TensorFlow's NcclManager.
Where TensorFlow takes the members of a group in another order than that of their ranks,
rows are brought into it before they are sent and out of it after (`collective_order`).

On CPUs TensorFlow has no reduce-scatter; an all-to-all and a local sum stand in for it,
with the same bytes on the wire. The NCCL path was not run on a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.errors import CollectiveError
from tfdp.exchange.engine import CallNumbers, Engine, next_group_key
from tfdp.exchange.packing import join_rows, split_row, to_rows
from tfdp.exchange.wire_types import collective_sum_dtype, to_gather_wire, to_sum_wire
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class _Group:
    """The ranks of one collective and the key that names them to TensorFlow.

    Args:
      size_number: of the round size that what is sent next was filled up to.
    """

    ranks: tuple[int, ...]
    key: int
    size_number: tf.Tensor | None = dataclasses.field(default=None, compare=False)

    def of_size(self, number: tf.Tensor | None) -> _Group:
        """The same group, for what was filled up to the round size of this number."""
        return dataclasses.replace(self, size_number=number)


class TensorFlowEngine(Engine):
    """Packed all-reduces by TensorFlow's collective ops, over one or two levels.

    Args:
      devices: one device per replica, in rank order.
      topology: one level is a flat all-reduce; two are reduce-scatter within the
        host, all-reduce across hosts, all-gather within.
      hint: the implementation asked of TensorFlow: "nccl", "ring" or "auto".

    Cost per replica and buffer of n bytes: one launch and 2 n (N - 1) / N bytes on
    one level; three launches, 2 n (g - 1) / g bytes within the host and
    2 (n / g) (H - 1) / H across on two (g devices on each of H hosts).
    """

    name = "tensorflow"
    packs = True

    def __init__(
        self,
        devices: Sequence[str],
        topology: Topology,
        *,
        hint: str,
    ):
        super().__init__(devices, topology)
        self._hint = hint
        self._over_nccl = hint == "nccl"
        self._has_reduce_scatter = self._over_nccl
        self._everyone = _Group(topology.all_ranks, next_group_key())
        self._within = [
            _Group(g, next_group_key()) for g in topology.within_host_groups
        ]
        self._across = [
            _Group(g, next_group_key()) for g in topology.across_host_groups
        ]
        # By group key. Instance keys: the n-th launch of a rank in a group meets the
        # n-th of its peers, or that of the same name.
        self._launches: dict[int, CallNumbers] = collections.defaultdict(
            lambda: CallNumbers(len(self.devices))
        )
        self._groups_by_launch: dict[tuple[int, int], int] = {}
        self._tokens = [names.make_token(device) for device in self.devices]
        # By group key: the member at each of TensorFlow's places.
        self._orders: dict[int, tuple[int, ...]] = {}

    def begin_run(self) -> None:
        super().begin_run()
        for numbers in self._launches.values():
            numbers.begin_run()

    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        self.next_call_number(rank, "sum", [tensor])
        wire, restore = to_sum_wire(tensor)
        with tf.device(self.devices[rank]):
            flat = self._to_sum(tf.reshape(wire, [-1]))
            elements, number = flat.shape.num_elements(), None
            if elements is None:
                flat, elements = self._of_one_size(flat, rank)
                flat, number = self._filled_up(flat)
            if self.topology.is_two_level:
                total = self._two_level_sum(flat, rank, number)
            else:
                total = self._sum(flat, self._everyone.of_size(number), rank)
            total = tf.cast(total[:elements], wire.dtype)
            result = tf.reshape(total, tf.shape(wire))
        result.set_shape(wire.shape)
        return restore(result)

    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        self.next_call_number(rank)
        wire, restore = to_gather_wire(tensor)
        with tf.device(self.devices[rank]):
            lengths = self._gather(tf.shape(wire)[:1], self._everyone, rank)
            # The collective wants equal lengths: pad to the longest, cut after.
            # An empty buffer crashes TensorFlow's ring, so send one row at least.
            longest = tf.maximum(tf.reduce_max(lengths), 1)
            missing = longest - tf.shape(wire)[0]
            paddings = [[0, missing]] + [[0, 0]] * (wire.shape.rank - 1)
            padded = tf.pad(wire, paddings)
            gathered = self._gather_rows(padded, rank)
            parts = [
                gathered[i * longest : i * longest + lengths[i]]
                for i in range(len(self.devices))
            ]
            result = tf.concat(parts, axis=0)
        result.set_shape(tf.TensorShape([None]).concatenate(wire.shape[1:]))
        return restore(result)

    def all_gather_equal(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        if tensor.shape.num_elements() is None:
            return super().all_gather_equal(tensor, rank)
        self.next_call_number(rank)
        whole = self._gather_same_type(tensor[None], self._everyone, rank)
        return tf.ensure_shape(whole, [self.replicas, *tensor.shape])

    def all_to_all(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        self.next_call_number(rank)
        # All rows but the own one.
        self._count_ring(rows, self._everyone, rank, rounds=1)
        with tf.device(self.devices[rank]):
            outgoing = rearranged(rows, self._order(self._everyone))
            result = tf.raw_ops.CollectiveAllToAllV2(
                **self._launch(outgoing, self._everyone, rank)
            )
            names.run_independently(result.op)
            result = rearranged(result, self._places(self._everyone))
        return tf.ensure_shape(result, rows.shape)

    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        # A sum in which only replica 0 brings anything: exact for every finite or
        # infinite value, and the all-reduce is the one op that every backend has.
        with tf.device(self.devices[rank]):
            mine = tensor if rank == 0 else tf.zeros_like(tensor)
        if tensor.dtype == tf.bool:
            return tf.cast(self.all_reduce(tf.cast(mine, tf.int32), rank), tf.bool)
        return self.all_reduce(mine, rank)

    def reduce_scatter_bucket(
        self,
        tensors: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        self.next_call_number(rank)
        with tf.device(self.devices[rank]):
            dtype = tensors[0].dtype
            rows = self._to_sum(tf.concat(to_rows(tensors, layouts), axis=1))
            if not self.topology.is_two_level:
                row = self._reduce_scatter(tf.reshape(rows, [-1]), self._everyone, rank)
                return split_row(tf.cast(row, dtype), layouts)
            # First the rows of each local place of all hosts, within the host; then
            # the hosts' rows among those.
            hosts, local = self.topology.hosts, self.topology.devices_per_host
            by_place = tf.transpose(
                tf.reshape(rows, [hosts, local, rows.shape[1]]), [1, 0, 2]
            )
            within = self._within[self.topology.host_of(rank)]
            across = self._across[self.topology.local_rank_of(rank)]
            part = self._reduce_scatter(tf.reshape(by_place, [-1]), within, rank)
            row = self._reduce_scatter(part, across, rank)
            return split_row(tf.cast(row, dtype), layouts)

    def all_gather_bucket(
        self,
        shards: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        self.next_call_number(rank)
        with tf.device(self.devices[rank]):
            row = tf.concat(shards, axis=0)
            if not self.topology.is_two_level:
                rows = self._gather_same_type(row[None], self._everyone, rank)
                return join_rows(rows, layouts)
            hosts, local = self.topology.hosts, self.topology.devices_per_host
            within = self._within[self.topology.host_of(rank)]
            across = self._across[self.topology.local_rank_of(rank)]
            of_place = self._gather_same_type(row[None], across, rank)
            by_place = self._gather_same_type(of_place[None], within, rank)
            rows = tf.transpose(by_place, [1, 0, 2])
            return join_rows(tf.reshape(rows, [hosts * local, -1]), layouts)

    def _to_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """`tensor` in a type that these collectives add; mostly its own."""
        dtype = collective_sum_dtype(
            tensor.dtype, self.devices[0], over_nccl=self._over_nccl
        )
        return tf.cast(tensor, dtype)

    def _of_one_size(self, flat: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
        """`flat`, and its size, which is that on all replicas.

        Those that come with another one would wait for others of their size for ever:
        they end in the error of a slice, and so do all.
        """
        own = tf.size(flat)
        sizes = self._gather(own[None], self._everyone, rank)
        least, most = tf.reduce_min(sizes), tf.reduce_max(sizes)
        with tf.name_scope("all_reduce_of_unlike_sizes"):
            wanted = tf.where(tf.equal(least, most), own, own + 1)
            # Not a reshape, which the graph optimizer would take out.
            return tf.slice(flat, [0], wanted[None]), own

    def _filled_up(self, flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """`flat`, whose size is unknown, as it is sent; the number of its round size.

        It may turn out empty, and an empty buffer crashes TensorFlow's ring: so there
        is one element at least.
        """
        if not self._over_nccl:
            return tf.pad(flat, [[0, 1]]), None
        number, size = round_size(tf.size(flat))
        return tf.pad(flat, [[0, size - tf.size(flat)]]), number

    def _gather_rows(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        """As `_gather` over all replicas, of rows whose number is unknown."""
        # By their size alone 3 rows of 2 are taken for 2 of 3, whose shape TensorFlow
        # then refuses, and rows of 0 are an empty buffer.
        if not self._over_nccl and rows.shape[1:].num_elements():
            return self._gather(rows, self._everyone, rank)
        flat, number = self._filled_up(tf.reshape(rows, [-1]))
        everyone = self._everyone.of_size(number)
        whole = self._gather(flat[None], everyone, rank)[:, : tf.size(rows)]
        count = self.replicas * tf.shape(rows)[:1]
        return tf.reshape(whole, tf.concat([count, tf.shape(rows)[1:]], axis=0))

    def _two_level_sum(
        self, flat: tf.Tensor, rank: int, number: tf.Tensor | None
    ) -> tf.Tensor:
        """Reduce-scatter within the host, all-reduce across, all-gather within."""
        # What is filled up for all devices of a host is alike where `flat` is.
        within = self._within[self.topology.host_of(rank)].of_size(number)
        across = self._across[self.topology.local_rank_of(rank)].of_size(number)
        # A Python number where it is known, so that the parts' shapes are too.
        elements = flat.shape.num_elements()
        if elements is None:
            elements = tf.size(flat)
        padding = -elements % self.topology.devices_per_host
        part = self._reduce_scatter(tf.pad(flat, [[0, padding]]), within, rank)
        part = self._sum(part, across, rank)
        return self._gather_same_type(part, within, rank)[:elements]

    def _sum(self, tensor: tf.Tensor, group: _Group, rank: int) -> tf.Tensor:
        # A reduce-scatter and an all-gather of the same chunks.
        self._count_ring(tensor, group, rank, rounds=2)
        with tf.device(self.devices[rank]):
            result = tf.raw_ops.CollectiveReduceV2(
                merge_op="Add", final_op="Id", **self._launch(tensor, group, rank)
            )
        names.run_independently(result.op)
        return result

    def _gather(self, tensor: tf.Tensor, group: _Group, rank: int) -> tf.Tensor:
        # Each replica's tensor goes round: everybody sends all of them but one.
        self.traffic.add(rank, tensor, times=len(group.ranks) - 1)
        with tf.device(self.devices[rank]):
            result = tf.raw_ops.CollectiveGatherV2(**self._launch(tensor, group, rank))
            names.run_independently(result.op)
            return rearranged(result, self._places(group))

    def _gather_same_type(
        self, tensor: tf.Tensor, group: _Group, rank: int
    ) -> tf.Tensor:
        """As `_gather`, for a type that sums but may not gather (bfloat16)."""
        wire, restore = to_gather_wire(tensor)
        return restore(self._gather(wire, group, rank))

    def _reduce_scatter(self, tensor: tf.Tensor, group: _Group, rank: int) -> tf.Tensor:
        """This rank's part of the group's sum; the length must divide evenly."""
        size = len(group.ranks)
        # By a ring or by an all-to-all: all chunks but the own one.
        self._count_ring(tensor, group, rank, rounds=1)
        with tf.device(self.devices[rank]):
            tensor = rearranged(tensor, self._order(group))
            if self._has_reduce_scatter:
                result = tf.raw_ops.CollectiveReduceScatterV2(
                    merge_op="Add", final_op="Id", **self._launch(tensor, group, rank)
                )
                names.run_independently(result.op)
                return result
            rows = tf.reshape(tensor, [size, -1])
            parts = tf.raw_ops.CollectiveAllToAllV2(**self._launch(rows, group, rank))
            names.run_independently(parts.op)
            return tf.reduce_sum(parts, axis=0)

    def _order(self, group: _Group) -> tuple[int, ...]:
        """The member of `group` at each of TensorFlow's places."""
        if group.key not in self._orders:
            self._orders[group.key] = learn_order(
                [self.devices[rank] for rank in group.ranks],
                [self._tokens[rank] for rank in group.ranks],
                group.key,
                self._hint,
            )
        return self._orders[group.key]

    def _places(self, group: _Group) -> tuple[int, ...]:
        """The place that each member of `group` has with TensorFlow."""
        order = self._order(group)
        return tuple(order.index(member) for member in range(len(order)))

    def _count_ring(
        self, tensor: tf.Tensor, group: _Group, rank: int, rounds: int
    ) -> None:
        place, parts = group.ranks.index(rank), len(group.ranks)
        self.traffic.add_ring(rank, tensor, place, parts, rounds)

    def _launch(self, tensor: tf.Tensor, group: _Group, rank: int) -> dict[str, object]:
        """The arguments that every collective op takes, with a fresh instance key."""
        number = self._launches[group.key].next(rank)
        # TensorFlow's is not negative; those that have a name are.
        launch = 2 * number if number >= 0 else -2 * number - 1
        group_key = group.key
        first_key = launch * KEYS_OF_LAUNCH
        instance_key: int | tf.Tensor = first_key + KNOWN_SIZE
        if group.size_number is not None:
            instance_key = first_key + group.size_number
        elif tensor.shape.num_elements() is None:
            group_key = self._groups_by_launch.setdefault(
                (group.key, launch), next_group_key()
            )
            instance_key = tf.size(tensor)
        return {
            "input": tensor,
            "group_size": len(group.ranks),
            "group_key": group_key,
            "instance_key": instance_key,
            "ordering_token": [self._tokens[rank].handle],
            "communication_hint": self._hint,
            # No deadline: TensorFlow keeps a sleeping thread for each launch until its
            # deadline has passed, hundreds of thousands in an hour. Replicas of one
            # process cannot lose each other; a failed one ends the whole step.
            "timeout_seconds": 0.0,
        }


# In which order TensorFlow takes the members of a group of collectives.
#
# Its gathers, reduce-scatters and all-to-alls go by a rank that it gives itself, and no
# op tells it: it sorts the members by the names of their devices, and then puts GPUs in
# a row along the links that they have between them (`CompleteDefaultRanking` and
# `OrderTaskDeviceMap` in collective_param_resolver_local.cc). So replica 0 need not be
# its first, neither where devices are given in another order nor where only some GPUs
# reach each other's memory.
#
# It is asked by a gather of the replicas' own numbers, whose order is what it shows.


# No launch of a step has it: they count up from 0, and no size has this place.
ASKING_KEY = 2**31 - 2


def learn_order(
    devices: Sequence[str],
    tokens: Sequence[tf.Variable],
    group_key: int,
    hint: str,
) -> tuple[int, ...]:
    """Which member stands at each of TensorFlow's places of a group.

    It runs at once, also while a graph is being traced.

    Args:
      devices: of the members, all of this process.
      tokens: see `names.make_token`; one for each member.
      group_key: the group's name to TensorFlow.
      hint: the implementation asked of TensorFlow.

    Returns:
      `order[place]`, an index into `devices`.

    Raises:
      CollectiveError: when the gather brings other numbers than were sent.
    """
    if len(devices) == 1:
        return (0,)

    def gathers() -> list[tf.Tensor]:
        results = []
        for member, device in enumerate(devices):
            with tf.device(device):
                # A type that lies in a GPU's own memory, which int32 does not.
                own = tf.fill([1], tf.constant(float(member)))
                result = tf.raw_ops.CollectiveGatherV2(
                    input=own,
                    group_size=len(devices),
                    group_key=group_key,
                    instance_key=ASKING_KEY,
                    ordering_token=[tokens[member].handle],
                    communication_hint=hint,
                    timeout_seconds=0.0,  # see TensorFlowEngine
                )
            results.append(result)
        return results

    with tf.init_scope(), tf.device(None):
        # As one graph, also where functions are told to run eagerly: there the first
        # member would wait for the second, which comes after it.
        told = tf.function(gathers, autograph=False).get_concrete_function()()
    orders = {tuple(int(number) for number in one.numpy()) for one in told}
    if len(orders) != 1 or sorted(*orders) != list(range(len(devices))):
        raise CollectiveError(
            f"TensorFlow's collectives gathered {sorted(orders)} where members 0 to "
            f"{len(devices) - 1} sent their numbers. Use Communication(engine="
            "'in_process')."
        )
    return orders.pop()


def rearranged(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """`rows` with row `order[i]` at place i; as they are where that changes nothing.

    Args:
      rows: the first dimension is a multiple of `len(order)`: so many rows are one.
      order: numbers each from 0 on once.
    """
    if tuple(order) == tuple(range(len(order))):
        return rows
    whole = tf.reshape(rows, [len(order), -1])
    moved = tf.gather(whole, np.asarray(order, np.int32))
    result = tf.reshape(moved, tf.shape(rows))
    result.set_shape(rows.shape)
    return result


# Few sizes for tensors of any size: what TensorFlow's collectives are told beforehand.
#
# TensorFlow remembers the shape that the key of a collective was first used with, and
# refuses another one. So a tensor whose size is known only while the step runs is
# filled up to the next round size, and each of these few sizes has a key.
#
# Round sizes are the numbers of three bits, times a power of two: 1, 2, .. 8, 10, 12,
# 14, 16, 20, .. They are at most 5/4 of what they hold.


# TensorFlow counts elements, and keys, in int32. The last one is not round.
MOST_ELEMENTS = 2**31 - 1
ROUND_SIZES = np.array(
    [
        1,
        2,
        3,
        *(quarters * 2**power for power in range(29) for quarters in (4, 5, 6, 7)),
        MOST_ELEMENTS,
    ],
    np.int32,
)
#: So many keys are one launch's: of its round sizes, by number, and one besides.
KEYS_OF_LAUNCH = 128
#: The place among them of a tensor whose size is known beforehand.
KNOWN_SIZE = KEYS_OF_LAUNCH - 1


def round_size(elements: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The least round size that holds so many elements.

    Args:
      elements: int32, from 0 on.

    Returns:
      Its number in `ROUND_SIZES` and the size, at least 1.
    """
    # Keys and shapes are read by the CPU, also those of what lies on a GPU.
    with tf.device("CPU:0"):
        number = tf.reduce_sum(tf.cast(ROUND_SIZES < elements, tf.int32))
        return number, tf.gather(ROUND_SIZES, number)
