"""`OneBitAdam`: Adam at first, then the equations, and what it is refused with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.compression_table import IDENTITIES
from tests.support.holding import Holding
from tests.support.one_bit import BLOCK, SHAPE, drawn, scaled_signs, stepping, updated
from tests.support.parity import (
    classification_data,
    dense_model,
    make_strategy,
    stock_strategy,
)
from tfdp.compression import Int8, PowerSGD, SignSGD, TopK
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.optimizers import OneBitAdam

RATE, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.99, 1e-7
# Of 8 updates of 0.01, each the quotient of sums of a few terms that differ by u of
# themselves, which 1 / (1 - beta_1) multiplies: 8 * 0.01 * 10 * 10 * 6e-8 = 5e-7.
BOUND = 2e-6


def by_hand(gradients, warmup_steps, lossy):
    """The weights after each update: the equations of the docstring, in float64."""
    replicas = len(gradients[0])
    w, m, v = (np.zeros(SHAPE) for _ in range(3))
    left = [np.zeros(SHAPE) for _ in range(replicas)]
    found = []
    for t, of_replicas in enumerate(gradients, start=1):
        if t <= warmup_steps:
            g = sum(of_replicas)
            m = BETA_1 * m + (1 - BETA_1) * g
            v = BETA_2 * v + (1 - BETA_2) * g**2
        else:
            parts = [
                BETA_1 * m / replicas + (1 - BETA_1) * g + e
                for g, e in zip(of_replicas, left, strict=True)
            ]
            sent = [scaled_signs(p) if lossy else p for p in parts]
            left = [p - c for p, c in zip(parts, sent, strict=True)]
            m = sum(sent)
        correction = np.sqrt(1 - BETA_2 ** min(t, warmup_steps)) / (1 - BETA_1**t)
        step = RATE * correction * m / (np.sqrt(v) + EPSILON)
        w = w - np.where(v > 0, step, 0)
        found.append(w)
    return found


def optimizer(compression=None, warmup_steps=3, across="replicas", **options):
    compression = compression or SignSGD(BLOCK, min_bytes=0)
    return OneBitAdam(
        RATE,
        warmup_steps=warmup_steps,
        beta_1=BETA_1,
        beta_2=BETA_2,
        epsilon=EPSILON,
        compression=compression,
        across=across,
        **options,
    )


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss-scale"])
def test_updates_are_those_of_the_equations(scaled):
    gradients = drawn(2)

    def made():
        used = optimizer()
        if not scaled:
            return used
        return keras.optimizers.LossScaleOptimizer(used, initial_scale=8.0)

    given = gradients * 8 if scaled else gradients
    found, used = updated(make_strategy(2), made, given)
    for ours, expected in zip(found, by_hand(gradients, 3, True), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=BOUND)
    # What is lost shows from the fourth update on; what never had a gradient stays.
    without_loss = by_hand(gradients, 3, False)
    assert np.abs(found[2] - without_loss[2]).max() < BOUND
    assert np.abs(found[3] - without_loss[3]).max() > 100 * BOUND
    assert not found[-1][0, :2].any()
    residuals = used.compression_state.of_variables["variable_0"].residual.copies
    assert len(residuals) == 2 and all(r.numpy().any() for r in residuals)


def test_a_step_that_overflows_changes_nothing():
    gradients = drawn(2)
    bad = np.insert(gradients, 5, np.inf, axis=0)
    bad[5, 1] = 0  # on one replica alone

    def made():
        return keras.optimizers.LossScaleOptimizer(optimizer(), initial_scale=1.0)

    found, _ = updated(make_strategy(2), made, bad[:6])
    np.testing.assert_array_equal(found[4], found[5])


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("hosts", [False, True], ids=["3", "2x2"])
@pytest.mark.parametrize("method", IDENTITIES.values(), ids=IDENTITIES)
def test_nothing_lost_is_one_device(method, hosts):
    """By the identities of the table of compression, over uneven batches."""
    if method.plain_steps:
        with pytest.raises(ConfigurationError, match="begin later by itself"):
            optimizer(method)
        return
    x, y = classification_data()

    def trained(strategy, **options):
        with strategy.scope():
            model = dense_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer(method, 4, **options), loss, jit_compile=False)
        model.fit(x, y, batch_size=23, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = trained(tf.distribute.get_strategy())
    on_hosts = {"across": "hosts"} if hosts else {}
    strategy = make_strategy(4, hierarchy=(2, 2)) if hosts else make_strategy(3)
    for ours, theirs in zip(trained(strategy, **on_hosts), alone, strict=True):
        # Ten updates; a product of full rank is a sum of up to 33 terms.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=50 * BOUND)
    assert max(np.abs(w).max() for w in alone) > 5000 * BOUND


def test_before_the_variance_stands_it_is_adam():
    x, y = classification_data()

    def trained(made):
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(made, loss, jit_compile=False)
        model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    adam = keras.optimizers.Adam(RATE, BETA_1, BETA_2, EPSILON, weight_decay=0.1)
    ours = trained(optimizer(warmup_steps=8, weight_decay=0.1))
    for one, two in zip(ours, trained(adam), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=BOUND)
    frozen = trained(optimizer(warmup_steps=4, weight_decay=0.1))
    assert np.abs(frozen[0] - ours[0]).max() > 100 * BOUND


def test_a_checkpoint_resumes_bit_for_bit(tmp_path):
    gradients = drawn(2)
    steps, weight, used = stepping(make_strategy(2), optimizer)
    steps(gradients[0:5])
    file = tf.train.Checkpoint(w=weight, optimizer=used).save(tmp_path / "c")
    expected = steps(gradients[5:8])
    assert not np.array_equal(expected, steps(gradients[0:3]))
    tf.train.Checkpoint(w=weight, optimizer=used).restore(file)
    np.testing.assert_array_equal(steps(gradients[5:8]), expected)


def test_a_config_makes_the_same():
    used = optimizer(Int8(64, exclude=["embedding"]), weight_decay=0.01)
    told = keras.saving.serialize_keras_object(used)
    again = keras.saving.deserialize_keras_object(told)
    assert again.momentum_compression == used.momentum_compression
    assert again.get_config() == used.get_config()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"warmup_steps": 0}, "warmup_steps must be an integer of at least 1"),
        ({"warmup_steps": 2.0}, "Received: 2.0"),
        ({"compression": "sign"}, "must be a value of tfdp.compression"),
        ({"compression": PowerSGD(2)}, "begin later by itself"),
        ({"compression": TopK(0.1, momentum_correction=0.9)}, "another momentum"),
        ({"across": "host"}, "across must be 'hosts'"),
        ({"clipnorm": 1.0}, "Leave it out"),
        ({"global_clipnorm": 1.0}, "Leave it out"),
        ({"gradient_accumulation_steps": 2}, "accumulate_steps"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        OneBitAdam(0.1, **{"warmup_steps": 2, **options})


def compressing():
    communication = tfdp.Communication(
        compression=Int8(min_bytes=0), compression_across="replicas"
    )
    return tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], communication=communication)


APART = tfdp.sync.LocalSGD(2, across="replicas")
REFUSED = {
    "one host": (lambda: make_strategy(2), {"across": "hosts"}, "here is one"),
    "shards": (lambda: make_strategy(2, "optimizer"), {}, "cannot update shards"),
    "compression": (compressing, {}, "both decide"),
    "a stock strategy": (
        stock_strategy,
        {},
        "MirroredStrategy",
    ),
}


@pytest.mark.parametrize("make, options, words", REFUSED.values(), ids=REFUSED)
def test_places_that_cannot_be_are_refused(make, options, words):
    x, y = classification_data()
    strategy = make()
    with pytest.raises((ConfigurationError, ScopeError), match=words):
        with strategy.scope():
            model = dense_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer(**options), loss, jit_compile=False)
        model.fit(x, y, batch_size=24, verbose=0)


def test_one_that_another_holds_is_refused():
    """Gradients are summed for its holder, so nothing would be made small."""
    x, y = classification_data()
    with make_strategy(2).scope():
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(Holding(optimizer()), loss, jit_compile=False)
    with pytest.raises(ConfigurationError, match="held by another optimizer"):
        model.fit(x, y, batch_size=24, verbose=0)


def test_rounds_and_noise_scales_are_refused():
    with pytest.raises(ConfigurationError, match="with sync"):
        tfdp.DistributedOptimizer(optimizer(), sync=APART)
    x, y = classification_data()
    with make_strategy(2).scope():
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, jit_compile=False)
    noise = tfdp.callbacks.GradientNoiseScale()
    with pytest.raises(ConfigurationError, match="or remove it"):
        model.fit(x, y, verbose=0, callbacks=[noise])


def test_accumulated_gradients_are_one_update():
    """Two micro-steps of a DistributedOptimizer are one step of the whole batch."""
    x, y = classification_data()

    def trained(batch_size, wrap):
        with make_strategy(2).scope():
            model = dense_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(wrap(optimizer()), loss, jit_compile=False)
        options = {"batch_size": batch_size, "epochs": 2, "shuffle": False}
        # Each replica has the same rows of an update.
        order = np.arange(96).reshape(4, 2, 2, 6).swapaxes(1, 2).ravel()
        rows = order if batch_size == 12 else np.arange(96)
        model.fit(x[rows], y[rows], verbose=0, **options)
        return model.get_weights()

    whole = trained(24, lambda o: o)
    parts = trained(12, lambda o: tfdp.DistributedOptimizer(o, accumulate_steps=2))
    for one, two in zip(whole, parts, strict=True):
        # A momentum near 0 may get the other sign: seen through the count of such.
        assert np.mean(np.abs(one - two) > 10 * BOUND) < 0.02
