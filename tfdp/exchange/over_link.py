"""Hosts exchange arrays over a link: the outer level of a training on several hosts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.exchange.link_calls import LinkCalls
from tfdp.exchange.packing import PackedSmall, Tensors, whole_specs
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.transport import Transport
from tfdp.exchange.wire_types import fitting_wire_dtype
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.rows_to_each import rows_to_each
from tfdp.plan.shards import Layouts
from tfdp.plan.topology import Topology


class OverLink(Transport):
    """Moves tensors between hosts: the first replica of each calls it, as rank 0.

    Each call is a Python callback, one after the other in the order of the trace, which
    is the same on every host.

    Cost per host: 2 n (H - 1) / H bytes on the wire to add n bytes on H hosts, half of
    that to scatter the sums or to gather shards. Adjacent small tensors of a bucket
    travel as one (`PackedSmall`).
    """

    def __init__(self, device: str, link: HostLink, wire_dtype: str | None = None):
        super().__init__([device], Topology(link.workers, 1))
        self.link = link
        self.name = link.name
        self.wire_dtype = wire_dtype
        self.replicas = link.workers
        self._calls = LinkCalls()

    def part_of(self, rank: int) -> int:
        return self.link.rank

    @property
    def bytes_between_hosts(self) -> int | None:
        return self.link.sent_bytes()

    @property
    def seconds_between_hosts(self) -> float | None:
        return self.link.exchange_seconds("step")

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        yield
        self._calls.end_run()

    def close(self) -> None:
        """Waits for exchanges in flight; call before the link is closed."""
        self._calls.close()

    def call(
        self, exchange: Callable[..., list], tensors: Tensors, like: Any
    ) -> list[tf.Tensor]:
        """`exchange` of the arrays, in calls of one order on all hosts.

        The results have the shapes and types of `like`.
        """
        with tf.device(self.devices[0]):
            return self._calls.call(exchange, tensors, _specs_of(like))

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        fitting = fitting_wire_dtype(tensors, wire_dtype)
        with tf.device(self.devices[0]):
            small = PackedSmall(tensors)
            shapes = small.shapes

            def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
                return self.link.sum(arrays, label, wire_dtype=fitting, packed=shapes)

            return small.unpack(self.call(exchange, small.packed, small.packed))

    def combine(self, tensors: Tensors, rank: int, how: RowSum) -> list[tf.Tensor]:
        like = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tensors]
        return self.call(how.between_hosts(tensors, self.link), tensors, like)

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        """This host's range of the sum of each tensor over all hosts."""
        ranges, own = self._ranges(layouts), self.link.rank
        fitting = fitting_wire_dtype(tensors, self.wire_dtype)
        with tf.device(self.devices[0]):
            flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
            like = [
                tf.TensorSpec([layout.length(own)], tensor.dtype)
                for tensor, layout in zip(tensors, layouts, strict=True)
            ]
            return self.call(
                lambda *arrays: self.link.reduce_scatter(
                    arrays, ranges, label, fitting
                ),
                flat,
                like,
            )

    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        """The whole tensors, from each host's range; also in cross-replica context."""
        ranges, channel = self._ranges(layouts), self._calls.channel

        def gather(*arrays: np.ndarray) -> list[np.ndarray]:
            wholes = self.link.all_gather(arrays, ranges, label, channel)
            return [
                whole.reshape(layout.shape)
                for whole, layout in zip(wholes, layouts, strict=True)
            ]

        return self.call(gather, list(parts), whole_specs(parts, layouts))

    def gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """The rows of all hosts; also in cross-replica context."""
        channel, hosts = self._calls.channel, self.link.workers
        with tf.device(self.devices[0]):
            (blobs,) = self.call(
                lambda mine: [self.link.gather(mine, "rows", channel)],
                [tf.io.serialize_tensor(tensor)],
                [tf.TensorSpec([hosts], tf.string)],
            )
            parts = [
                tf.io.parse_tensor(blobs[host], tensor.dtype) for host in range(hosts)
            ]
            gathered = tf.concat(parts, axis=0)
        gathered.set_shape([None, *tensor.shape[1:]])
        return gathered

    def start(
        self, tensor: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Transport`: several exchanges are in flight, each in its own channel."""
        hosts = self.link.workers

        def gather(channel: str, mine: np.ndarray) -> list[np.ndarray]:
            size = mine.size
            ranges = [(place * size, (place + 1) * size) for place in range(hosts)]
            piece = mine.reshape(-1)
            (whole,) = self.link.all_gather([piece], [ranges], label, channel)
            return [whole.reshape(hosts, *mine.shape)]

        like = [tf.TensorSpec([hosts, *tensor.shape], tensor.dtype)]
        with tf.device(self.devices[0]):
            (whole,), begun = self._calls.call_ahead(
                gather, [tensor], like, self.link.step_channels
            )
        return whole, begun

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        return self.call(
            lambda mine: [self.link.all_to_all(mine, label)], [rows], [rows]
        )[0]

    def rows_to_each(
        self, rows: tf.Tensor, numbers: tf.Tensor, label: str
    ) -> tf.Tensor:
        """Sends rows to each host, as many as `numbers` [hosts, hosts] says; those that
        came."""
        like = tf.TensorSpec([None, *rows.shape[1:]], rows.dtype)
        exchange = functools.partial(rows_to_each, self.link, label)
        return self.call(exchange, [rows, numbers], [like])[0]

    def broadcast(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        return list(map(self._broadcast, tensors))

    def _broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        def first(mine: Any) -> list[bytes]:
            sent = mine if self.link.rank == 0 else b""
            return [self.link.gather(sent, "broadcast", "step")[0]]

        # Serialized: every bit pattern and all types survive.
        with tf.device(self.devices[0]):
            blob = tf.io.serialize_tensor(tensor)
            (value,) = self.call(first, [blob], [tf.TensorSpec([], tf.string)])
            result = tf.io.parse_tensor(value, tensor.dtype)
            # Not `set_shape`, which would not check what another host sent.
            return tf.ensure_shape(result, tensor.shape)

    def _ranges(self, layouts: Layouts) -> list[list[tuple[int, int]]]:
        """The begin and end of each host's part, by tensor."""
        return [list(map(each.bounds, range(each.parts))) for each in layouts]


def _specs_of(like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(each.shape, each.dtype) for each in like]
