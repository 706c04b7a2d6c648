"""Training leaves the NumPy arrays alone that a generator gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.fresh_python import run_program
from tests.support.parity import make_strategy
from tfdp.data.owned_input import owned

ALIGNMENT = 64  # bytes: what TensorFlow takes as it lies in memory
SPECS = (tf.TensorSpec((8, 5)), tf.TensorSpec((8, 3)))


def aligned(values):
    room = np.zeros(values.nbytes + ALIGNMENT, "uint8")
    start = -room.ctypes.data % ALIGNMENT
    array = room[start : start + values.nbytes].view(values.dtype)
    array = array.reshape(values.shape)
    array[...] = values
    return array


def batches():
    rng = np.random.default_rng(0)
    return [
        tuple(aligned(rng.normal(size=(8, k)).astype("float32")) for k in (5, 3))
        for _ in range(2)
    ]


def from_generator(arrays):
    return tf.data.Dataset.from_generator(lambda: iter(arrays), output_signature=SPECS)


def from_function(arrays):
    def look_up(place):
        x, y = tf.numpy_function(lambda i: arrays[i], [place], [tf.float32] * 2)
        return tf.ensure_shape(x, (8, 5)), tf.ensure_shape(y, (8, 3))

    return tf.data.Dataset.range(len(arrays)).map(look_up)


def written(strategy, dataset, arrays):
    """Whether two epochs over `arrays` change them."""
    before = [np.copy(array) for batch in arrays for array in batch]
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(dataset, epochs=2, verbose=0)
    after = [array for batch in arrays for array in batch]
    return not all(map(np.array_equal, after, before))


@pytest.mark.parametrize("make", [from_generator, from_function])
def test_what_python_code_holds_is_not_written_to(make):
    arrays = batches()
    assert not written(make_strategy(2), make(arrays), arrays)


STOCK = """
import tfdp
tfdp.use_virtual_devices(2)
import tensorflow as tf
from tests.devices.test_owned_input import batches, from_generator, written
arrays = batches()
stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print("written:", written(stock, from_generator(arrays), arrays))
"""


# Slow: whether a kernel finds its input unused is a matter of time in TensorFlow.
@pytest.mark.slow
def test_a_stock_strategy_writes_over_the_targets():
    """When it does no more, `owned_input` can go.

    In a process of its own: stock strategies' collectives spoil those of others.
    """
    done = run_program(STOCK)
    assert "written: True" in done.stdout, done.stderr


DTYPES = (
    "bfloat16 bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 "
    "string uint16 uint32 uint64 uint8"
).split()


def elements():
    plain = {dtype: tf.zeros([2], dtype) for dtype in DTYPES if dtype != "string"}
    return {
        "types": plain | {"string": tf.constant(["a", "b"])},
        "bare": tf.ones([2]),
        "tuple-of-one": (tf.ones([2]),),
        "ragged": (tf.ragged.constant([[1, 2], [3]]), tf.ones([2])),
        "sparse": {"a": tf.sparse.from_dense([[0, 1], [2, 0]])},
    }


@pytest.mark.parametrize("name", elements())
def test_an_element_stays_what_it_is(name):
    element = elements()[name]
    through_python = tf.data.Dataset.from_tensors(element).filter(
        lambda *_: tf.numpy_function(lambda: True, [], tf.bool)
    )
    copied = owned(through_python)
    assert copied is not through_python
    assert copied.element_spec == through_python.element_spec
    (got,) = copied
    flat = [tf.nest.flatten(e, expand_composites=True) for e in (got, element)]
    for a, b in zip(*flat, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_what_is_read_without_python_is_not_copied():
    dataset = tf.data.Dataset.range(8).map(lambda x: x + 1).batch(2)
    assert owned(dataset) is dataset
