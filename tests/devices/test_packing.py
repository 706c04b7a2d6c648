"""Small tensors that stand side by side travel as one, and come back as they were."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tests.support.stand_in_link import StandInLink
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.levels import Levels
from tfdp.exchange.over_link import OverLink
from tfdp.exchange.packing import SMALL_BYTES, PackedSmall
from tfdp.plan.topology import Topology

LARGE = SMALL_BYTES // 4 + 1
LARGEST = SMALL_BYTES // 4

# Shapes and types, and which of them travel together.
CASES = {
    "none": ([], []),
    "one": ([((3,), "float32")], [1]),
    "all small": ([((3,), "float32"), ((), "float32"), ((2, 2), "float32")], [3]),
    "one large between": (
        [((3,), "float32"), ((LARGE,), "float32"), ((2,), "float32")],
        [1, 1, 1],
    ),
    "large ones at the ends": (
        [
            *[((LARGE,), "float32"), ((3,), "float32"), ((2, 0), "float32")],
            *[((LARGEST,), "float32"), ((LARGE,), "float32")],
        ],
        [1, 3, 1],
    ),
    "types": (
        [
            *[((3,), "float32"), ((3,), "float32"), ((3,), "int64")],
            *[((1,), "int64"), ((2,), "float32")],
        ],
        [2, 2, 1],
    ),
    "bfloat16": ([((LARGEST,), "bfloat16"), ((3,), "bfloat16")], [2]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_they_come_back_as_they_were(case, in_graph):
    kinds, together = CASES[case]
    rng = np.random.default_rng(2)
    tensors = [
        tf.cast(tf.constant(rng.integers(0, 99, size=shape)), dtype)
        for shape, dtype in kinds
    ]

    def there_and_back(tensors):
        small = PackedSmall(tensors)
        assert [max(len(shapes), 1) for shapes in small.shapes] == together
        # As if each had been summed on its way.
        return small.unpack([2 * tensor for tensor in small.packed])

    run = tf.function(there_and_back) if in_graph else there_and_back
    for came, sent in zip(run(tensors), tensors, strict=True):
        assert came.shape == sent.shape and came.dtype == sent.dtype
        np.testing.assert_array_equal(came.numpy(), 2 * sent.numpy())


def test_others_are_told_what_was_packed():
    tensors = [tf.zeros([2, 3]), tf.zeros([]), tf.zeros([LARGE])]
    assert PackedSmall(tensors).shapes == [[[2, 3], []], []]


@pytest.mark.parametrize("shape", [[None], [None, 3], None])
def test_what_has_no_known_shape_travels_by_itself(shape):
    @tf.function(input_signature=[tf.TensorSpec(shape), tf.TensorSpec(shape)])
    def shapes(first, second):
        small = PackedSmall([first, second, tf.zeros([3]), tf.zeros([4])])
        assert small.shapes == [[], [], [[3], [4]]]
        return small.unpack(small.packed)

    given = np.ones([5, 3] if shape == [None, 3] else [5], "float32")
    first, second, *_ = shapes(given, given[:2])
    np.testing.assert_array_equal(first, given)
    np.testing.assert_array_equal(second, given[:2])


def test_a_sum_over_hosts_hands_small_ones_over_as_one():
    seen = []

    class Link(StandInLink):
        def sum(self, arrays, label, channel="step", wire_dtype=None, packed=()):
            seen.append(([array.shape for array in arrays], wire_dtype, packed))
            return super().sum(arrays, label, channel, wire_dtype, packed)

    two = types.SimpleNamespace(rank=0, workers=2, timeout_seconds=5)
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    levels = Levels(
        InProcess([device], Topology(1, 1)), OverLink(device, Link(two, two))
    )
    tensors = [tf.ones([3]), tf.ones([2, 2]), tf.ones([LARGE]), tf.ones([])]

    @tf.function
    def sums():
        with levels.run():
            return levels.all_reduce(tensors, 0, "bucket", "bfloat16")

    for total, tensor in zip(sums(), tensors, strict=True):
        np.testing.assert_array_equal(total, 2 * tensor)
    levels.close()
    shapes = [[[3], [2, 2]], [], []]
    assert seen == [([(7,), (LARGE,), ()], "bfloat16", shapes)]
