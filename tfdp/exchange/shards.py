"""Tensors in shards: cut, padded, exchanged bucket by bucket, and joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import run_independently
from tfdp._private.step_ops import delay
from tfdp.exchange.packing import Tensors, whole_specs, wholes_from_parts
from tfdp.lint.registry import is_of_graph, register_exchanged
from tfdp.plan.mesh import MeshLayout
from tfdp.plan.shards import Layouts, OwnedLayout, ShardLayout, overlap
from tfdp.plan.topology import Groups

if TYPE_CHECKING:
    from tfdp.exchange.reducer import Reducer
    from tfdp.exchange.transport import Transport

Change: TypeAlias = Callable[[tf.Tensor, ShardLayout, Any], tf.Tensor]


class ShardReducer:
    """Sums gradients to shards, and joins shards, over the transport of a reducer.

    Every replica makes each call once, in replica context, while a graph is built.
    """

    def __init__(
        self,
        reducer: Reducer,
        among: Transport | None = None,
        copies: Transport | None = None,
    ):
        """`among`: of the replicas that share the parts, by default all; `copies`: of
        those that hold the same part, over which sums go on."""
        self._reducer, self._transport = reducer, among or reducer.transport
        self._copies = copies
        self._of_groups: dict[tuple[Groups, Groups], ShardReducer] = {}

    def of(self, layout: ShardLayout) -> ShardReducer:
        """The exchanges among the replicas that share the parts of `layout`."""
        groups, copies = layout.groups, layout.copies
        if groups is None or copies is None:
            return self
        key = groups, copies
        if key not in self._of_groups:
            among = self._reducer.transport.among
            others = among(copies) if len(copies[0]) > 1 else None
            made = ShardReducer(self._reducer, among(groups), others)
            self._of_groups[key] = made
        return self._of_groups[key]

    def part_of(self, rank: Any) -> int:
        """The part that a replica of this process holds."""
        return self._transport.part_of(rank)

    def reduce_scatter(
        self,
        gradients: Sequence[Any],
        layouts: Layouts,
        rank: Any,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient, bucket by bucket.

        With `in_turn` gradients wait until earlier buckets are summed, except for
        `Communication.bucket_bytes` of them, or little more: so few whole gradients are
        in memory, however far ahead one replica is. Hosts compare `label`.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of gradients.
        """
        whole, kind = with_static_shape(gradients, layouts), "reduce_scatter"
        return self._by_bucket(
            self._scatter, whole, layouts, rank, kind, in_turn, label
        )

    def all_gather(
        self, shards: Tensors, layouts: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors, in the order of `shards`, on every replica.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of tensors.
        """
        # Planned in reverse, because plans begin at the last tensor and the first
        # layers' weights are needed first.
        shards, layouts = shards[::-1], layouts[::-1]
        planned = _mean_shards(shards, layouts)
        return self._by_bucket(
            self._gather, shards, layouts, rank, "all_gather", planned=planned
        )[::-1]

    def join(self, shards: Tensors, layout: ShardLayout, label: str) -> tf.Tensor:
        """The whole tensor from this process's shards, in cross-replica context."""
        transport = self._transport
        if isinstance(layout, MeshLayout):
            shards = [shards[rank] for rank in transport.groups[0]]
        parts = [
            elements_of(shard, layout, transport.part_of(rank))
            for rank, shard in enumerate(shards)
        ]
        if transport.join is None:
            [whole] = wholes_from_parts([parts], [layout.flat])
            return whole_of(whole, layout) if isinstance(layout, MeshLayout) else whole
        joined: tf.Tensor = transport.join(parts, layout, label)
        return joined

    def _by_bucket(
        self,
        exchange: Callable[..., list[tf.Tensor]],
        tensors: Tensors,
        layouts: Sequence[Any],
        rank: Any,
        kind: str,
        in_turn: bool = False,
        label: str = "",
        planned: Sequence[tf.TensorSpec] | None = None,
    ) -> list[tf.Tensor]:
        """`planned`: tensors of the sizes by which buckets are planned; the default is
        those that travel, of equal sizes on all replicas."""
        results: dict[int, tf.Tensor] = {}
        buckets = self._reducer.plan(tensors if planned is None else planned)
        of = f" {label}" if label else ""
        waits_for = self._reducer.predecessors(buckets)
        for number, bucket in enumerate(buckets, start=1):
            earlier = waits_for[number - 1]
            if in_turn and earlier is not None:
                until = [results[i] for i in buckets[earlier].indices]
                for place in bucket.indices:
                    delay(tensors[place], until)
            with tf.name_scope(f"tfdp_{kind}"):
                exchanged = exchange(
                    [tensors[i] for i in bucket.indices],
                    [layouts[i] for i in bucket.indices],
                    rank,
                    f"{kind}{of} of bucket {number} of {len(buckets)}",
                )
            register_exchanged(exchanged)
            results.update(zip(bucket.indices, exchanged, strict=True))
        return [results[place] for place in range(len(tensors))]

    def _scatter(
        self, tensors: Tensors, layouts: Layouts, rank: Any, label: str
    ) -> list[tf.Tensor]:
        transport = self._transport
        if transport.pads_parts and is_mostly_padding(layouts):
            sums = transport.all_reduce(tensors, rank, label)
            return self._each(shard_of, sums, layouts, rank)
        tensors = self._change(flat_of, tensors, layouts, rank)
        flat = [layout.flat for layout in layouts]
        parts = transport.reduce_scatter(tensors, flat, rank, label)
        if self._copies is not None:
            parts = self._copies.all_reduce(parts, rank, label, self._copies.wire_dtype)
        if transport.pads_parts:
            return self._change(shaped, parts, layouts, rank)
        return self._each(to_shard, parts, layouts, rank)

    def _gather(
        self, shards: Tensors, layouts: Layouts, rank: Any, label: str
    ) -> list[tf.Tensor]:
        transport = self._transport
        if transport.pads_parts and is_mostly_padding(layouts):
            # Each element is on one replica: the sum with zeros.
            placed = self._each(among_zeros, shards, layouts, rank)
            return transport.all_reduce(placed, rank, label)
        if transport.pads_parts:
            shards = self._change(in_transit, shards, layouts, rank)
        else:
            shards = self._each(elements_of, shards, layouts, rank)
        flat = [layout.flat for layout in layouts]
        wholes = transport.all_gather(shards, flat, rank, label)
        return self._change(whole_of, wholes, layouts, rank)

    def _each(
        self, change: Change, tensors: Tensors, layouts: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """`change(tensor, layout, part)` for this replica's part of each tensor."""
        part = self._transport.part_of(rank)
        with tf.device(self._transport.devices[rank]):
            return [change(*one, part) for one in zip(tensors, layouts, strict=True)]

    def _change(
        self,
        change: Callable[[tf.Tensor, MeshLayout], tf.Tensor],
        tensors: Tensors,
        layouts: Layouts,
        rank: Any,
    ) -> list[tf.Tensor]:
        """`change(tensor, layout)` of each that a mesh cuts; others as they are."""
        changed = list(tensors)
        for place, layout in enumerate(layouts):
            if isinstance(layout, MeshLayout):
                with tf.device(self._transport.devices[rank]):
                    changed[place] = change(tensors[place], layout)
        return changed

    def reshard(
        self, shards: Tensors, before: Layouts, after: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """This replica's shards by the layouts `after`, from all shards by `before`.

        Cost: that of `all_gather`; in one process, only what another replica has of a
        shard is sent.
        """

        def exchange(
            shards: Tensors, pairs: Sequence[Any], rank: Any, label: str
        ) -> list[tf.Tensor]:
            old, new = zip(*pairs, strict=True)
            if self._transport.swap is None:
                wholes = self._gather(shards, old, rank, label)
                return self._each(shard_of, wholes, new, rank)
            of_each = zip(shards, old, new, strict=True)
            with tf.device(self._transport.devices[rank]):
                return [self._moved(*one, rank) for one in of_each]

        pairs = list(zip(before, after, strict=True))
        planned = _mean_shards(shards, before)
        return self._by_bucket(
            exchange, shards, pairs, rank, "reshard", planned=planned
        )

    def _moved(
        self, shard: tf.Tensor, old: ShardLayout, new: ShardLayout, rank: int
    ) -> tf.Tensor:
        """This replica's shard by the layout `new`: only what it lacks is sent."""
        part = self._transport.part_of(rank)
        own = elements_of(shard, old, part)
        start, _ = old.bounds(part)
        sent, likes = {}, {}
        for other in range(new.parts):
            low, high = overlap(old.bounds(part), new.bounds(other))
            if low < high:
                sent[other] = own[low - start : high - start]
            low, high = overlap(old.bounds(other), new.bounds(part))
            if low < high:
                likes[other] = tf.TensorSpec([high - low], shard.dtype)
        whole = whole_specs([shard], [old])
        pieces = self._transport.swap(sent, likes, rank, whole)
        joined = tf.concat(pieces, axis=0) if pieces else own[:0]
        return to_shard(joined, new, part)

    def sum_over(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum over the shards of each replica's small value, of equal shapes."""
        if self._transport.parts < self._transport.replicas:
            # The first host's on all: "the same arithmetic on all" in docs/house.md.
            sums = self._reducer.within_hosts.all_reduce([value], rank)
            [total] = self._transport.broadcast(sums, rank)
        else:
            [total] = self._transport.all_reduce([value], rank, "sum of shards")
        return register_exchanged(total)


def with_static_shape(gradients: Sequence[Any], layouts: Layouts) -> list[tf.Tensor]:
    """The gradients as dense tensors of static shapes, which tf.tensordot's lack."""
    return [
        tf.ensure_shape(tf.convert_to_tensor(gradient), layout.shape)
        for gradient, layout in zip(gradients, layouts, strict=True)
    ]


def _mean_shards(shards: Tensors, layouts: Layouts) -> list[tf.TensorSpec]:
    """A shard of the mean size of each tensor: the same on all replicas."""
    return [
        tf.TensorSpec([layout.shard_elements], shard.dtype)
        for shard, layout in zip(shards, layouts, strict=True)
    ]


def flat_of(whole: tf.Tensor, layout: MeshLayout) -> tf.Tensor:
    """The elements of `whole`, those of each part of a mesh in one piece."""
    shape, order = layout.blocks
    if order != tuple(range(len(order))):
        whole = tf.transpose(tf.reshape(whole, shape), order)
    return tf.reshape(whole, [-1])


def whole_of(flat: tf.Tensor, layout: MeshLayout) -> tf.Tensor:
    """The tensor whose `flat_of` is `flat`."""
    shape, order = layout.blocks
    if order != tuple(range(len(order))):
        places = [order.index(place) for place in range(len(order))]
        moved = tf.reshape(flat, [shape[place] for place in order])
        flat = tf.transpose(moved, places)
    return tf.reshape(flat, layout.shape)


def in_transit(block: tf.Tensor, layout: MeshLayout) -> tf.Tensor:
    """A block of a mesh as it travels: flat."""
    return tf.reshape(block, [-1])


def shaped(piece: tf.Tensor, layout: MeshLayout) -> tf.Tensor:
    """A block of a mesh from its elements: undoes `in_transit`."""
    return tf.reshape(piece, layout.shard_shape(0))


def to_shard(piece: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """Shard `part` from its elements: zeros appended, and in its shape."""
    shape = layout.shard_shape(part)
    missing = math.prod(shape) - layout.length(part)
    padded = tf.pad(piece, [[0, missing]]) if missing else piece
    return padded if len(shape) == 1 else tf.reshape(padded, shape)


def elements_of(shard: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The elements of shard `part`, flat and without padding: undoes `to_shard`."""
    flat = shard if shard.shape.rank == 1 else tf.reshape(shard, [-1])
    return flat[: layout.length(part)]


def among_zeros(shard: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The whole tensor with the elements of shard `part`, and zeros elsewhere."""
    start, stop = layout.bounds(part)
    own = elements_of(shard, layout, part)
    flat = tf.pad(own, [[start, layout.elements - stop]])
    return tf.reshape(flat, layout.shape)


def shard_of(whole: tf.Tensor, layout: ShardLayout, part: Any) -> tf.Tensor:
    """Shard `part` of `whole`, as it is stored; `part` is a tensor on a TPU."""
    if isinstance(layout, MeshLayout):
        return tf.slice(whole, layout.begin(part), layout.shard_shape(part))
    if not isinstance(part, int):
        size = layout.shard_elements
        missing = layout.parts * size - layout.elements
        flat = tf.pad(tf.reshape(whole, [-1]), [[0, missing]])
        return tf.ensure_shape(tf.slice(flat, [part * size], [size]), [size])
    piece = tf.reshape(whole, [-1])[slice(*layout.bounds(part))]
    return to_shard(piece, layout, part)


def copied_shard(whole: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """A copy of shard `part` of `whole`.

    An aligned piece is a view: a variable that takes it over and updates it in place
    would keep the memory of the whole tensor.
    """
    copied = tf.raw_ops.DeepCopy(x=shard_of(whole, layout, part))
    if is_of_graph(copied):
        # TensorFlow treats it as stateful: a replica that cuts a gathered tensor would
        # wait for another's copy, which waits for the gathering.
        run_independently(copied.op)
    return copied


# Shards of several tensors in one buffer. A row holds the shards of one replica: a
# reduce-scatter of the rows gives each replica its shards of all tensors.


def to_rows(tensors: Tensors, layouts: Layouts) -> list[tf.Tensor]:
    """Blocks of columns of the rows of all parts, `[parts, n]`, padded: one for each
    tensor in flat shards, and then one for all that have owners."""
    blocks, owned = [], _owned(layouts)
    for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        if place not in owned:
            missing = layout.parts * layout.shard_elements - layout.elements
            flat = tf.pad(tf.reshape(tensor, [-1]), [[0, missing]])
            blocks.append(tf.reshape(flat, [layout.parts, layout.shard_elements]))
    if owned:
        shards = [
            [shard_of(tensors[place], layouts[place], part) for place in owned]
            for part in range(layouts[0].parts)
        ]
        blocks.append(tf.stack([_owned_part(own, layouts) for own in shards]))
    return blocks


def row_of(shards: Tensors, layouts: Layouts) -> tf.Tensor:
    """The row of one replica, from its shards: the inverse of `split_row`."""
    owned = _owned(layouts)
    parts = [shard for place, shard in enumerate(shards) if place not in owned]
    if owned:
        parts.append(_owned_part([shards[place] for place in owned], layouts))
    return tf.concat(parts, axis=0)


def split_row(row: tf.Tensor, layouts: Layouts, part: int) -> list[tf.Tensor]:
    """The shards in the row of part `part`."""
    owned = _owned(layouts)
    blocks = tf.split(row, _widths(layouts))
    if not owned:
        return blocks
    shapes = [layouts[place].shard_shape(part) for place in owned]
    sizes = list(map(math.prod, shapes))
    pieces = tf.split(blocks.pop(), [*sizes, _longest(layouts) - sum(sizes)])
    found = {
        place: tf.reshape(piece, shape)
        for place, piece, shape in zip(owned, pieces[:-1], shapes, strict=True)
    }
    flat = iter(blocks)
    return [
        found[place] if place in found else next(flat) for place in range(len(layouts))
    ]


def join_rows(rows: tf.Tensor, layouts: Layouts) -> list[tf.Tensor]:
    """The whole tensors from the rows of all replicas, `[parts, row]`."""
    if _owned(layouts):
        shards = [
            split_row(row, layouts, part)
            for part, row in enumerate(tf.unstack(rows, layouts[0].parts))
        ]
        parts = [
            [elements_of(shard, layout, part) for part, shard in enumerate(own)]
            for own, layout in zip(zip(*shards, strict=True), layouts, strict=True)
        ]
        return wholes_from_parts(parts, layouts)
    columns = tf.split(rows, _widths(layouts), axis=1)
    return [
        tf.reshape(tf.reshape(column, [-1])[: layout.elements], layout.shape)
        for column, layout in zip(columns, layouts, strict=True)
    ]


def is_mostly_padding(layouts: Layouts) -> bool:
    """Whether an all-reduce sends less than the rows, which are as long as the longest.

    2 n (N - 1) / N bytes for n bytes of tensors, and n' (N - 1) for rows of n' bytes.
    """
    elements = sum(layout.elements for layout in layouts)
    row = sum(_widths(layouts))
    return bool(_owned(layouts)) and layouts[0].parts * row > 2 * elements


def _owned(layouts: Layouts) -> list[int]:
    return [i for i, layout in enumerate(layouts) if isinstance(layout, OwnedLayout)]


def _longest(layouts: Layouts) -> int:
    """The most elements of tensors with owners that one part has."""
    owned = [layouts[place] for place in _owned(layouts)]
    return max(
        sum(layout.length(part) for layout in owned) for part in range(owned[0].parts)
    )


def _widths(layouts: Layouts) -> list[int]:
    """The columns of each block."""
    owned = _owned(layouts)
    flat = [each.shard_elements for i, each in enumerate(layouts) if i not in owned]
    return [*flat, _longest(layouts)] if owned else flat


def _owned_part(shards: Tensors, layouts: Layouts) -> tf.Tensor:
    """One part's shards of the tensors with owners: flat, padded to the longest."""
    flat = tf.concat([tf.reshape(shard, [-1]) for shard in shards], axis=0)
    return tf.pad(flat, [[0, _longest(layouts) - flat.shape[0]]])
