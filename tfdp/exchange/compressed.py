"""The sums of gradients that are sent in fewer bytes. Read `CompressedSums.sums`.

One flag, how many replicas have numbers that are not finite, goes with the gradients
that are sent as they are. Where it is not 0 every replica gets sums that are not
finite, as without compression, and keeps what it kept: a loss scaler leaves this step
out, and what was sent in it is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.compression.method import Exchanged, Method, Slots
from tfdp.exchange.peers import PeerGroup
from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication

#: In the names of ops that compress, for who reads a graph.
COMPRESSED_SUM = "tfdp_compressed_sum"
# A message that is long enough for any network. Until the first is made small nothing
# travels, and when the last has come it is still to be made large and added.
MESSAGE_BYTES = 2 << 20
#: Of the conditional that hands on the sums where all numbers are finite.
WHERE_FINITE = "tfdp_where_finite"


class Kept(NamedTuple):
    """What is kept of one variable from step to step, by a replica that speaks.

    Args:
      residual: what is left to be sent, float32; None without error feedback.
      slots: the method's own.
    """

    residual: tf.Tensor | None
    slots: Slots


class CompressedSums:
    """Sums lists of gradients over a group, bucket by bucket, by one method.

    Args:
      method: what makes gradients small.
      group: who exchanges.
      devices: of this process's replicas.
      communication: the bucket sizes.
    """

    def __init__(
        self,
        method: Method,
        group: PeerGroup,
        devices: Sequence[str],
        communication: Communication,
    ):
        self.method = method
        self.group = group
        self.devices = tuple(devices)
        self._communication = communication

    def sums(
        self,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Kept],
        step: tf.Tensor,
        rank: int,
        count_bad: Callable[[tf.Tensor], tf.Tensor],
        is_plain: tf.Tensor | None = None,
    ) -> tuple[list[tf.Tensor], list[Kept]]:
        """The sums of gradients over all replicas, and what is kept then.

        Args:
          gradients: floats of known shapes, alike on all replicas.
          kept: of each, where the replica speaks; else nothing.
          step: how many exchanges there were, int64.
          rank: the calling replica.
          count_bad: the sum over all replicas of a number that each has.
          is_plain: whether all are sent as they are; None: the method says.
        """
        if is_plain is None and self.method.plain_steps:
            is_plain = step < self.method.plain_steps
        if is_plain is None:
            sums, after, mine = self._bucket_by_bucket(gradients, kept, step, rank)
        else:
            sums, after, mine = self._later(gradients, kept, step, rank, is_plain)
        # Last, for the flag waits for all of them. What is alike on all need not be
        # looked at by all: who speaks has done so.
        is_good = tf.equal(count_bad(mine), 0.0)

        def good() -> tuple[list[tf.Tensor], list[Kept]]:
            return list(sums), list(after)

        def bad() -> tuple[list[tf.Tensor], list[Kept]]:
            # Not a number, whatever the method made of what was none.
            return [tf.fill(total.shape, float("nan")) for total in sums], list(kept)

        # A conditional hands on what it is given, where `tf.where` makes a copy.
        with tf.name_scope(WHERE_FINITE):
            results, left = tf.cond(is_good, good, bad)
        return [
            tf.cast(total, gradient.dtype)
            for total, gradient in zip(results, gradients, strict=True)
        ], left

    def _later(
        self,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Kept],
        step: tf.Tensor,
        rank: int,
        is_plain: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
        """As `_bucket_by_bucket`, but sent as they are in the first steps.

        Cost: a conditional begins when all gradients are there: nothing is sent while
        others are still computed.
        """

        def plain() -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
            values = [tf.cast(gradient, tf.float32) for gradient in gradients]
            values = self.group.collect(values, rank)
            mine = tf.constant(0.0)
            if self.group.speaks(rank):
                values = self.group.of(rank, "gradients before compression").sum(values)
                mine = _is_bad(values)
            return self.group.hand_out(values, rank), list(kept), mine

        def small() -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
            return self._bucket_by_bucket(gradients, kept, step, rank)

        sums, after, mine = tf.cond(is_plain, plain, small)
        return sums, after, mine

    def _bucket_by_bucket(
        self,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Kept],
        step: tf.Tensor,
        rank: int,
    ) -> tuple[list[tf.Tensor], list[Kept], tf.Tensor]:
        """The sums, what is kept, and how many buckets were not all finite here."""
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
                # One bucket after the other, so that the first is on its way while the
                # next is added up and made small.
                with tf.control_dependencies([begun]):
                    mine = [tf.identity(gradients[place]) for place in bucket.indices]
                values = self.group.collect(
                    [tf.cast(g, tf.float32) for g in mine], rank
                )
                if self.group.speaks(rank):
                    before = [kept[place] for place in bucket.indices]
                    values, after, is_bad, begun = self._exchanged(
                        values, before, step, rank, label, begun
                    )
                    left.update(zip(bucket.indices, after, strict=True))
                    bad.append(is_bad)
                totals = self.group.hand_out(values, rank)
            sums.update(zip(bucket.indices, totals, strict=True))
        in_order = range(len(gradients))
        after = [left[i] for i in in_order if left]
        return [sums[i] for i in in_order], after, sum(bad, tf.constant(0.0))

    def _bucket_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """The most bytes of gradients whose message is still long enough."""
        all_bytes = 4 * sum(math.prod(shape) for shape in shapes)
        sent = max(self.method.message_bytes(shapes), 1)
        enough = math.ceil(MESSAGE_BYTES * all_bytes / sent)
        return min(self._communication.bucket_bytes, max(enough, 1))

    def _exchanged(
        self,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Kept],
        step: tf.Tensor,
        rank: int,
        label: str,
        begun: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[Kept], tf.Tensor, tf.Tensor]:
        """The sums, what is kept, 1 when a number in all this is not finite, and what
        is there when the next exchange may begin; `begun` is that of the one before."""
        values, slots = self.method.values(gradients, [k.slots for k in kept])
        # What waits for something that is not its input TensorFlow's optimizer leaves
        # alone. Else it makes one sum of this and of that over the replicas, in a
        # variable that it fills with zeros first: three passes over memory for one.
        with tf.control_dependencies([begun]):
            values = [
                value if k.residual is None else tf.add(value, k.residual)
                for value, k in zip(values, kept, strict=True)
            ]
        if self.group.size == 1:
            # Nobody to send to: what more replicas had left is used at once.
            exchanged = Exchanged(values, [tf.zeros_like(v) for v in values], slots)
        else:
            peers = self.group.of(rank, label)
            exchanged = self.method.exchange(values, slots, peers, step)
        after = [
            Kept(None if before.residual is None else left, slots)
            for before, left, slots in zip(
                kept, exchanged.left, exchanged.slots, strict=True
            )
        ]
        # Values of a replica, or sums over its host with what was left: they are not
        # finite where a gradient of the host is not, and perhaps where all are.
        numbers = exchanged.telling
        if numbers is None:
            left = [number for each in after for number in _parts_of(each)]
            numbers = [*exchanged.sums, *values, *left]
        begun = step if exchanged.begun is None else exchanged.begun
        return list(exchanged.sums), after, _is_bad(numbers), begun


def are_finite(values: Sequence[Any]) -> tf.Tensor:
    """Whether every number is, of tensors and slices; None and whole numbers are."""
    numbers = [
        value.values if isinstance(value, tf.IndexedSlices) else value
        for value in values
        if value is not None
    ]
    finite = [
        tf.reduce_all(tf.math.is_finite(number))
        for number in numbers
        if number.dtype.is_floating
    ]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def _is_bad(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """1 when a number is not finite, else 0."""
    return tf.where(are_finite(values), 0.0, 1.0)


def _parts_of(kept: Kept) -> list[tf.Tensor]:
    left = [] if kept.residual is None else [kept.residual]
    return [*left, *kept.slots.values()]
