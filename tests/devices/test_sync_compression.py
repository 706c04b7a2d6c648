"""Outer gradients in fewer bytes, and what compression is refused with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_sync import BOUND, DILOCO, compiled
from tests.support.apart import regression_data, vector_of
from tests.support.parity import make_strategy
from tfdp.compression import Int4, Int8, PowerSGD, RandomK, TopK
from tfdp.errors import ConfigurationError

EVERYTHING = RandomK(1.0, min_bytes=0)


def trained(method, across="replicas", epochs=3, model=None, **options):
    if model is None:
        levels = {"hierarchy": (2, 2)} if across == "hosts" else {}
        strategy = make_strategy(4, **levels)
        sync = DILOCO(every=4, across=across, compression=method, **options)
        model = compiled(strategy, sync)
    x, y = regression_data(96)
    model.fit(x, y, batch_size=24, epochs=epochs, shuffle=False, verbose=0)
    return model


def outer_copies(model):
    """The outer weights on each replica."""
    return [
        np.concatenate(
            [v.value.outer_copy(rank).numpy().ravel() for v in model.trainable_weights]
        )
        for rank in range(4)
    ]


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("across", ["replicas", "hosts"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_nothing_lost_is_diloco(across, fragments):
    """Of two fragments the kernel is one and the bias, which is not taken, another."""
    plain = trained(None, across, fragments=fragments)
    sent = trained(EVERYTHING, across, fragments=fragments)
    difference = vector_of(plain.get_weights()) - vector_of(sent.get_weights())
    assert np.max(np.abs(difference)) < BOUND


@pytest.mark.parametrize("method", [Int8(32, min_bytes=0), Int4(32, min_bytes=0)])
def test_rounded_outer_gradients_are_alike_on_all_replicas(method):
    model, plain = trained(method), trained(None)
    copies = outer_copies(model)
    for other in copies[1:]:
        np.testing.assert_array_equal(copies[0], other)
    # Rounded, by less than a step of four bits of what moves, which is below 5.
    difference = np.abs(copies[0] - outer_copies(plain)[0]).max()
    assert 0 < difference < 5 / 7
    left = [
        copy.numpy()
        for kept in model.optimizer.compression_state.of_variables.values()
        for copy in kept.residual.copies
    ]
    assert len(left) >= 4 and all(np.abs(part).max() > 0 for part in left)


def test_a_checkpoint_has_what_is_left(tmp_path):
    model = trained(Int8(32, min_bytes=0), epochs=2)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "c"))
    expected = vector_of(trained(None, model=model, epochs=2).get_weights())
    fresh = compiled(
        make_strategy(4),
        DILOCO(every=4, across="replicas", compression=Int8(32, min_bytes=0)),
    )
    with fresh.distribute_strategy.scope():
        fresh.optimizer.build(fresh.trainable_variables)
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(path)
    then = vector_of(trained(None, model=fresh, epochs=2).get_weights())
    np.testing.assert_array_equal(expected, then)


def test_the_method_is_in_the_config():
    sync = DILOCO(every=7, across="replicas", compression=Int4(exclude=["embedding"]))
    optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=sync)
    told = keras.saving.serialize_keras_object(optimizer)
    assert keras.saving.deserialize_keras_object(told).sync == sync


@pytest.mark.parametrize(
    "method", ["int8", PowerSGD(2), TopK(0.1, momentum_correction=0.9)]
)
def test_what_cannot_be_is_refused(method):
    with pytest.raises(ConfigurationError, match=r"DiLoCo\.compression"):
        DILOCO(compression=method)


def compressing():
    communication = tfdp.Communication(
        compression=Int8(min_bytes=0), compression_across="replicas"
    )
    return tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], communication=communication)


def test_compressed_gradients_and_rounds_are_refused_together():
    x, y = regression_data(24)
    with pytest.raises(ConfigurationError, match="Leave out one of them"):
        model = compiled(compressing(), DILOCO(every=3, across="replicas"))
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize("why", ["compression", "sync"])
def test_a_noise_scale_needs_whole_sums(why):
    x, y = regression_data(24)
    if why == "sync":
        model = compiled(make_strategy(2), DILOCO(every=3, across="replicas"))
    else:
        model = compiled(compressing(), None)
    with pytest.raises(ConfigurationError, match=f"without {why}"):
        model.fit(x, y, verbose=0, callbacks=[tfdp.callbacks.GradientNoiseScale()])


def test_an_optimizer_that_nobody_leads_is_refused():
    """It would send its gradients as they are, whatever was asked for."""
    strategy = compressing()
    with strategy.scope():
        weight = keras.Variable(tf.zeros([8, 8]))

    @tf.function
    def step():
        def replica():
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weight])
            optimizer.apply([tf.ones([8, 8])], [weight])

        strategy.run(replica)

    with pytest.raises(ConfigurationError, match="compression"):
        step()
