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

    Cost per host: on two hosts as many rows cross as the host with more of them sends,
    and 4 bytes for each pair of replicas; `HostLink.all_to_all` has those of more.
    """

    def __init__(self, inner: InProcess, outer: OverLink):
        self._inner, self._outer = inner, outer
        self._replicas, self._hosts = inner.replicas, outer.replicas

    def __call__(
        self, rows: tf.Tensor, sizes: tf.Tensor, rank: int, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        senders = range(self._replicas if rank == FIRST else 0)
        with tf.device(self._inner.devices[rank]):
            of_each = self._swap({FIRST: sizes}, senders, rank, sizes)
            rows_of_each = self._swap({FIRST: rows}, senders, rank, rows)
            handed: tuple[Sent, Sent] = ({}, {})
            if rank == FIRST:
                handed = self._across(rows_of_each, tf.stack(of_each), label)
            [came] = self._swap(handed[0], [FIRST], rank, rows)
            [numbers] = self._swap(handed[1], [FIRST], rank, sizes)
            return came, tf.ensure_shape(numbers, sizes.shape)

    def _across(
        self, rows: Sequence[tf.Tensor], sizes: tf.Tensor, label: str
    ) -> tuple[Sent, Sent]:
        """The rows for each replica of this host, and how many are from each."""
        hosts, own = self._hosts, self._replicas
        # By receiving host, sender, and receiver.
        numbers = tf.transpose(tf.reshape(sizes, [own, hosts, own]), [1, 0, 2])
        counts = tf.reshape(sizes, [-1])
        joined = _ordered(tf.concat(rows, 0), counts, [own, hosts, own], [1, 0, 2])
        joined, numbers = self._outer.rows_to_each(joined, numbers, label)
        # By receiver, and sender on all hosts.
        by_receiver = tf.reshape(tf.transpose(numbers, [2, 0, 1]), [own, hosts * own])
        counts = tf.reshape(numbers, [-1])
        joined = _ordered(joined, counts, [hosts, own, own], [2, 0, 1])
        parts = tf.split(joined, tf.reduce_sum(by_receiver, 1), num=own)
        return dict(enumerate(parts)), dict(enumerate(tf.unstack(by_receiver, own)))

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
    runs = tf.split(rows, counts, num=places.size)
    return tf.concat([runs[place] for place in places.ravel()], 0)
