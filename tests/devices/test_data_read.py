"""Reading TFRecords: every example once, in an order that the seed decides."""

import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import stock_strategy
from tests.support.workers import LONGEST_SECONDS
from tfdp import data
from tfdp.errors import ConfigurationError


@pytest.fixture
def index(tmp_path):
    """103 examples whose feature x is their number, in 5 files."""
    numbers = np.arange(103)
    return data.write_tfrecords(
        {"x": numbers, "half": numbers.astype(np.float32) / 2}, tmp_path, num_shards=5
    )


def _epoch(batches):
    return [batch["x"].numpy().tolist() for batch in batches]


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_example_comes_once(index, shuffle, drop_remainder):
    batches = data.read_tfrecords(
        index, 10, shuffle=shuffle, drop_remainder=drop_remainder
    )
    epoch = _epoch(batches)
    sizes = [len(batch) for batch in epoch]
    assert sizes == [10] * 10 + ([] if drop_remainder else [3])
    assert len(batches) == len(sizes)
    numbers = [number for batch in epoch for number in batch]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(range(103))


def test_features_of_an_example_stay_together(index):
    for x, half in data.read_tfrecords(index, 8, as_supervised=("x", "half")):
        np.testing.assert_array_equal(half, x.numpy() / np.float32(2))


def test_drop_remainder_makes_the_batch_size_static(index):
    spec = data.read_tfrecords(index, 10, drop_remainder=True).element_spec
    assert spec["x"].shape == (10,)


def test_the_seed_decides_the_order_of_every_epoch(index):
    first, second = (data.read_tfrecords(index, 10, seed=5) for _ in range(2))
    epochs = [_epoch(first) for _ in range(3)]
    assert [_epoch(second) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert _epoch(data.read_tfrecords(index, 10, seed=6)) != epochs[0]


def test_the_order_is_the_same_in_another_process(index):
    program = textwrap.dedent(f"""
        import tensorflow as tf
        from tfdp import data
        tf.random.set_seed(2)
        batches = data.read_tfrecords({str(index.path)!r}, 10, seed=5)
        print([[b["x"].numpy().tolist() for b in batches] for _ in range(2)])
    """)
    printed = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=LONGEST_SECONDS,
        capture_output=True,
        text=True,
    ).stdout
    tf.random.set_seed(2)  # TensorFlow mixes it into every seed of a pipeline
    batches = data.read_tfrecords(index, 10, seed=5)
    assert printed.strip() == str([_epoch(batches) for _ in range(2)])


def test_a_distributed_dataset_shuffles_each_epoch_alike(index):
    plain = data.read_tfrecords(index, 10, seed=5, drop_remainder=True)
    expected = [_epoch(plain) for _ in range(2)]
    strategy = stock_strategy()
    distributed = strategy.experimental_distribute_dataset(
        data.read_tfrecords(index, 10, seed=5, drop_remainder=True)
    )
    epochs = [
        [tf.concat(batch["x"].values, 0).numpy().tolist() for batch in distributed]
        for _ in range(2)
    ]
    assert epochs == expected


def test_a_small_buffer_still_gives_every_example_once(index):
    batches = data.read_tfrecords(index, 10, shuffle_buffer_examples=4, cycle_length=2)
    numbers = [number for batch in _epoch(batches) for number in batch]
    assert sorted(numbers) == list(range(103))


def test_repeat_has_no_end(index):
    batches = data.read_tfrecords(index, 10, repeat=True)
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    sizes = [len(batch["x"]) for batch in batches.take(23)]
    assert sizes == ([10] * 10 + [3]) * 2 + [10]


def test_transform_sees_single_examples(index):
    batches = data.read_tfrecords(
        index,
        10,
        as_supervised=("x", "half"),
        transform=lambda x, half: (tf.fill((2,), x), half * 2),
    )
    assert batches.element_spec[0].shape.as_list() == [None, 2]
    for x, twice_half in batches:
        np.testing.assert_array_equal(x[:, 0], twice_half)


def test_transform_may_give_varying_lengths(index):
    batches = data.read_tfrecords(
        index,
        10,
        shuffle=False,
        transform=lambda parts: tf.range(parts["x"] % 3),
        variable_length="pad",
    )
    assert next(iter(batches)).shape == (10, 2)


def test_several_hosts_split_every_global_batch(index):
    batches = data.read_tfrecords(index, 10)
    policy = batches.options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.DATA


def test_fit_takes_the_batches(index):
    strategy = stock_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input(()), keras.layers.Reshape((1,))])
        model.add(keras.layers.Dense(1, kernel_initializer="zeros"))
        model.compile(optimizer=keras.optimizers.SGD(1e-4), loss="mse")
    batches = data.read_tfrecords(
        index, 16, as_supervised=("half", "half"), drop_remainder=True
    )
    history = model.fit(batches, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": True}, "global_batch_size"),
        ({"global_batch_size": 200, "drop_remainder": True}, "103 examples"),
        ({"seed": None}, "seed"),
        ({"as_supervised": ("x", "label")}, "label"),
        ({"as_supervised": "x"}, "tuple"),
        ({"as_supervised": True}, "tuple"),
        ({"transform": "scale"}, "transform must be None or a function"),
        ({"variable_length": "cut"}, "ragged"),
        ({"cycle_length": 0}, "cycle_length"),
        ({"shuffle_buffer_examples": 0}, "shuffle_buffer_examples"),
        ({"shuffle_buffer_examples": 2**63}, "9223372036854775807"),
        ({"global_batch_size": 2**63}, "9223372036854775807"),
    ],
)
def test_bad_arguments_are_refused(index, options, message):
    arguments = {"global_batch_size": 10, **options}
    with pytest.raises(ConfigurationError, match=message):
        data.read_tfrecords(index, **arguments)


def test_a_selection_of_no_file_is_refused(index):
    with pytest.raises(ConfigurationError, match=r"select\(\), match no file"):
        data.read_tfrecords(index.select("none-*"), 10)
