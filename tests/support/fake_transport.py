"""A transport without devices: threads are the replicas, and NumPy adds."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

# Far more than adding takes: only a replica that does not come reaches it.
LONGEST_WAIT_SECONDS = 60


class FakeTransport:
    """Adds the arrays of the replicas in the order of their ranks.

    `exchanges` has, for each call of the first replica, its name and the number of
    gradients and of riders.
    """

    def __init__(self, replicas):
        self.replicas, self.exchanges, self.options = replicas, [], []
        self._given = [None] * replicas
        self._barrier = threading.Barrier(replicas, timeout=LONGEST_WAIT_SECONDS)

    def gathered(self, values, rank):
        """The lists of all replicas, on each of them."""
        self._given[rank] = [np.asarray(value) for value in values]
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()  # nobody overwrites what another one still reads
        return given

    def added(self, values, rank):
        columns = zip(*self.gathered(values, rank), strict=True)
        return [tf.constant(sum(column[1:], column[0])) for column in columns]

    def sum_gradients(self, gradients, riders, rank, *, sum_rows, at_once):
        if rank == 0:
            self.exchanges.append(("sum", len(gradients), len(riders)))
            self.options.append({"sum_rows": sum_rows, "at_once": at_once})
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        sums = self.added([*dense, *riders], rank)
        return sums[: len(gradients)], sums[len(gradients) :]

    def all_reduce(self, values, rank, *, mean):
        if rank == 0:
            self.exchanges.append(("all_reduce", len(values), 0))
        sums = self.added(values, rank)
        return [total / self.replicas for total in sums] if mean else sums

    def on_replicas(self, replica):
        """`replica(rank)` of all ranks at once; the results by rank."""
        with ThreadPoolExecutor(self.replicas) as threads:
            running = [threads.submit(replica, rank) for rank in range(self.replicas)]
            return [one.result() for one in running]


class FakeWire:
    """What peers of a compression use of a transport, on a `FakeTransport`."""

    def __init__(self, transport):
        self._transport, self.replicas = transport, transport.replicas
        self.devices = ["CPU:0"] * transport.replicas

    def part_of(self, rank):
        return rank

    def all_reduce(self, tensors, rank, label):
        return self._transport.added(tensors, rank)

    def start(self, words, rank, label):
        gathered = self._transport.gathered([words], rank)
        return tf.stack([own[0] for own in gathered]), words

    def all_to_all(self, rows, rank, label):
        given = self._transport.gathered([rows], rank)
        return tf.stack([own[0][rank] for own in given])
