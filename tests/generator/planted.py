"""Faults to plant into tfdp, which the generator must find, and delays."""

import functools
import os
import random
import time

import tensorflow as tf


def equal_shares():
    """Every replica's loss counts alike, however many rows it has."""
    from tfdp.tracing.step import Step

    Step.share_of = lambda run, rank: tf.constant(1.0 / run.replicas)


def a_replica_dropped():
    """The sum leaves the last replica of three or more out."""
    from tfdp.exchange import send_receive

    whole = send_receive.sum_in_order
    send_receive.sum_in_order = lambda parts: whole(parts[:2])


def not_a_number():
    """The sums are not numbers where a weight is large."""
    from tfdp.exchange import send_receive

    whole = send_receive.sum_in_order

    def broken(parts):
        total = whole(parts)
        if not total.dtype.is_floating:
            return total
        return tf.where(tf.abs(total) > 0.05, tf.cast(float("nan"), total.dtype), total)

    send_receive.sum_in_order = broken


def a_host_twice():
    """What this host brings to sums over hosts counts twice."""
    from tfdp.hosts.socket_link import SocketLink

    whole = SocketLink.sum

    def twice(self, arrays, *arguments, **options):
        return whole(self, [a + a for a in arrays], *arguments, **options)

    SocketLink.sum = twice


def an_end():
    """The process ends by itself while a program runs."""
    from tests.generator import compare

    compare.run_replicas = lambda *arguments: os.abort()


def a_wait():
    """The program waits for ever."""
    from tests.generator import compare

    compare.run_replicas = lambda *arguments: time.sleep(10**6)


def a_slow_count():
    """What hosts ask each other first comes late, and so must all else."""
    from tfdp.hosts.socket_link import SocketLink

    whole = SocketLink.sum

    def late(self, arrays, label, *arguments, **options):
        if label == "number of samples":
            time.sleep(0.3)
        return whole(self, arrays, label, *arguments, **options)

    SocketLink.sum = late


def waits():
    """A fifth of the exchanges over the link begin up to 50 ms late on this host."""
    from tfdp.hosts.socket_link import SocketLink

    draw = random.Random(os.getpid())

    def late(whole):
        @functools.wraps(whole)
        def call(self, *arguments, **options):
            if draw.random() < 0.2:
                time.sleep(0.05 * draw.random())
            return whole(self, *arguments, **options)

        return call

    for name in ("sum", "all_gather", "reduce_scatter", "all_to_all", "gather"):
        setattr(SocketLink, name, late(getattr(SocketLink, name)))


FAULTS = {
    fault.__name__: fault
    for fault in (
        equal_shares,
        a_replica_dropped,
        not_a_number,
        a_host_twice,
        an_end,
        a_wait,
    )
}
DELAYS = {delay.__name__: delay for delay in (a_slow_count, waits)}


def plant(name):
    """Begins with a fault of `FAULTS`, or a delay; None: with none."""
    if name is not None:
        (FAULTS | DELAYS)[name]()
