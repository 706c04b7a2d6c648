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
    """Hands every replica's tensor to all, in a function traced once for all of them.

    Each exchange of a trace has a queue for each pair of replicas, so neither another
    exchange nor the same one in the next turn of a loop can come in between.
    """

    def __init__(self):
        self._queues = []

    def gather(self, tensor, replicas):
        """All replicas' `tensor`, in rank order."""
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

    def sum(self, tensor, replicas):
        """The sum of all replicas' `tensor`: the same bits on each."""
        return tf.add_n(self.gather(tensor, replicas))
