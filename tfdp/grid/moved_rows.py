"""Rows on the move within a group of replicas that share the parts of a weight.

Each exchange has another as its gradient, which moves as many bytes back. So gradients
of gradients, of any order, are exchanges too:

    gather         own rows -> rows of all           gradient: sums of rows, to owners
    to_features    own rows -> all rows' own features           gradient: to_rows
    sum_to_owners  all rows -> sums of own rows                 gradient: gather
    to_rows        all rows' own features -> own rows           gradient: to_features

Dummy rows stay at home: they enter no exchange, and leave it as zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.exchange.ordering import exchanges_of
from tfdp.exchange.send_receive import sum_in_order
from tfdp.exchange.transport import Transport
from tfdp.lint.registry import register
from tfdp.lint.values import OF_ALL
from tfdp.tracing.gradient_exchanges import name_of_gradient
from tfdp.tracing.step import Trace


@dataclasses.dataclass(frozen=True)
class RowsOfGroup:
    """The rows of all members of a group, as one member computes on them.

    Args:
      tensor: the rows, in the order of the members.
      sizes: how many each member has, int32 [members].
      own: the member's tensor that was gathered, with its dummy row if it has one.
    """

    tensor: tf.Tensor
    sizes: tf.Tensor
    own: tf.Tensor


class _Gathered(dict[Any, RowsOfGroup]):
    """The rows that a replica has gathered, by the id of its own: `own` lives on."""


class RowMover:
    """Moves rows between the members of one replica's group, in replica context."""

    def __init__(self, transport: Transport, trace: Trace):
        """`transport`: of the groups, with a `swap`; `trace`: that of the replica."""
        self.trace, self._rows, self._rank = trace, trace.rows, trace.rank
        self._transport = transport
        self.members = len(transport.groups.of(trace.rank))
        #: The replica's place in its group: the number of its part.
        self.place = transport.part_of(trace.rank)

    def gather(self, own: tf.Tensor) -> RowsOfGroup:
        """The rows of all members; of one tensor in one exchange, however often."""
        gathered = self.trace.of(_Gathered)
        key = id(own), self._transport.groups
        if key not in gathered:
            gathered[key] = self._gather(own)
        return gathered[key]

    def _gather(self, own: tf.Tensor) -> RowsOfGroup:
        whole, sizes = self._to_all(self._rows.real_rows(own))
        whole.set_shape([None, *own.shape[1:]])
        register([whole, sizes], OF_ALL)
        return RowsOfGroup(whole, sizes, own)

    def to_features(self, own: tf.Tensor, axis: int) -> RowsOfGroup:
        """All members' rows, of which `axis` has this member's part only."""
        whole, sizes = self._to_all(self._rows.real_rows(own), axis)
        shape = [None, *own.shape[1:]]
        shape[axis] = own.shape[axis] // self.members
        whole.set_shape(shape)
        register([whole, sizes], OF_ALL)
        return RowsOfGroup(whole, sizes, own)

    def sum_to_owners(self, partial: tf.Tensor, rows: RowsOfGroup) -> tf.Tensor:
        """The sums over the members, each row at its owner."""
        return self._at_home(self._to_owners(partial, rows.sizes), rows.own)

    def to_rows(self, part: tf.Tensor, rows: RowsOfGroup, axis: int) -> tf.Tensor:
        """Own rows, with the parts of all members along `axis`."""
        return self._at_home(self._to_owners(part, rows.sizes, axis), rows.own)

    def _to_all(
        self, real: tf.Tensor, axis: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """All members' rows, of `axis` the own part, and how many each member has."""
        name = name_of_gradient()

        @tf.custom_gradient
        def exchange(real: tf.Tensor) -> Any:
            if axis is None:
                pieces = self._swap([real] * self.members)
            else:
                pieces = self._swap(tf.split(real, self.members, axis=axis))
            sizes = tf.stack([tf.shape(piece)[0] for piece in pieces])

            def gradient(upstream: tf.Tensor, _: Any = None) -> tf.Tensor:
                with exchanges_of(name):
                    return self._to_owners(upstream, sizes, axis)

            return (self._joined(pieces), sizes), gradient

        whole, sizes = exchange(real)
        return whole, tf.ensure_shape(sizes, [self.members])

    def _to_owners(
        self, tensor: tf.Tensor, sizes: tf.Tensor, axis: int | None = None
    ) -> tf.Tensor:
        """Own rows of all members' tensors: their sums, or joined along `axis`."""
        name = name_of_gradient()

        @tf.custom_gradient
        def exchange(tensor: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with exchanges_of(name):
                    return self._to_all(upstream, axis)[0]

            pieces = self._swap(self._split(tensor, sizes))
            own = sum_in_order(pieces) if axis is None else self._joined(pieces, axis)
            return own, gradient

        return exchange(tensor)

    def _split(self, tensor: tf.Tensor, sizes: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(self._device):
            return tf.split(tensor, sizes, num=self.members)

    def _joined(self, pieces: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
        with tf.device(self._device):
            return tf.concat(pieces, axis)

    def _swap(self, outgoing: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends a tensor to each member; what they sent, in their order."""
        like = tf.TensorSpec([None, *outgoing[self.place].shape[1:]], outgoing[0].dtype)
        sent = dict(enumerate(outgoing))
        likes = dict.fromkeys(range(self.members), like)
        return self._transport.swap(sent, likes, self._rank)

    @property
    def _device(self) -> str:
        return self._transport.devices[self._rank]

    def _at_home(self, rows: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """Own rows again, or zeros for dummy rows: as many as `own` has."""
        if self._rows.present is not True:
            missing = tf.shape(own)[0] * (1 - tf.cast(self._rows.present, tf.int32))
            shape = tf.concat([missing[None], tf.shape(rows)[1:]], 0)
            rows = tf.concat([rows, tf.zeros(shape, rows.dtype)], 0)
        rows = tf.ensure_shape(rows, [own.shape[0], *rows.shape[1:]])
        register(rows, own)  # positions, for one, are the same on all replicas
        return rows
