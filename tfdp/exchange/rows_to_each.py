"""Sends rows, of any number, from each replica of several hosts to each other one.

The first replica of a host collects what its replicas send to other hosts, exchanges it
with the first ones of these, and hands out what came.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp.exchange.in_process import InProcess, Sent
from tfdp.exchange.over_link import OverLink

FIRST = 0


class RowsToEach:
    """See `Transport.to_each`.

    Cost per host: on two hosts as many rows cross as the host with more of them sends,
    and 4 bytes for each pair of replicas; `HostLink.all_to_all` has those of more.
    """

    def __init__(self, inner: InProcess, outer: OverLink):
        self._inner, self._outer = inner, outer
        self._replicas, self._hosts = inner.replicas, outer.replicas
        self._begin = outer.part_of(FIRST) * inner.replicas

    def __call__(self, outgoing: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        here = range(self._begin, self._begin + self._replicas)
        within = self._inner.to_each([outgoing[place] for place in here], rank)
        with tf.device(self._inner.devices[rank]):
            away = [
                rows[:0] if place in here else rows
                for place, rows in enumerate(outgoing)
            ]
            sizes = tf.stack([tf.shape(rows)[0] for rows in away])
            senders = range(self._replicas if rank == FIRST else 0)
            joined = tf.concat(away, 0)
            of_each = self._swap({FIRST: sizes}, senders, rank, sizes)
            rows_of_each = self._swap({FIRST: joined}, senders, rank, joined)
            sent: tuple[Sent, Sent] = ({}, {})
            if rank == FIRST:
                sent = self._across(of_each, rows_of_each)
            [numbers] = self._swap(sent[0], [FIRST], rank, sizes)
            [rows] = self._swap(sent[1], [FIRST], rank, outgoing[0])
            received = tf.split(rows, numbers, num=len(outgoing))
        received[self._begin : self._begin + self._replicas] = within
        return received

    def _across(
        self, sizes: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]
    ) -> tuple[Sent, Sent]:
        """The numbers of rows from each replica for each of this host, and the rows."""
        hosts, own = range(self._hosts), range(self._replicas)
        pieces = [
            tf.split(of_one, numbers, num=self._hosts * self._replicas)
            for of_one, numbers in zip(rows, sizes, strict=True)
        ]
        # By receiving host, sender, and receiver.
        ordered = [pieces[s][h * len(own) + r] for h in hosts for s in own for r in own]
        shape = [len(own), len(hosts), len(own)]
        numbers = tf.transpose(tf.reshape(tf.stack(sizes), shape), [1, 0, 2])
        numbers, joined = self._outer.rows_to_each(numbers, tf.concat(ordered, 0))
        flat = tf.split(joined, tf.reshape(numbers, [-1]), num=len(ordered))
        return (
            {r: tf.reshape(numbers[:, :, r], [-1]) for r in own},
            {r: tf.concat(flat[r :: len(own)], 0) for r in own},
        )

    def _swap(
        self, sent: Sent, senders: Sequence[int], rank: int, like: tf.Tensor
    ) -> list[tf.Tensor]:
        spec = tf.TensorSpec([None, *like.shape[1:]], like.dtype)
        return self._inner.swap(sent, dict.fromkeys(senders, spec), rank)
