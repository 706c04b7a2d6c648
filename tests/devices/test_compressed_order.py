"""In which order the buckets of compressed gradients are made and sent."""

import tensorflow as tf

import tfdp
from tfdp.exchange.compressed import CompressedSums, Kept
from tfdp.exchange.transport import Transport
from tfdp.plan.topology import Topology

COUNT, BUCKETS = 4, 4
SHAPE = [64, 64]


class BothAlike(Transport):
    """Of two with equal tensors; an operation stands for the start of an exchange."""

    def __init__(self):
        super().__init__(["CPU:0", "CPU:0"], Topology(1, 2))
        self.begun = []
        self.sent = []

    def start(self, tensor, rank, label):
        self.sent.append(tensor)
        with tf.control_dependencies([tensor]):
            self.begun.append(tf.constant(0, name="begun"))
        return tf.stack([tensor, tensor]), self.begun[-1]

    def _nothing(self, *given, **options):
        raise NotImplementedError

    all_reduce = reduce_scatter = all_gather = gather = broadcast = _nothing


def runs_behind(tensor):
    """All operations that have to be over before `tensor` is there."""
    found, waiting = set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [given.op for given in op.inputs] + list(op.control_inputs)
    return found


def test_a_bucket_is_made_when_the_message_before_it_has_begun():
    transport = BothAlike()
    summer = CompressedSums(
        tfdp.compression.Int8(min_bytes=0),
        transport,
        None,
        tfdp.Communication(bucket_bytes=4 * 64 * 64, first_bucket_bytes=4 * 64 * 64),
    )
    with tf.Graph().as_default():
        gradients = [tf.ones(SHAPE) * n for n in range(COUNT)]
        kept = [Kept(tf.zeros(SHAPE), {}) for _ in gradients]
        step = tf.constant(0, tf.int64)
        summer.exchange(gradients, kept, step, 0)
        assert len(transport.begun) == BUCKETS
        for before, sent in zip(transport.begun[:-1], transport.sent[1:], strict=True):
            assert before.op in runs_behind(sent)
            # Nor when what came back is there: it is on its way meanwhile.
            assert not any(op.type == "Pack" for op in runs_behind(sent))
