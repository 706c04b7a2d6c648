"""Gradients that a program accumulates itself, as published recipes do."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import copies, loss_and_gradients, make_strategy
from tfdp.errors import LocalMeanWarning, LocalStateWarning

RNG = np.random.default_rng(0)
X = RNG.normal(size=(29, 6)).astype("float32")
Y = RNG.integers(0, 3, 29)


class Accumulating(keras.Model):
    """Adds up in variables of its own, and updates in each second step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 6))
        self.step_number = tf.Variable(0, trainable=False)
        self.sums = [
            tf.Variable(tf.zeros(w.shape), trainable=False)
            for w in self.dense.trainable_variables
        ]

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)
        self.step_number.assign_add(1)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        tf.cond(tf.equal(self.step_number % 2, 0), self.update, lambda: None)
        return {"loss": loss}

    def update(self):
        sums = [tf.convert_to_tensor(total) for total in self.sums]
        self.optimizer.apply(sums, self.trainable_variables)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def accumulated(strategy, rows, make=Accumulating):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = make()
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(X[:rows], Y[:rows], **options)
    return model.dense.get_weights()


def in_two_runs(strategy, rows):
    """One `strategy.run` adds gradients up, and another one updates."""
    with strategy.scope():
        weights = tf.Variable(np.full((6, 3), 0.1, "float32"))
        total = tf.Variable(np.zeros((6, 3), "float32"), trainable=False)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([weights])

    def add(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights)
            loss = tf.reduce_sum(losses) / 12
        total.assign_add(tape.gradient(loss, weights))

    def update():
        optimizer.apply([tf.convert_to_tensor(total)], [weights])
        total.assign(tf.zeros_like(total))

    add_on_all = tf.function(lambda batch: strategy.run(add, args=batch))
    update_all = tf.function(lambda: strategy.run(update))
    dataset = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(12)
    dataset = strategy.experimental_distribute_dataset(dataset)
    for number, batch in enumerate([*dataset, *dataset], start=1):
        add_on_all(batch)
        if number % 2 == 0:
            update_all()
    return [weights.numpy()]


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("train", [accumulated, in_two_runs])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("rows", [24, 25, 29])
def test_each_replica_keeps_its_part_of_the_sum(rows, replicas, train):
    """Also where a short batch, with no row for a replica, is held over to the next."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalStateWarning)
        found = train(make_strategy(replicas), rows)
    one = train(tf.distribute.get_strategy(), rows)
    for mine, theirs in zip(found, one, strict=True):
        # Three updates of 0.5 times gradients below 2, of sums of 24 terms.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)


class GivingVariables(Accumulating):
    """Gives the optimizer the variables in which it has added up."""

    def update(self):
        pairs = zip(self.sums, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


class Clipping(Accumulating):
    """Adds gradients up over the replicas itself, to clip them by their norm."""

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)
        replicas = 1
        if (
            tf.distribute.has_strategy()
            and not tf.distribute.in_cross_replica_context()
        ):
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("sum", gradients)
            replicas = context.num_replicas_in_sync
        norm = tf.linalg.global_norm(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1, norm)
        gradients = [gradient / replicas for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("make", [GivingVariables, Clipping])
@pytest.mark.parametrize("rows", [24, 25, 29])
def test_what_else_an_optimizer_is_given_is_one_devices(rows, make):
    """Variables; and what is a sum over replicas already, also where one has no row."""
    with warnings.catch_warnings():
        for category in (LocalMeanWarning, LocalStateWarning):
            warnings.simplefilter("error", category)
        found = accumulated(make_strategy(3), rows, make)
    one = accumulated(tf.distribute.get_strategy(), rows, make)
    for mine, theirs in zip(found, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)


class Normalizing(Accumulating):
    """Keeps a moving mean of what it is given in each step, updated or not."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(shape=(6,), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(inputs, axis=0))
        return self.dense(inputs)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("rows", [25, 29, 41])
def test_moving_statistics_beside_it_are_those_of_each_batch(rows, replicas):
    """Of 25 rows in batches of 12 one replica has the last; of 41 all have of five."""

    def mean_of(strategy):
        with strategy.scope():
            model = Normalizing()
            model.compile("sgd", "mse", jit_compile=False)
        x = np.arange(rows)[:, None] / rows * np.ones(6)
        model.fit(x, x[:, :3], batch_size=12, shuffle=False, verbose=0)
        return copies(model.mean)

    found, [one] = (
        mean_of(make_strategy(replicas)),
        mean_of(tf.distribute.get_strategy()),
    )
    for copy in found:
        # Three or four means of at most 12 numbers below 1.
        np.testing.assert_allclose(copy, one, rtol=0, atol=1e-6)
