"""Sends rows, of any number, from each replica of several hosts to each other one.

The first replica of a host collects what its replicas send, exchanges with the first
ones of other hosts, and hands out what came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.exchange.in_process import InProcess, Sent
from tfdp.exchange.over_link import OverLink

FIRST = 0


class RowsToEach:
    """The `to_each` of a `Transport` over hosts.

    Cost per host: on two hosts as many rows cross as the host with more of them sends;
    `HostLink.all_to_all` has those of more.
    """

    def __init__(self, inner: InProcess, outer: OverLink):
        self._inner, self._outer = inner, outer
        self._replicas, self._hosts = inner.replicas, outer.replicas

    def __call__(
        self, rows: tf.Tensor, numbers: tf.Tensor, rank: int, label: str
    ) -> tf.Tensor:
        senders = range(self._replicas if rank == FIRST else 0)
        with tf.device(self._inner.devices[rank]):
            rows_of_each = self._swap({FIRST: rows}, senders, rank, rows)
            handed: Sent = {}
            if rank == FIRST:
                handed = self._across(rows_of_each, numbers, label)
            return self._swap(handed, [FIRST], rank, rows)[0]

    def _across(
        self, rows: Sequence[tf.Tensor], numbers: tf.Tensor, label: str
    ) -> Sent:
        """The rows for each replica of this host."""
        hosts, own = self._hosts, self._replicas
        first = own * self._outer.part_of(FIRST)
        # By receiving host, sender, and receiver.
        counts = tf.reshape(numbers[first : first + own], [-1])
        joined = _ordered(tf.concat(rows, 0), counts, [own, hosts, own], [1, 0, 2])
        of_hosts = tf.reduce_sum(tf.reshape(numbers, [hosts, own, hosts, own]), [1, 3])
        joined = self._outer.rows_to_each(joined, of_hosts, label)
        # By receiver, and sender on all hosts.
        received = numbers[:, first : first + own]
        counts = tf.reshape(received, [-1])
        joined = _ordered(joined, counts, [hosts, own, own], [2, 0, 1])
        parts = tf.split(joined, tf.reduce_sum(received, 0), num=own)
        return dict(enumerate(parts))

    def _swap(
        self, sent: Sent, senders: Sequence[int], rank: int, like: tf.Tensor
    ) -> list[tf.Tensor]:
        spec = tf.TensorSpec([None, *like.shape[1:]], like.dtype)
        return self._inner.swap(sent, dict.fromkeys(senders, spec), rank)


def _ordered(
    rows: tf.Tensor, counts: tf.Tensor, shape: Sequence[int], order: Sequence[int]
) -> tf.Tensor:
    """The rows of which runs, as long as `counts`, have places in an array of `shape`,
    in the order of the places of the array's transpose."""
    places = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    if np.array_equal(places.ravel(), range(places.size)):
        return rows
    runs = tf.split(rows, counts, num=places.size)
    return tf.concat([runs[place] for place in places.ravel()], 0)
