"""In which order the buckets of compressed gradients are made and sent."""

import tensorflow as tf

import tfdp
from tfdp.exchange.compressed import CompressedSums, Kept
from tfdp.exchange.peers import PeerGroup

COUNT, BUCKETS = 4, 4
SHAPE = [64, 64]


class BothAlike(PeerGroup):
    """Two who say the same; an operation stands for the beginning of each exchange."""

    size = 2

    def __init__(self):
        self.begun = []
        self.sent = []

    def sum(self, tensors, rank, label):
        return [2 * tensor for tensor in tensors]

    def gather(self, words, rank, label):
        return tf.stack([words, words])

    def gather_ahead(self, words, rank, label):
        self.sent.append(words)
        with tf.control_dependencies([words]):
            self.begun.append(tf.constant(0, name="begun"))
        return self.gather(words, rank, label), self.begun[-1]

    def all_to_all(self, rows, rank, label):
        return rows


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
    group = BothAlike()
    summer = CompressedSums(
        tfdp.compression.Int8(min_bytes=0),
        group,
        ["CPU:0"],
        tfdp.Communication(bucket_bytes=4 * 64 * 64, first_bucket_bytes=4 * 64 * 64),
    )
    with tf.Graph().as_default():
        gradients = [tf.ones(SHAPE) * n for n in range(COUNT)]
        kept = [Kept(tf.zeros(SHAPE), {}) for _ in gradients]
        step = tf.constant(0, tf.int64)
        summer.exchange(gradients, kept, step, 0)
        assert len(group.begun) == BUCKETS
        for before, sent in zip(group.begun[:-1], group.sent[1:], strict=True):
            assert before.op in runs_behind(sent)
            # Nor when what came back is there: it is on its way meanwhile.
            assert not any(op.type == "Pack" for op in runs_behind(sent))
