"""Sums of compressed gradients. Read `CompressedSums.exchange`.

One flag, the number of replicas with non-finite numbers, travels with the gradients
that are not compressed. Where it is not 0 every replica gets non-finite sums, as
without compression, and keeps its state: a loss scaler skips this step, and what was
sent in it is lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.compression.method import Exchanged, Method, Slots
from tfdp.exchange.op_names import COMPRESSED_SUM, WHERE_FINITE
from tfdp.exchange.packing import Tensors
from tfdp.exchange.sparse import values_of
from tfdp.exchange.transport import Transport
from tfdp.lint.registry import register_exchanged
from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication

# Long enough for any network. Longer messages delay the first send, which waits until
# its message is encoded, and lengthen the decoding and adding of the last.
MESSAGE_BYTES = 2 << 20


class Kept(NamedTuple):
    """One variable's state between steps on a peer: the unsent residual, float32 (None
    without error feedback), and the method's slots.
    """

    residual: tf.Tensor | None
    slots: Slots


class CompressedSums:
    """Sums lists of gradients, bucket by bucket, by one method.

    The replicas of each group of `within` add up at its first one, which is a peer of
    those of other groups; None: every replica is a peer. Peers exchange over `among`.
    """

    def __init__(
        self,
        method: Method,
        among: Transport,
        within: Transport | None,
        communication: Communication,
    ):
        self.method = method
        self.peers = among.replicas
        self.devices = (within or among).devices
        self._among, self._within = among, within
        self._communication = communication

    def is_peer(self, rank: int) -> bool:
        """Whether the replica sends compressed gradients to others."""
        return self._within is None or self._within.part_of(rank) == 0

    def exchange(
        self,
        gradients: Tensors,
        kept: Sequence[Kept],
        step: tf.Tensor,
        rank: int,
        is_plain: tf.Tensor | None = None,
    ) -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
        """The sums of gradients over all replicas, the state afterwards, and a number
        above 0 where something was not finite here; `chosen` takes what it gives.

        Args:
          gradients: floats of static shapes, the same on all replicas.
          kept: the state of each, where the replica exchanges; else empty.
          step: the number of earlier exchanges, int64.
          is_plain: whether to send all uncompressed; None: the method decides. A
            conditional starts when all gradients exist: nothing is sent while others
            are still computed.
        """

        def small() -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
            return self._bucket_by_bucket(gradients, kept, step, rank)

        def plain() -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
            values = self._at_peer(gradients, rank)
            mine = tf.constant(0.0)
            if self.is_peer(rank):
                label = "gradients before compression"
                values = self._among.all_reduce(values, rank, label)
                mine = _is_bad(values)
            return self._from_peer(values, rank), list(kept), mine

        if is_plain is None and self.method.plain_steps:
            is_plain = step < self.method.plain_steps
        if is_plain is None:
            return small()
        sums, after, mine = tf.cond(is_plain, plain, small)
        return sums, after, mine

    def chosen(
        self,
        is_good: tf.Tensor,
        gradients: Tensors,
        sums: Tensors,
        kept: Sequence[Kept],
        after: Sequence[Kept],
    ) -> tuple[list[tf.Tensor], list[Kept]]:
        """The sums, in the types of `gradients`, and the new state `after`; NaN and the
        old state `kept` unless everything is finite on all replicas (`is_good`)."""

        def good() -> tuple[list[tf.Tensor], list[Kept]]:
            return list(sums), list(after)

        def bad() -> tuple[list[tf.Tensor], list[Kept]]:
            # NaN, whatever the method made of non-finite numbers.
            return [tf.fill(total.shape, float("nan")) for total in sums], list(kept)

        # A conditional forwards its inputs, where `tf.where` makes a copy.
        with tf.name_scope(WHERE_FINITE):
            results, left = tf.cond(is_good, good, bad)
        return [
            tf.cast(total, gradient.dtype)
            for total, gradient in zip(results, gradients, strict=True)
        ], left

    def _bucket_by_bucket(
        self, gradients: Tensors, kept: Sequence[Kept], step: tf.Tensor, rank: int
    ) -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
        """The sums, the state, and how many buckets were not all finite here."""
        infos = [
            TensorInfo(4 * gradient.shape.num_elements(), "float32")
            for gradient in gradients
        ]
        shapes = [gradient.shape.as_list() for gradient in gradients]
        buckets = plan_buckets(
            infos,
            bucket_bytes=self._bucket_bytes(shapes),
            first_bucket_bytes=self._communication.first_bucket_bytes,
        )
        sums: dict[int, tf.Tensor] = {}
        left: dict[int, Kept] = {}
        bad = []
        begun = step
        for number, bucket in enumerate(buckets, start=1):
            with tf.name_scope(COMPRESSED_SUM):
                label = f"compressed bucket {number} of {len(buckets)}"
                # One bucket after the other, so that the first is in flight while the
                # next is added up and encoded.
                with tf.control_dependencies([begun]):
                    mine = [tf.identity(gradients[place]) for place in bucket.indices]
                values = self._at_peer(mine, rank)
                if self.is_peer(rank):
                    before = [kept[place] for place in bucket.indices]
                    values, after, is_bad, begun = self._exchanged(
                        values, before, step, rank, label, begun
                    )
                    left.update(zip(bucket.indices, after, strict=True))
                    bad.append(is_bad)
                totals = self._from_peer(values, rank)
            sums.update(zip(bucket.indices, register_exchanged(totals), strict=True))
        in_order = range(len(gradients))
        after = [left[i] for i in in_order if left]
        return [sums[i] for i in in_order], after, sum(bad, tf.constant(0.0))

    def _at_peer(self, gradients: Tensors, rank: int) -> list[tf.Tensor]:
        """The float32 sums over a peer's group, at the peer."""
        values = [tf.cast(gradient, tf.float32) for gradient in gradients]
        return values if self._within is None else self._within.reduce(values, rank)

    def _from_peer(self, values: Tensors, rank: int) -> list[tf.Tensor]:
        """The peer's tensors on its group; others pass tensors of equal shapes."""
        within = self._within
        return list(values) if within is None else within.broadcast(values, rank)

    def _bucket_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """The bucket size whose compressed message has `MESSAGE_BYTES`."""
        all_bytes = 4 * sum(math.prod(shape) for shape in shapes)
        sent = max(self.method.message_bytes(shapes), 1)
        enough = math.ceil(MESSAGE_BYTES * all_bytes / sent)
        return min(self._communication.bucket_bytes, max(enough, 1))

    def _exchanged(
        self,
        gradients: Tensors,
        kept: Sequence[Kept],
        step: tf.Tensor,
        rank: int,
        label: str,
        begun: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[Kept], tf.Tensor, tf.Tensor]:
        """The sums, the state, 1 when a number is not finite, and a tensor that exists
        once the next exchange may begin; `begun` is that of the exchange before."""
        values, slots = self.method.values(gradients, [k.slots for k in kept])
        # TensorFlow's optimizer leaves ops with control inputs alone. It would merge
        # this sum with the one over the replicas, into a variable that it fills with
        # zeros first: three passes over memory instead of one.
        with tf.control_dependencies([begun]):
            values = [
                value if k.residual is None else tf.add(value, k.residual)
                for value, k in zip(values, kept, strict=True)
            ]
        if self.peers == 1:
            # No peer to send to: use at once what more replicas had left.
            exchanged = Exchanged(values, [tf.zeros_like(v) for v in values], slots)
        else:
            peer = _Peer(self._among, rank, label)
            exchanged = self.method.exchange(values, slots, peer, step)
        after = [
            Kept(None if before.residual is None else left, slots)
            for before, left, slots in zip(
                kept, exchanged.left, exchanged.slots, strict=True
            )
        ]
        # Values of a replica, or sums over its host with the residual: they are not
        # finite where a gradient of the host is not, and perhaps when all are.
        numbers = exchanged.telling
        if numbers is None:
            left = [n for each in after for n in (each.residual, *each.slots.values())]
            numbers = [*exchanged.sums, *values, *left]
        begun = step if exchanged.begun is None else exchanged.begun
        return list(exchanged.sums), after, _is_bad(numbers), begun


@dataclasses.dataclass(frozen=True)
class _Peer:
    """The `tfdp.compression.method.Peers` of one peer and exchange."""

    transport: Transport
    rank: int
    label: str

    @property
    def size(self) -> int:
        return self.transport.replicas

    @property
    def place(self) -> int:
        return self.transport.part_of(self.rank)

    def sum(self, tensors: Tensors) -> list[tf.Tensor]:
        return self.transport.all_reduce(tensors, self.rank, self.label)

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        return self.gather_ahead(words)[0]

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.transport.start(words, self.rank, self.label)

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        return self.transport.all_to_all(rows, self.rank, self.label)


def are_finite(values: Sequence[Any]) -> tf.Tensor:
    """Whether all numbers of tensors and slices are finite; None and integers are."""
    numbers = [values_of(value) for value in values if value is not None]
    finite = [
        tf.reduce_all(tf.math.is_finite(number))
        for number in numbers
        if number.dtype.is_floating
    ]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def _is_bad(values: Tensors) -> tf.Tensor:
    return tf.where(are_finite(values), 0.0, 1.0)
