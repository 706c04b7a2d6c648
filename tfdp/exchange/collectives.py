"""TensorFlow's own collectives: NCCL on GPUs, its ring on CPUs.

One level: one all-reduce per buffer. Two levels, for a buffer of n bytes on g devices
per host: reduce-scatter within the host, all-reduce of each device's n/g bytes across
hosts, all-gather within. So the slow link carries n/g bytes per device instead of n.

Keys are fixed while the graph is built, so exchanges can run in conditionals and loops.
TensorFlow caches the shape of a key's first use, so a tensor of unknown shape gets its
own group, with its size as the instance key. With NCCL each group is a communicator,
which takes GPU memory and is never freed: there such a tensor is padded to one of few
sizes (`ROUND_SIZES`), each with its own key in the existing group.

Each launch uses its device's ordering token, so that TensorFlow does not chain
conditionals of two replicas, and is marked independent: a buffer waits only for its own
tensors. NcclManager orders the NCCL launches of a process. The NCCL path was not run on
a GPU. CPUs have no reduce-scatter: an all-to-all and a local sum send the same bytes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.errors import CollectiveError
from tfdp.exchange.ordering import CallNumbers, run_independently
from tfdp.exchange.packing import Tensors, pack, unpack
from tfdp.exchange.shards import join_rows, row_of, split_row, to_rows
from tfdp.exchange.transport import Transport, next_group_key
from tfdp.exchange.wire_types import collective_sum_dtype, to_gather_wire, to_sum_wire
from tfdp.plan.shards import Layouts
from tfdp.plan.topology import Groups, Topology


@dataclasses.dataclass(frozen=True)
class _RankGroup:
    """Ranks of one collective, its key, and the number of the round size, if padded."""

    ranks: tuple[int, ...]
    key: int
    size_number: tf.Tensor | None = dataclasses.field(default=None, compare=False)

    def of_size(self, number: tf.Tensor | None) -> _RankGroup:
        return dataclasses.replace(self, size_number=number)


class Collectives(Transport):
    """Packed all-reduces by TensorFlow's collective ops, over one or two levels.

    TensorFlow uses the implementation `hint`: "nccl", "ring" or "auto".

    Cost per replica and buffer of n bytes: one launch and 2 n (N - 1) / N bytes on
    one level; three launches, 2 n (g - 1) / g bytes within the host and
    2 (n / g) (H - 1) / H across on two (g devices on each of H hosts).
    """

    name = "tensorflow"
    keeps_to_groups = pads_parts = True

    def __init__(self, devices: Sequence[str], topology: Topology, *, hint: str):
        super().__init__(devices, topology)
        self.hint = hint
        self._over_nccl = hint == "nccl"
        self._has_reduce_scatter = self._over_nccl
        self._rank_groups: dict[tuple[int, ...], _RankGroup] = {}
        # By group key. The n-th launch of a rank in a group pairs with the n-th of its
        # peers, or with the one of the same name.
        self._launches: dict[int, CallNumbers] = collections.defaultdict(
            lambda: CallNumbers(len(self.devices))
        )
        self._groups_by_launch: dict[tuple[int, int], int] = {}
        self._tokens = [names.make_token(device) for device in self.devices]
        # By group key: the member at each of TensorFlow's ranks.
        self._orders: dict[int, tuple[int, ...]] = {}

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        for numbers in self._launches.values():
            numbers.begin_run()
        with super().run():
            yield

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        if len(tensors) == 1:
            return [self._all_reduce(tensors[0], rank)]
        return unpack(self._all_reduce(pack(tensors), rank), tensors)

    def _all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        group = self._begin(rank, "sum", [tensor])
        wire, restore = to_sum_wire(tensor)
        with tf.device(self.devices[rank]):
            flat = self._to_sum(tf.reshape(wire, [-1]))
            elements, number = flat.shape.num_elements(), None
            if elements is None:
                flat, elements = self._of_one_size(flat, rank)
                flat, number = self._padded(flat)
            if self._has_levels:
                total = self._two_level_sum(flat, rank, number)
            else:
                total = self._sum(flat, group.of_size(number), rank)
            total = tf.cast(total[:elements], wire.dtype)
            result = tf.reshape(total, tf.shape(wire))
        result.set_shape(wire.shape)
        return restore(result)

    def gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        group = self._begin(rank)
        wire, restore = to_gather_wire(tensor)
        with tf.device(self.devices[rank]):
            lengths = self._gather(tf.shape(wire)[:1], group, rank)
            # The collective needs equal lengths, and an empty buffer crashes
            # TensorFlow's ring: pad to the longest, at least one row.
            longest = tf.maximum(tf.reduce_max(lengths), 1)
            missing = longest - tf.shape(wire)[0]
            paddings = [[0, missing]] + [[0, 0]] * (wire.shape.rank - 1)
            padded = tf.pad(wire, paddings)
            gathered = self._gather_rows(padded, rank)
            parts = [
                gathered[i * longest : i * longest + lengths[i]]
                for i in range(len(group.ranks))
            ]
            result = tf.concat(parts, axis=0)
        result.set_shape(tf.TensorShape([None]).concatenate(wire.shape[1:]))
        return restore(result)

    def start(
        self, tensor: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if tensor.shape.num_elements() is None:
            return super().start(tensor, rank, label)
        group = self._begin(rank)
        whole = self._gather_same_type(tensor[None], group, rank)
        return tf.ensure_shape(whole, [len(group.ranks), *tensor.shape]), tensor

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        group = self._begin(rank)
        # All rows except its own.
        self._count_ring(rows, group, rank, rounds=1)
        with tf.device(self.devices[rank]):
            outgoing = rearranged(rows, self._order(group))
            result = tf.raw_ops.CollectiveAllToAllV2(
                **self._launch(outgoing, group, rank)
            )
            run_independently(result.op)
            result = rearranged(result, self._places(group))
        return tf.ensure_shape(result, rows.shape)

    def broadcast(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        return [self._broadcast(tensor, rank) for tensor in tensors]

    def _broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        # A sum with zeros on all other replicas: exact for every finite or infinite
        # value, and the all-reduce is the one op that every backend has.
        with tf.device(self.devices[rank]):
            mine = tf.zeros_like(tensor) if self.part_of(rank) else tensor
        if tensor.dtype == tf.bool:
            return tf.cast(self._all_reduce(tf.cast(mine, tf.int32), rank), tf.bool)
        return self._all_reduce(mine, rank)

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        group, part = self._begin(rank), self.part_of(rank)
        with tf.device(self.devices[rank]):
            dtype = tensors[0].dtype
            rows = self._to_sum(tf.concat(to_rows(tensors, layouts), axis=1))
            if not self._has_levels:
                row = self._reduce_scatter(tf.reshape(rows, [-1]), group, rank)
                return split_row(tf.cast(row, dtype), layouts, part)
            # First each host sums the rows of each local rank on all hosts; then the
            # hosts scatter those.
            hosts, local = self.topology.hosts, self.topology.devices_per_host
            by_place = tf.transpose(
                tf.reshape(rows, [hosts, local, rows.shape[1]]), [1, 0, 2]
            )
            within, across = self._levels(rank)
            of_place = self._reduce_scatter(tf.reshape(by_place, [-1]), within, rank)
            row = self._reduce_scatter(of_place, across, rank)
            return split_row(tf.cast(row, dtype), layouts, part)

    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        group = self._begin(rank)
        with tf.device(self.devices[rank]):
            row = row_of(parts, layouts)
            if not self._has_levels:
                rows = self._gather_same_type(row[None], group, rank)
                return join_rows(rows, layouts)
            hosts, local = self.topology.hosts, self.topology.devices_per_host
            within, across = self._levels(rank)
            of_place = self._gather_same_type(row[None], across, rank)
            by_place = self._gather_same_type(of_place[None], within, rank)
            rows = tf.transpose(by_place, [1, 0, 2])
            return join_rows(tf.reshape(rows, [hosts * local, -1]), layouts)

    def _begin(self, rank: int, what: str = "", tensors: Tensors = ()) -> _RankGroup:
        """The group of an exchange that the replica begins to build."""
        group = self._group(rank)
        self.order.next(rank, what, tensors, group.ranks)
        return group

    def _group(self, rank: int, groups: Groups | None = None) -> _RankGroup:
        """The replica's group among `groups`; None: among those of this transport."""
        ranks = (groups or self.groups).of(rank)
        if ranks not in self._rank_groups:
            self._rank_groups[ranks] = _RankGroup(ranks, next_group_key())
        return self._rank_groups[ranks]

    @property
    def _has_levels(self) -> bool:
        """Whether replicas of a host exchange first, and then those across hosts."""
        return self.topology.is_two_level and self.groups == self.topology.everyone

    def _levels(self, rank: int) -> tuple[_RankGroup, _RankGroup]:
        """The group within the host, and that across hosts."""
        topology = self.topology
        return (
            self._group(rank, topology.within_hosts),
            self._group(rank, topology.across_hosts),
        )

    def _to_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        dtype = collective_sum_dtype(
            tensor.dtype, self.devices[0], over_nccl=self._over_nccl
        )
        return tf.cast(tensor, dtype)

    def _of_one_size(self, flat: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
        """`flat` and its size, checked to be the same on all replicas.

        Replicas of different sizes would wait for each other forever: all of them fail
        with the error of a slice instead.
        """
        own = tf.size(flat)
        sizes = self._gather(own[None], self._group(rank), rank)
        least, most = tf.reduce_min(sizes), tf.reduce_max(sizes)
        with tf.name_scope("all_reduce_of_unlike_sizes"):
            wanted = tf.where(tf.equal(least, most), own, own + 1)
            # Not a reshape, which the graph optimizer would remove.
            return tf.slice(flat, [0], wanted[None]), own

    def _padded(self, flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """`flat`, of unknown size, padded for sending; the number of its round size.

        An empty buffer crashes TensorFlow's ring: send one element at least.
        """
        if not self._over_nccl:
            return tf.pad(flat, [[0, 1]]), None
        number, size = round_size(tf.size(flat))
        return tf.pad(flat, [[0, size - tf.size(flat)]]), number

    def _gather_rows(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        """`_gather` of an unknown number of rows."""
        group = self._group(rank)
        # The size alone would take 3 rows of 2 for 2 rows of 3, which TensorFlow then
        # refuses, and rows of 0 are an empty buffer.
        if not self._over_nccl and rows.shape[1:].num_elements():
            return self._gather(rows, group, rank)
        flat, number = self._padded(tf.reshape(rows, [-1]))
        whole = self._gather(flat[None], group.of_size(number), rank)
        whole = whole[:, : tf.size(rows)]
        count = len(group.ranks) * tf.shape(rows)[:1]
        return tf.reshape(whole, tf.concat([count, tf.shape(rows)[1:]], axis=0))

    def _two_level_sum(
        self, flat: tf.Tensor, rank: int, number: tf.Tensor | None
    ) -> tf.Tensor:
        """Reduce-scatter within the host, all-reduce across, all-gather within."""
        within, across = (each.of_size(number) for each in self._levels(rank))
        # A Python number where possible, so that the parts have static shapes.
        elements = flat.shape.num_elements()
        if elements is None:
            elements = tf.size(flat)
        padding = -elements % self.topology.devices_per_host
        part = self._reduce_scatter(tf.pad(flat, [[0, padding]]), within, rank)
        part = self._sum(part, across, rank)
        return self._gather_same_type(part, within, rank)[:elements]

    def _sum(self, tensor: tf.Tensor, group: _RankGroup, rank: int) -> tf.Tensor:
        # A reduce-scatter and an all-gather of the same chunks.
        self._count_ring(tensor, group, rank, rounds=2)
        with tf.device(self.devices[rank]):
            result = tf.raw_ops.CollectiveReduceV2(
                merge_op="Add", final_op="Id", **self._launch(tensor, group, rank)
            )
        run_independently(result.op)
        return result

    def _gather(self, tensor: tf.Tensor, group: _RankGroup, rank: int) -> tf.Tensor:
        # Each replica's tensor goes round: every replica sends all of them except one.
        self.traffic.add(rank, tensor, times=len(group.ranks) - 1)
        with tf.device(self.devices[rank]):
            result = tf.raw_ops.CollectiveGatherV2(**self._launch(tensor, group, rank))
            run_independently(result.op)
            return rearranged(result, self._places(group))

    def _gather_same_type(
        self, tensor: tf.Tensor, group: _RankGroup, rank: int
    ) -> tf.Tensor:
        """`_gather` for a type that sums but may not gather (bfloat16)."""
        wire, restore = to_gather_wire(tensor)
        return restore(self._gather(wire, group, rank))

    def _reduce_scatter(
        self, tensor: tf.Tensor, group: _RankGroup, rank: int
    ) -> tf.Tensor:
        """This rank's part of the group's sum; the length must divide evenly."""
        size = len(group.ranks)
        # By a ring or by an all-to-all: all chunks except its own.
        self._count_ring(tensor, group, rank, rounds=1)
        with tf.device(self.devices[rank]):
            tensor = rearranged(tensor, self._order(group))
            if self._has_reduce_scatter:
                result = tf.raw_ops.CollectiveReduceScatterV2(
                    merge_op="Add", final_op="Id", **self._launch(tensor, group, rank)
                )
                run_independently(result.op)
                return result
            rows = tf.reshape(tensor, [size, -1])
            parts = tf.raw_ops.CollectiveAllToAllV2(**self._launch(rows, group, rank))
            run_independently(parts.op)
            return tf.reduce_sum(parts, axis=0)

    def _order(self, group: _RankGroup) -> tuple[int, ...]:
        """The member of `group` at each of TensorFlow's ranks."""
        if group.key not in self._orders:
            self._orders[group.key] = learn_order(
                [self.devices[rank] for rank in group.ranks],
                [self._tokens[rank] for rank in group.ranks],
                group.key,
                self.hint,
            )
        return self._orders[group.key]

    def _places(self, group: _RankGroup) -> tuple[int, ...]:
        """TensorFlow's rank of each member of `group`."""
        order = self._order(group)
        return tuple(order.index(member) for member in range(len(order)))

    def _count_ring(
        self, tensor: tf.Tensor, group: _RankGroup, rank: int, rounds: int
    ) -> None:
        place, parts = group.ranks.index(rank), len(group.ranks)
        self.traffic.add_ring(rank, tensor, place, parts, rounds)

    def _launch(
        self, tensor: tf.Tensor, group: _RankGroup, rank: int
    ) -> dict[str, object]:
        """The arguments of every collective op, with a fresh instance key."""
        number = self._launches[group.key].next(rank)
        # TensorFlow's keys are not negative; the numbers of named exchanges are.
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
            "communication_hint": self.hint,
            # No deadline: TensorFlow keeps a sleeping thread for each launch until its
            # deadline, hundreds of thousands per hour. Replicas of one process cannot
            # lose each other; a failed one ends the whole step.
            "timeout_seconds": 0.0,
        }


# Gathers, reduce-scatters and all-to-alls use a rank that TensorFlow assigns and no op
# returns: it sorts members by device name, then orders GPUs along the links between
# them (`CompleteDefaultRanking` and `OrderTaskDeviceMap` in
# collective_param_resolver_local.cc). So replica 0 need not be first. A gather of the
# replicas' own numbers shows the order.

# No launch of a step uses this key: they count up from 0, and no size has this place.
ORDER_KEY = 2**31 - 2


def learn_order(
    devices: Sequence[str], tokens: Sequence[tf.Variable], group_key: int, hint: str
) -> tuple[int, ...]:
    """The member at each of TensorFlow's ranks; runs at once, also while tracing.

    Args:
      devices, tokens: of the members, all in this process; see `names.make_token`.
      group_key, hint: as in a launch.

    Returns: `order[rank]`, an index into `devices`.
    """
    if len(devices) == 1:
        return (0,)

    def gathers() -> list[tf.Tensor]:
        results = []
        for member, device in enumerate(devices):
            with tf.device(device):
                # A type stored in a GPU's own memory, unlike int32.
                own = tf.fill([1], tf.constant(float(member)))
                result = tf.raw_ops.CollectiveGatherV2(
                    input=own,
                    group_size=len(devices),
                    group_key=group_key,
                    instance_key=ORDER_KEY,
                    ordering_token=[tokens[member].handle],
                    communication_hint=hint,
                    timeout_seconds=0.0,  # see Collectives
                )
            results.append(result)
        return results

    with tf.init_scope(), tf.device(None):
        # As one graph even under `run_functions_eagerly`: there the first member would
        # wait for the second, which comes later.
        gathered = tf.function(gathers, autograph=False).get_concrete_function()()
    orders = {tuple(int(number) for number in one.numpy()) for one in gathered}
    if len(orders) != 1 or sorted(*orders) != list(range(len(devices))):
        raise CollectiveError(
            f"TensorFlow's collectives gathered {sorted(orders)} where members 0 to "
            f"{len(devices) - 1} sent their numbers. Use Communication(engine="
            "'in_process')."
        )
    return orders.pop()


def rearranged(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """`rows` with block `order[i]` of `len(order)` equal blocks at place i."""
    if tuple(order) == tuple(range(len(order))):
        return rows
    whole = tf.reshape(rows, [len(order), -1])
    moved = tf.gather(whole, np.asarray(order, np.int32))
    result = tf.reshape(moved, tf.shape(rows))
    result.set_shape(rows.shape)
    return result


# The sizes to which tensors of unknown size are padded: numbers of three bits times a
# power of two: 1, 2, .. 8, 10, 12, 14, 16, 20, ..; at most 5/4 of what they hold.
# TensorFlow counts elements, and keys, in int32. The last one is not round.
MOST_ELEMENTS = 2**31 - 1
_LARGER_SIZES = [quarters << power for power in range(29) for quarters in (4, 5, 6, 7)]
ROUND_SIZES = np.array([1, 2, 3, *_LARGER_SIZES, MOST_ELEMENTS], np.int32)
#: Keys per launch: one for each round size, by number, and one more.
KEYS_OF_LAUNCH = 128
#: The key among them of a tensor of static size.
KNOWN_SIZE = KEYS_OF_LAUNCH - 1


def round_size(elements: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The number and value of the least of `ROUND_SIZES` that holds `elements`."""
    # The CPU reads keys and shapes, also those of tensors on a GPU.
    with tf.device("CPU:0"):
        number = tf.reduce_sum(tf.cast(ROUND_SIZES < elements, tf.int32))
        return number, tf.gather(ROUND_SIZES, number)
