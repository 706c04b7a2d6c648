"""What predictions are made from: steps without sums, and models as plain data."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.chain.table_rows import tables_of
from tfdp.tools.measuring.models import MODELS
from tfdp.tools.measuring.steps import make_step, without_sums
from tfdp.tools.planning.keras_profile import profile_of

DEVICES = ["CPU:0", "CPU:1"]


def build(name):
    model = MODELS[name]
    return model.build(model.input_shape, model.classes)


def test_without_sums_replicas_go_apart_and_with_them_not():
    def spread(strategy):
        training = make_step(strategy, MODELS["mlp-tiny"])
        training.step()
        kernel = training.network.layers[0].kernel.value
        first, second = strategy.experimental_local_results(kernel)
        return float(tf.reduce_max(tf.abs(first - second)))

    strategy = tfdp.DataParallelStrategy(DEVICES)
    with without_sums(strategy):
        # A step of 0.01 with other images moves weights by 1e-4 and more.
        assert spread(strategy) > 1e-5
    assert spread(strategy) == 0.0


def test_work_of_convolutions_and_dense_layers():
    profile = profile_of(build("cnn-1m"))
    sizes = [size for size, _, _ in profile["gradients"]]
    work = [flops for _, flops, _ in profile["gradients"]]
    assert sum(sizes) == 4 * 1_199_882
    # 3 x 3 from 1 to 32 channels on 26 x 26 places, to 64 on 24 x 24; two dense.
    assert work == [
        2 * 9 * 32 * 26 * 26,
        0,
        2 * 9 * 32 * 64 * 24 * 24,
        0,
        2 * 9216 * 128,
        0,
        2 * 128 * 10,
        0,
    ]
    assert profile["forward_flops_per_sample"] == sum(work)


def test_resnet20_is_that_of_the_paper():
    network = build("resnet20")
    trained = sum(np.prod(w.shape) for w in network.trainable_weights)
    # He et al. 2016, table 6: 0.27 million, here with projections in the shortcuts.
    assert trained == 272_474
    assert keras.ops.shape(network(np.zeros((2, 32, 32, 3), "float32"))) == (2, 10)


def test_rows_of_a_table_are_those_that_a_batch_has():
    network = build("words-tiny")
    network.compile(keras.optimizers.SGD(0.1), "mse")
    words = np.array([[1, 2, 3, 3], [3, 2, 1, 899]], "int32")
    table, *others = profile_of(network, [words])["gradients"]
    # 900 x 8 numbers; of four words a row of 32 bytes and its place.
    assert table == [28_800, 0.0, "float32", 4 * 36, True, 8 * 36]
    assert all(len(each) == 3 for each in others)
    # Adam squares each occurrence: all 8 travel.
    network.compile("adam", "mse")
    assert profile_of(network, [words])["gradients"][0][3:] == [8 * 36, False, 8 * 36]
    asked = profile_of(network, [words], adds_rows=True)["gradients"]
    assert asked[0][3:] == [4 * 36, True, 8 * 36]
    assert all(len(each) == 3 for each in profile_of(network)["gradients"])


def test_tables_are_found_and_small_ones_are_not():
    words = keras.Input((7,), dtype="int32")
    other = keras.Input((5,), dtype="int32")
    large, small = keras.layers.Embedding(5000, 4), keras.layers.Embedding(40, 4)
    joined = keras.ops.concatenate([large(other), small(words)], axis=1)
    network = keras.Model([words, other], keras.layers.Flatten()(joined))
    (table,) = tables_of(network)
    assert table.variable is large.embeddings and table.input_place == 1
    assert (table.rows, table.row_bytes, table.words) == (5000, 20, 5)
    assert table.size_bytes == 80_000
    assert table.sent_bytes(10, adds_rows=False) == 10 * 5 * 20
    assert table.sent_bytes(2000, adds_rows=True) == 5000 * 20
    large.trainable = False
    assert tables_of(network) == []


def test_work_within_layers_counts_the_places_of_those():
    network = build("transformer-tiny")
    profile = profile_of(network)
    # Four words of 8 numbers: queries, keys, values and what is made of them are 8 x 8
    # each; two dense layers, 8 x 32 and back; 10 classes, once.
    expected = [4 * 2 * 64] * 4 + [4 * 2 * 256] * 2 + [2 * 80]
    assert sorted(w for _, w, _ in profile["gradients"] if w) == sorted(expected)


def test_the_transformer_is_as_large_as_it_says_and_trains():
    network = build("transformer-1m")
    assert sum(np.prod(w.shape) for w in network.trainable_weights) == 1_422_090
    tiny = make_step(tfdp.DataParallelStrategy(DEVICES), MODELS["transformer-tiny"])
    assert np.isfinite(float(tiny.step()))
