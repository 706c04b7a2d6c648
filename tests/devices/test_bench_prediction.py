"""What predictions are made from: steps without sums, and models as plain data."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.bench.one_process.training import make_training_arm
from tfdp.bench.prediction.keras_profile import profile_of
from tfdp.bench.processes.arms import _without_sums
from tfdp.bench.subjects.models import MODELS

DEVICES = ["CPU:0", "CPU:1"]


def build(name):
    model = MODELS[name]
    return model.build(model.input_shape, model.classes)


def test_without_sums_replicas_go_apart_and_with_them_not():
    def spread(make):
        strategy = make(None)
        training = make_training_arm(strategy, MODELS["mlp-tiny"])
        training.step()
        kernel = training.network.layers[0].kernel.value
        first, second = strategy.experimental_local_results(kernel)
        return float(tf.reduce_max(tf.abs(first - second)))

    def plain(place):
        return tfdp.DataParallelStrategy(DEVICES)

    assert spread(plain) == 0.0
    # A step of 0.01 with other images moves weights by 1e-4 and more.
    assert spread(_without_sums(plain)) > 1e-5


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
