"""Updates by gradients of earlier steps: `sync.Delayed`, `sync.BoundedStaleness`."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.apart import linear_model, parts_of, regression_data, sgd
from tests.support.conformance_table import OPTIMIZERS
from tests.support.late_reference import LateReference
from tests.support.parity import make_strategy
from tfdp.checkpoint.entries import ReplicaValues, entries_of
from tfdp.errors import ConfigurationError
from tfdp.hosts.late_queue import LateQueue

DELAYED, BOUNDED = tfdp.sync.Delayed, tfdp.sync.BoundedStaleness
# Twelve updates by means of at most 24 terms below 20 in float32 (u = 6e-8), in another
# order than on one device: 12 * 24 * 20 * u = 3.5e-4 of a gradient, times a rate of
# 0.01 / (1 - 0.5). Adam's quotient multiplies a difference of u by 32 in its first
# steps, of 0.01 each: 12 * 0.01 * 32 * 24 * u = 5.5e-6. An update with another delay
# is more than 1e-3 off.
BOUND = 7e-6


def normalized_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dense(1),
        ]
    )


def compiled(sync, build=normalized_model, inner=sgd, strategy=None, **wrap):
    strategy = strategy or make_strategy(4, hierarchy=(2, 2))
    with strategy.scope():
        model = build()
        optimizer = tfdp.DistributedOptimizer(inner(), sync=sync, **wrap)
        model.compile(optimizer, "mse", jit_compile=False)
    return model


def slow_sgd(**options):
    return keras.optimizers.SGD(0.01, momentum=0.5, **options)


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def weights_of(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


ROWS = {
    "sgd": (DELAYED(1), lambda: slow_sgd(clipnorm=0.3), {}),
    "adam": (DELAYED(2), lambda: adam(global_clipnorm=0.5), {}),
    "averages": (
        DELAYED(1),
        lambda: slow_sgd(weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
        {},
    ),
    "accumulated": (DELAYED(1), adam, {"accumulate_steps": 2}),
    "scaled": (
        DELAYED(2),
        lambda: adam(clipnorm=0.5),
        {"dynamic_loss_scale": True, "initial_scale": 2.0**6},
    ),
}


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("sync, inner, wrap", ROWS.values(), ids=ROWS)
def test_updates_are_those_of_a_late_loop_on_one_device(sync, inner, wrap):
    """53 rows in batches of 24: 24, 24 and 5, which leaves a replica without one."""
    x, y = regression_data(149 if "accumulate_steps" in wrap else 53)
    if "dynamic_loss_scale" in wrap:
        x[30] = np.inf  # in the second of three batches, found two steps later
    model = compiled(sync, inner=inner, **wrap)
    alone, optimizer = normalized_model(), inner()
    by_hand = LateReference(
        alone, optimizer, lambda n: int(n > sync.steps), scales="initial_scale" in wrap
    )
    per_update, micro_steps = wrap.get("accumulate_steps", 1), []
    for epoch in range(2):
        model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
        for parts in parts_of(x, y, 24, 4, 4):
            micro_steps.append(parts)
            if len(micro_steps) == per_update:
                by_hand.step(micro_steps)
                micro_steps = []
        by_hand.end_epoch()
        if epoch == 1 or not optimizer.use_ema:
            break
    if optimizer.use_ema:
        optimizer.finalize_variable_values(alone.trainable_variables)
    if by_hand.scales:
        assert by_hand.skipped == 1
        assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**5
        # The statistics of an infinite row are not finite, late or not.
        for ours, theirs in zip(
            model.trainable_variables, alone.trainable_variables, strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=BOUND)
        return
    np.testing.assert_allclose(weights_of(model), weights_of(alone), rtol=0, atol=BOUND)
    # Between two updates of an accumulation nothing else is left.
    assert int(model.optimizer.iterations.numpy()) == int(optimizer.iterations.numpy())


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_update_late(name):
    """Those of the conformance table, with rates that move weights by some per cent."""
    x, y = regression_data(72)
    inner = OPTIMIZERS[name]
    model = compiled(DELAYED(1), inner=inner)
    alone, plain = normalized_model(), normalized_model()
    late = LateReference(alone, inner(), lambda n: int(n > 1))
    at_once = LateReference(plain, inner(), lambda n: n)
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    for parts in parts_of(x, y, 24, 4, 4):
        late.step([parts])
        at_once.step([parts])
    late.end_epoch()
    # Three updates of the size of 0.1 at most, of sums of 24 terms: 3 * 24 * 0.1 * u is
    # 4e-7, and quotients of optimizers multiply it by less than 50.
    bound = 2e-5
    np.testing.assert_allclose(weights_of(model), weights_of(alone), rtol=0, atol=bound)
    # And the delay matters.
    apart = np.max(np.abs(weights_of(plain) - weights_of(alone)))
    assert apart > 10 * bound


def everything(model):
    """All that a training holds, of every replica, and what is in flight."""
    entries = entries_of(model)
    return {name: np.array(entry.read()) for name, entry in entries.items()}


RESUMED = {
    "delayed": (DELAYED(2), {}),
    "accumulated": (DELAYED(1), {"accumulate_steps": 3}),
    "scaled": (DELAYED(3), {"dynamic_loss_scale": True, "dynamic_growth_steps": 2}),
}


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("sync, wrap", RESUMED.values(), ids=RESUMED)
def test_a_checkpoint_resumes_with_sums_in_flight(tmp_path, sync, wrap):
    """After 8 micro-steps without an end of an epoch, from both kinds of files."""
    x, y = regression_data(24 * 14)
    batches = [(x[i : i + 24], y[i : i + 24]) for i in range(0, len(x), 24)]

    def made(seed, steps):
        model = compiled(sync, inner=lambda: adam(clipnorm=0.5), **wrap)
        keras.utils.set_random_seed(seed)
        for batch in batches[:steps]:
            model.train_on_batch(*batch)
        return model

    model = made(1, 8)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    at_checkpoint = everything(model)
    in_flight = [v for name, v in at_checkpoint.items() if "on the way/0/0" in name]
    assert in_flight[0] == [min(sync.steps, 8 // wrap.get("accumulate_steps", 1))]
    for batch in batches[8:]:
        model.train_on_batch(*batch)
    model.optimizer.rounds.apply_in_flight()  # as the end of an epoch does
    expected = everything(model)
    of_keras, of_tfdp = made(2, 3), made(3, 5)
    reader = tf.train.Checkpoint(model=of_keras)
    reader.restore(path).assert_existing_objects_matched()
    for name, entry in entries_of(of_tfdp).items():
        value = at_checkpoint[name]
        is_whole = entry.kind == "whole"
        entry.restore(value if is_whole else ReplicaValues(value, value, 0, len(value)))
    for other in (of_keras, of_tfdp):
        for name, value in everything(other).items():
            if not name.startswith(("seeds", "metrics")):
                np.testing.assert_array_equal(value, at_checkpoint[name], name)
        for batch in batches[8:]:
            other.train_on_batch(*batch)
        other.optimizer.rounds.apply_in_flight()
        for name, value in everything(other).items():
            if not name.startswith(("seeds", "metrics")):
                np.testing.assert_array_equal(value, expected[name], name)


class Sometimes:
    """Sums that are complete at random; notes how many are left and taken per step."""

    def __init__(self, monkeypatch, seed):
        self.random, self.taken = np.random.default_rng(seed), []
        take_due = LateQueue.take_due

        def noted(queue):
            before = len(queue)
            count = take_due(queue)
            self.taken.append((before, count))
            return count

        is_complete = lambda queue: self.random.random() < 0.4  # noqa: E731
        monkeypatch.setattr(LateQueue, "_is_complete", is_complete)
        monkeypatch.setattr(LateQueue, "take_due", noted)


@pytest.mark.worth_seconds(6)
def test_bounded_staleness_makes_all_updates_in_order(monkeypatch):
    sync = BOUNDED(3)
    sometimes = Sometimes(monkeypatch, 1)
    model = compiled(sync, inner=adam)
    x, y = regression_data(24 * 40)
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    assert {count for _, count in sometimes.taken} == {0, 1, 2}
    assert max(before - count for before, count in sometimes.taken) == 3
    counts = iter(count for _, count in sometimes.taken)
    alone = normalized_model()
    by_hand = LateReference(alone, adam(), lambda n: next(counts))
    for parts in parts_of(x, y, 24, 4, 4):
        by_hand.step([parts])
    by_hand.end_epoch()
    # 40 updates instead of 12.
    np.testing.assert_allclose(
        weights_of(model), weights_of(alone), rtol=0, atol=4 * BOUND
    )


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("sync", [DELAYED(2), BOUNDED(2)], ids=["delayed", "bounded"])
def test_a_look_within_an_epoch(monkeypatch, sync):
    """An evaluation gets equal weights on all hosts. Of `Delayed` they are equal, and
    the training does not notice it; of `BoundedStaleness` the updates are made."""
    monkeypatch.setattr(LateQueue, "_is_complete", lambda queue: False)
    x, y = regression_data(24 * 6)
    model, other = compiled(sync, inner=slow_sgd), compiled(sync, inner=slow_sgd)
    made = []

    def look(batch, logs):
        if batch == 3:
            model.evaluate(x, y, verbose=0)
            made.append(int(model.optimizer.iterations.numpy()))

    looks = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    options = {"batch_size": 24, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[looks], **options)
    other.fit(x, y, **options)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert made == [2 if sync == DELAYED(2) else 4]
    is_equal = np.array_equal(weights_of(model), weights_of(other))
    assert is_equal == (sync == DELAYED(2))


class AtRates(LateReference):
    """Each update has the learning rate of the step of its gradient."""

    def apply(self, count):
        for _ in range(count):
            self.optimizer.learning_rate = next(self.rates)
            super().apply(1)


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("sync", [DELAYED(2), BOUNDED(3)], ids=["delayed", "bounded"])
def test_an_update_has_the_learning_rate_of_its_gradient(monkeypatch, sync):
    """Hosts with `BoundedStaleness` make it in different steps."""
    sometimes = Sometimes(monkeypatch, 2)
    rates = [0.01 / (1 + step % 5) for step in range(12)]
    model = compiled(sync, inner=slow_sgd)
    inner = model.optimizer.inner_optimizer

    def set_rate(batch, logs):
        inner.learning_rate = rates[batch]

    sets = keras.callbacks.LambdaCallback(on_train_batch_begin=set_rate)
    x, y = regression_data(24 * 12)
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0, callbacks=[sets])
    counts = iter(count for _, count in sometimes.taken)
    alone = normalized_model()
    by_hand = AtRates(alone, slow_sgd(), lambda n: next(counts))
    by_hand.rates = iter(rates)
    for parts in parts_of(x, y, 24, 4, 4):
        by_hand.step([parts])
    by_hand.end_epoch()
    np.testing.assert_allclose(weights_of(model), weights_of(alone), rtol=0, atol=BOUND)
    assert float(inner.learning_rate.numpy()) == np.float32(rates[-1])


def test_weights_that_a_program_sets_follow_all_updates(monkeypatch):
    """With `BoundedStaleness` each host has made other ones within an epoch."""
    monkeypatch.setattr(LateQueue, "_is_complete", lambda queue: False)
    model, seen = compiled(BOUNDED(2), inner=slow_sgd), []

    def set_weights(batch, logs):
        if batch == 3:
            seen.append(int(model.optimizer.iterations.numpy()))
            model.set_weights(start)
            seen.append(int(model.optimizer.iterations.numpy()))
            seen.append(model.get_weights())

    start = model.get_weights()
    sets = keras.callbacks.LambdaCallback(on_train_batch_end=set_weights)
    model.fit(*regression_data(24 * 6), batch_size=24, verbose=0, callbacks=[sets])
    assert seen[:2] == [2, 4]
    for before, after in zip(start, seen[2], strict=True):
        np.testing.assert_array_equal(after, before)
    assert int(model.optimizer.iterations.numpy()) == 6


def test_no_late_step_is_plain_training():
    x, y = regression_data(53)
    options = {"batch_size": 24, "shuffle": False, "verbose": 0}
    weights = []
    for sync in (None, DELAYED(0), BOUNDED(0)):
        model = compiled(sync, inner=adam)
        model.fit(x, y, **options)
        weights.append(weights_of(model))
    np.testing.assert_array_equal(weights[1], weights[0])
    np.testing.assert_array_equal(weights[2], weights[0])


def synchronized_model():
    layers = [tfdp.layers.SyncBatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers])


class SetsRate(keras.Sequential):
    def train_step(self, data):
        inner = self.optimizer.inner_optimizer
        inner.learning_rate.assign(0.1 / (1.0 + tf.cast(inner.iterations, tf.float32)))
        return super().train_step(data)


IN_A_STEP = {
    "a layer": (synchronized_model, "replicas do not wait for each other within a"),
    "a rate": (lambda: SetsRate(linear_model().layers), "learning rate by a schedule"),
}


@pytest.mark.parametrize("build, words", IN_A_STEP.values(), ids=IN_A_STEP)
@pytest.mark.parametrize("sync", [DELAYED(1), BOUNDED(2)], ids=["delayed", "bounded"])
def test_exchanges_within_a_step_are_refused(sync, build, words):
    with pytest.raises(ConfigurationError, match=words):
        compiled(sync, build).fit(*regression_data(24), verbose=0)


REFUSED = {
    "one host": ({}, {}, "here is one host"),
    "a guard": (
        {"hierarchy": (2, 2)},
        {"callbacks": [tfdp.callbacks.NaNGuard("skip")]},
        "NaNGuard",
    ),
    "norms of a step": (
        {"hierarchy": (2, 2)},
        {"callbacks": [tfdp.callbacks.GradientNoiseScale()]},
        "each step, and with sync=... it comes later",
    ),
    "compression": (
        {"hierarchy": (2, 2), "compression": tfdp.compression.Int8()},
        {},
        "both determine what hosts send",
    ),
}


@pytest.mark.parametrize("communication, options, words", REFUSED.values(), ids=REFUSED)
def test_what_has_no_late_sums_is_refused(communication, options, words):
    with pytest.raises(ConfigurationError, match=words):
        model = compiled(
            DELAYED(1), linear_model, strategy=make_strategy(4, **communication)
        )
        model.fit(*regression_data(24), verbose=0, **options)


class AppliedTwice(keras.Model):
    """Two updates in a step, of different variables."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients[:1], variables[:1])
        self.optimizer.apply(gradients[1:], variables[1:])
        return {"loss": loss}


def test_a_step_has_one_sum():
    """The second one of a step would take the place of the first in the queue."""

    def build():
        x = keras.Input((5,))
        return AppliedTwice(x, keras.layers.Dense(1)(x))

    model = compiled(DELAYED(1), build)
    with pytest.raises(ConfigurationError, match="applied twice in a step"):
        model.fit(*regression_data(24), verbose=0)


class Largest(keras.layers.Layer):
    """Stores a constant, and the largest number of steps so far."""

    def build(self, shape):
        zeros = {"shape": (1,), "initializer": "zeros", "trainable": False}
        self.constant, self.most = (
            self.add_weight(name=name, **zeros) for name in ("constant", "most")
        )

    def call(self, x, training=False):
        if training:
            self.constant.assign([7.0])
            self.most.assign(keras.ops.maximum(self.most, 5.0))
        return x


@pytest.mark.parametrize("sync", [DELAYED(1), DELAYED(2)])
def test_state_that_is_set_is_set(sync):
    """Sums of its changes would be 14, or 21: each step sees the same old value."""

    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((5,)), Largest(), keras.layers.Dense(1)])

    model = compiled(sync, build)
    model.fit(*regression_data(48), batch_size=8, verbose=0)
    layer = model.layers[0]
    # Means of equal numbers by rows: one rounding of float32 each.
    np.testing.assert_allclose([layer.constant[0], layer.most[0]], [7, 5], rtol=1e-6)


def test_tables_of_embeddings_travel_dense():
    """Rows that repeat, and rows of one host only."""

    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                keras.layers.Embedding(4, 1, embeddings_initializer="zeros"),
                keras.layers.Flatten(),
            ]
        )

    rate = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    model = compiled(DELAYED(1), build, rate)
    words, targets = np.array([[0], [1], [2], [2]]), np.array([[1.0], [2], [4], [8]])
    model.fit(words, targets, batch_size=4, epochs=2, verbose=0)
    # Each epoch is one batch: w <- w - 0.25 * 2 * (the sum of w - y over rows) / 4.
    once = np.array([1.0, 2, 12, 0]) / 8
    again = once + (np.array([1.0, 2, 12, 0]) - [1, 1, 2, 0] * once) / 8
    np.testing.assert_allclose(model.get_weights()[0][:, 0], again, rtol=1e-6)


@pytest.mark.worth_seconds(12)
def test_a_training_that_fails_goes_on_with_its_sums(tmp_path):
    """`callbacks.Checkpoint` in the middle of an epoch, with two sums in flight."""
    x, y = regression_data(24 * 7)
    options = {"batch_size": 24, "shuffle": False, "verbose": 0}

    def fit(folder, fails_at=None):
        model = compiled(DELAYED(2), inner=adam)

        def fail(batch, logs):
            if batch == fails_at:
                raise RuntimeError("planned")

        saves = tfdp.callbacks.Checkpoint(tmp_path / folder, every_steps=4)
        fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
        model.fit(x, y, callbacks=[saves, fails], epochs=2, **options)
        return weights_of(model)

    expected = fit("straight")
    with pytest.raises(RuntimeError, match="planned"):
        fit("failed", fails_at=5)
    np.testing.assert_array_equal(fit("failed"), expected)


OTHER_SYNCS = {
    "steps": (DELAYED(2), DELAYED(1)),
    "begun": (None, DELAYED(1)),
    "ended": (DELAYED(1), None),
    "rounds": (DELAYED(1), tfdp.sync.LocalSGD(2)),
}


@pytest.mark.parametrize("saved, here", OTHER_SYNCS.values(), ids=OTHER_SYNCS)
def test_a_checkpoint_of_another_sync_is_refused(tmp_path, saved, here):
    def fit(sync):
        saves = tfdp.callbacks.Checkpoint(tmp_path)
        model = compiled(sync, linear_model)
        model.fit(*regression_data(24), batch_size=24, verbose=0, callbacks=[saves])

    fit(saved)
    words = re.escape(f"a training with sync={saved}, and SGD has sync={here} here")
    with pytest.raises(ConfigurationError, match=words):
        fit(here)
