"""Exchanges between the replicas of one process, through queues of their own.

TensorFlow's collectives share one state in a process: after one has failed, all later
ones fail. A queue knows nothing of others, waits as long as it takes (tests have
timeouts), and is cancelled with the step that waits for it.
"""

import tensorflow as tf
from tensorflow.python.tpu import tpu_replication

# A replica may be one exchange ahead of the slowest, which has not read the last yet.
CAPACITY = 2


class QueueExchange:
    """In the place of `CrossReplicaOps`: hands every replica's tensor to all.

    It stands in a function that is traced once for all replicas.

    Each exchange of a trace has a queue for each pair of replicas, so neither another
    exchange nor the same one in the next turn of a loop can come in between.
    """

    def __init__(self, replicas):
        self.replicas = replicas
        self._queues = []

    def _all(self, tensor):
        """All replicas' `tensor`, in rank order."""
        replicas = self.replicas
        with tf.init_scope(), tf.device("CPU:0"):
            queues = [
                [
                    tf.queue.FIFOQueue(CAPACITY, [tensor.dtype], [tensor.shape])
                    for _ in range(replicas)
                ]
                for _ in range(replicas)
            ]
        self._queues.append(queues)
        context, graph = tpu_replication._enclosing_tpu_context_and_graph()
        for receiver in range(replicas):
            to_receiver = [queues[sender][receiver] for sender in range(replicas)]
            handle = context.capture_own(graph, [q.queue_ref for q in to_receiver])
            tf.raw_ops.QueueEnqueueV2(handle=handle, components=[tensor])
        received = []
        for sender in range(replicas):
            handle = context.capture_own(graph, [q.queue_ref for q in queues[sender]])
            [part] = tf.raw_ops.QueueDequeueV2(
                handle=handle, component_types=[tensor.dtype]
            )
            part.set_shape(tensor.shape)
            received.append(part)
        return received

    def sum(self, tensor):
        """The sum of all replicas' `tensor`: the same bits on each."""
        return tf.add_n(self._all(tensor))

    def scatter_sum(self, rows, rank):
        """Row `rank` of the sum of all replicas' `rows`."""
        return tf.gather(self.sum(rows), rank)

    def gather(self, row):
        """All replicas' `row`, stacked in rank order."""
        return tf.stack(self._all(row))
