"""Replicas that train apart, together with everything else, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_sync import (
    BOUND,
    DILOCO,
    LOCAL_SGD,
    compare,
    compiled,
    local_weights,
)
from tests.support.apart import (
    ByHand,
    linear_model,
    parts_of,
    regression_data,
    sgd,
    synchronous_slices,
    vector_of,
)
from tests.support.parity import make_strategy, stock_strategy
from tfdp.errors import ConfigurationError

APART = LOCAL_SGD(2, across="replicas")


def fit(model, x, y, batch_size=24, **options):
    options = {"shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, batch_size=batch_size, **options)


def by_hand_after(sync, model, x, y, groups, replicas=None):
    by_hand = ByHand(sync, vector_of(model.get_weights()), groups)
    for parts in parts_of(x, y, 24, replicas or groups, groups):
        by_hand.update(parts)
    return by_hand


PLACES = {
    "one-replica": (1, {}),
    "tensorflow-engine": (4, {"engine": "tensorflow", "hierarchy": (2, 2)}),
    "several-steps-per-call": (4, {}),
}


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize("place", PLACES)
def test_rounds_elsewhere(place):
    replicas, communication = PLACES[place]
    sync = DILOCO(every=2, start_step=1, across="replicas")
    options = {"steps_per_execution": 3} if place.startswith("several") else {}
    model = compiled(make_strategy(replicas, **communication), sync, **options)
    x, y = regression_data(24 * 4)
    by_hand = by_hand_after(sync, model, x, y, replicas)
    fit(model, x, y)
    assert compare(model, by_hand, replicas) < BOUND


@pytest.mark.parametrize("start_step", [0, 1])
def test_rounds_count_updates_and_not_micro_steps(start_step):
    sync = LOCAL_SGD(2, start_step=start_step, across="replicas")
    x, y = regression_data(24 * 4)
    wrap = {"accumulate_steps": 2}
    model = compiled(make_strategy(2), sync, wrap=wrap)
    by_hand = by_hand_after(sync, model, x, y, 2)
    # Each replica's twelve rows of an update, as six in each of two micro-steps.
    order = np.arange(len(x)).reshape(4, 2, 2, 6).swapaxes(1, 2).ravel()
    fit(model, x[order], y[order], batch_size=12)
    assert compare(model, by_hand, 2) < BOUND


def test_a_replica_that_overflows_leaves_its_update_out_alone():
    sync = LOCAL_SGD(3, across="replicas")
    x, y = regression_data(24 * 4)
    x[30] = np.inf  # the second batch, the first of two replicas
    wrap = {"dynamic_loss_scale": True, "initial_scale": 8.0}
    model = compiled(make_strategy(2), sync, wrap=wrap)
    by_hand = ByHand(sync, vector_of(model.get_weights()), 2)
    for parts in parts_of(x, y, 24, 2, 2):
        kept = by_hand.local[0], by_hand.velocity[0]
        is_bad = not np.isfinite(parts[0][0]).all()
        by_hand.update([(x[:0], y[:0]) if is_bad else parts[0], parts[1]])
        if is_bad:
            by_hand.local[0], by_hand.velocity[0] = kept
    fit(model, x, y)
    assert compare(model, by_hand, 2) < BOUND
    scale = model.optimizer.dynamic_scale.value
    assert [scale.outer_copy(rank).numpy() for rank in range(2)] == [4.0, 8.0]


def test_the_average_is_of_the_outer_weights():
    sync = LOCAL_SGD(2, across="replicas")
    x, y = regression_data(24 * 5)
    model = compiled(
        make_strategy(2), sync, inner=lambda: sgd(use_ema=True, ema_momentum=0.75)
    )
    by_hand, average = ByHand(sync, vector_of(model.get_weights()), 2), None
    for parts in parts_of(x, y, 24, 2, 2):
        before = by_hand.outer
        by_hand.update(parts)
        if by_hand.outer is not before:
            new = by_hand.outer
            average = new if average is None else 0.75 * average + 0.25 * new
    fit(model, x, y)
    # fit takes the average at its end.
    assert np.max(np.abs(vector_of(model.get_weights()) - average)) < BOUND
    assert np.max(np.abs(by_hand.outer - average)) > 100 * BOUND


def test_an_average_before_the_first_meeting_changes_nothing():
    sync = LOCAL_SGD(20, across="replicas")
    model = compiled(make_strategy(2), sync, inner=lambda: sgd(use_ema=True))
    before = vector_of(model.get_weights())
    fit(model, *regression_data(48))
    np.testing.assert_array_equal(vector_of(model.get_weights()), before)


def test_averages_before_the_first_meeting_are_the_weights_of_the_start():
    """Not zeros, which a callback would give the model to be evaluated with."""
    sync = tfdp.sync.DiLoCo(20, across="replicas")
    model = compiled(make_strategy(2), sync, inner=lambda: sgd(use_ema=True))
    before, seen = vector_of(model.get_weights()), []
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    look = keras.callbacks.LambdaCallback(
        on_test_end=lambda logs: seen.append(vector_of(model.get_weights()))
    )
    data = regression_data(48)
    model.fit(*data, validation_data=data, callbacks=[swap, look], verbose=0)
    np.testing.assert_array_equal(seen, [before])


class OwnStep(keras.Sequential):
    """A mean taken by hand, and two embeddings' worth of slices."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            share = tfdp.losses.local_mean(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(share, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("across", ["hosts", "replicas"])
def test_a_train_step_of_ones_own(across):
    def build():
        keras.utils.set_random_seed(3)
        return OwnStep(linear_model().layers)

    sync = LOCAL_SGD(2, across=across)
    model = compiled(make_strategy(4, hierarchy=(2, 2)), sync, build)
    x, y = regression_data(72)
    by_hand = by_hand_after(sync, model, x, y, 2 if across == "hosts" else 4, 4)
    fit(model, x, y)
    assert compare(model, by_hand, 4) < BOUND


def test_slices_of_embeddings_stay_with_their_replica():
    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                keras.layers.Embedding(4, 1, embeddings_initializer="zeros"),
                keras.layers.Flatten(),
            ]
        )

    model = compiled(make_strategy(2), APART, build, lambda: keras.optimizers.SGD(0.25))
    words, targets = np.array([[0], [1], [2], [2]]), np.array([[1.0], [2], [3], [5]])
    fit(model, words, targets, batch_size=4)
    # w <- w - 0.25 * 2 * (w - y) / 2 for each of two rows: a quarter of the way.
    one, two = (local_weights(model, rank)[0][:, 0] for rank in range(2))
    np.testing.assert_allclose(one, [0.25, 0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(two, [0, 0, 2.0, 0], rtol=1e-6)
    np.testing.assert_array_equal(model.get_weights()[0], 0)


def test_synchronous_updates_keep_the_slices_of_embeddings():
    syncs = [None, LOCAL_SGD(9, 9, across="replicas"), LOCAL_SGD(9, across="replicas")]
    plain, first, apart = synchronous_slices(syncs, make_strategy(2))
    # Three updates of 0.01; sums of 20 rows differ by 20 u of that, and the quotient
    # of Adam multiplies it by 32.
    np.testing.assert_allclose(first, plain, rtol=0, atol=2e-6)
    assert np.max(np.abs(apart - plain)) > 1e-3


def synchronized_model():
    model = linear_model()
    normalize = tfdp.layers.SyncBatchNormalization()
    return keras.Sequential([keras.Input((5,)), normalize, *model.layers])


def padded_strategy():
    return tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], pad_batches=True)


REFUSED = {
    "one host": (lambda: make_strategy(2), LOCAL_SGD(2), {}, "across='replicas'"),
    "tensorflow's engine": (
        lambda: make_strategy(4, engine="tensorflow", hierarchy=(2, 2)),
        LOCAL_SGD(2),
        {},
        "engine='tensorflow'",
    ),
    "shards": (lambda: make_strategy(2, "optimizer"), APART, {}, "shard='optimizer'"),
    "filled batches": (padded_strategy, APART, {}, "pad_batches"),
    "eager": (
        lambda: make_strategy(2),
        APART,
        {"run_eagerly": True},
        "run_eagerly=True",
    ),
    "XLA": (lambda: make_strategy(2), APART, {"jit_compile": True}, "jit_compile"),
    "sums of layers": (
        lambda: make_strategy(2),
        APART,
        {"build": synchronized_model},
        "sums over all replicas",
    ),
    "overwriting averages": (
        lambda: make_strategy(2),
        APART,
        {"inner": lambda: sgd(use_ema=True, ema_overwrite_frequency=2)},
        "ema_overwrite_frequency",
    ),
    "a stock strategy": (
        stock_strategy,
        APART,
        {},
        "MirroredStrategy",
    ),
    "no strategy": (
        tf.distribute.get_strategy,
        APART,
        {},
        "under a strategy of tfdp",
    ),
}


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("make, sync, options, words", REFUSED.values(), ids=REFUSED)
def test_what_was_not_shown_is_refused(make, sync, options, words):
    options = {"jit_compile": False, **options}
    with pytest.raises(ConfigurationError, match=words):
        with make().scope():
            model = options.pop("build", linear_model)()
            inner = options.pop("inner", sgd)()
            optimizer = tfdp.DistributedOptimizer(inner, sync=sync)
            model.compile(optimizer, "mse", **options)
        fit(model, *regression_data(24))


def test_a_loop_of_ones_own_is_refused():
    strategy = make_strategy(2)
    with strategy.scope():
        model = linear_model()
        optimizer = tfdp.DistributedOptimizer(sgd(), sync=APART)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        def replica_step(x):
            with tf.GradientTape() as tape:
                loss = tfdp.losses.local_mean(tf.reduce_mean(model(x) ** 2))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        strategy.run(replica_step, args=(x,))

    with pytest.raises(ConfigurationError, match="a custom loop"):
        step(tf.ones([4, 5]))


def test_a_config_carries_sync():
    sync = DILOCO(every=20, outer_momentum=0.5, across="replicas")
    optimizer = tfdp.DistributedOptimizer(sgd(), sync=sync)
    again = tfdp.DistributedOptimizer.from_config(optimizer.get_config())
    assert again.sync == sync
    plain = tfdp.DistributedOptimizer(sgd())
    assert tfdp.DistributedOptimizer.from_config(plain.get_config()).sync is None


def rounds(sync, **inner):
    return tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1, **inner), sync=sync)


def test_two_optimizers_of_which_one_trains_apart_are_refused():
    """The other one's loss would be that of one replica, and its sum that of all."""

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply(gradients[:2], weights[:2])
            self.other.apply(gradients[2:], weights[2:])
            return {"loss": loss}

    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = Two()
        model.other = keras.optimizers.SGD(0.1)
        model.compile(
            rounds(tfdp.sync.LocalSGD(2, across="replicas")), "mse", jit_compile=False
        )
        model(np.ones((1, 3), "float32"))
        model.optimizer.build(model.trainable_variables[:2])
    x = np.ones((8, 3), "float32")
    with pytest.raises(ConfigurationError, match="Give all optimizers"):
        model.fit(x, x[:, :1], verbose=0)


ORDERS = [("optimizer", "other"), ("other", "optimizer")]


@pytest.mark.parametrize("order", ORDERS, ids=["first", "last"])
@pytest.mark.parametrize(
    "sync", [tfdp.sync.Delayed(1), tfdp.sync.LocalSGD(2)], ids=["late", "rounds"]
)
def test_two_optimizers_with_sync_share_the_state_of_layers(sync, order):
    """Two of the same numbers are one: of elementwise updates, but for rounding."""

    class Two(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            parts = {"optimizer": slice(0, 2), "other": slice(2, None)}
            for name in order if hasattr(self, "other") else ():
                part = parts[name]
                getattr(self, name).apply(gradients[part], weights[part])
            if not hasattr(self, "other"):
                self.optimizer.apply(gradients, weights)
            return {"loss": loss}

    def trained(two):
        keras.utils.set_random_seed(3)
        dense, normalize = keras.layers.Dense, keras.layers.BatchNormalization
        with make_strategy(4, hierarchy=(2, 2)).scope():
            model = Two([keras.Input((5,)), dense(4), normalize(), dense(1)])
            parts = [model.trainable_variables]
            owners = [rounds(sync, momentum=0.5)]
            if two:
                parts = parts[0][:2], parts[0][2:]
                model.other = rounds(sync, momentum=0.5)
                owners.append(model.other)
            model.compile(owners[0], "mse", jit_compile=False)
            for owner, part in zip(owners, parts, strict=True):
                owner.build(part)
        x, y = regression_data(72)
        model.fit(x, y, batch_size=24, shuffle=False, epochs=2, verbose=0)
        return model.get_weights()

    # Means over replicas may be added in another order.
    for one, two in zip(trained(False), trained(True), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=BOUND)


def test_what_another_optimizer_has_trained_meanwhile_is_kept():
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        apart = rounds(tfdp.sync.LocalSGD(2, across="replicas"))
        again = rounds(tfdp.sync.LocalSGD(2, across="replicas"))
        plain = keras.optimizers.SGD(0.1)
    x = np.random.default_rng(0).standard_normal((16, 3)).astype("float32")
    y = x[:, :1]

    def fit(optimizer, rate, epochs=2):
        with strategy.scope():
            model.compile(optimizer, "mse", jit_compile=False)
        optimizer.inner_optimizer.learning_rate = rate
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0)

    fit(apart, 0.1)
    with strategy.scope():
        model.compile(plain, "mse", jit_compile=False)
    model.fit(x, y, batch_size=8, epochs=10, verbose=0)
    trained = model.get_weights()
    fit(apart, 0.0)
    for before, after in zip(trained, model.get_weights(), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)
    fit(again, 0.1)
    model.set_weights([np.zeros_like(weight) for weight in trained])
    fit(apart, 0.0)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, np.zeros_like(weight))
