"""Several losses of a model whose gradients are accumulated, or of groups.

The reference is one device on batches of all rows. Texts are short in every other
micro-batch and long in the others, so that masked means weigh them apart.
"""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import LocalMeanWarning

RNG = np.random.default_rng(3)
ROWS, WORDS, LENGTH, BATCH = 48, 20, 10, 12
LENGTHS = np.where(np.arange(ROWS) % BATCH < BATCH // 2, 2, 9)
TEXTS = RNG.integers(1, WORDS, (ROWS, LENGTH)) * (np.arange(LENGTH) < LENGTHS[:, None])
TARGETS = {
    "tags": RNG.normal(size=(ROWS, LENGTH, 1)).astype("float32"),
    "names": RNG.normal(size=(ROWS, LENGTH, 1)).astype("float32"),
    "class": TEXTS.sum(1, keepdims=True).astype("float32") / 50,
}
MASKED, MIXED = ("tags", "names"), ("tags", "class")


def trained(heads, replicas=1, rows=BATCH, **options):
    with make_strategy(replicas).scope() if options else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        texts = keras.Input((LENGTH,), dtype="int32")
        words = keras.layers.Embedding(WORDS, 6, mask_zero=True)(texts)
        pooled = keras.layers.GlobalAveragePooling1D()(words)
        # Each layer that hands a mask on computes it once more.
        merged = keras.layers.Add()([words, keras.layers.Dense(6)(words)])
        states = keras.layers.LSTM(4, return_sequences=True)(merged)
        given = {"tags": words, "names": states, "class": pooled}
        outputs = {
            name: keras.layers.Dense(1, name=name)(given[name]) for name in heads
        }
        model = keras.Model(texts, outputs)
        optimizer = keras.optimizers.SGD(0.1)
        if options:
            optimizer = tfdp.DistributedOptimizer(optimizer, **options)
        model.compile(optimizer, dict.fromkeys(heads, "mse"), jit_compile=False)
    targets = {name: TARGETS[name] for name in heads}
    model.fit(TEXTS, targets, batch_size=rows, shuffle=False, verbose=0)
    return model.get_weights()


def largest(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("heads", [MASKED, ("tags",), ("class",)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_of_one_mask_are_those_of_one_large_batch(heads, replicas):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        own = trained(heads, replicas, rows=BATCH // 2, accumulate_steps=2)
    # Four updates of 0.1 with gradients below 10, each a sum of some 100 numbers that
    # are rounded to u: 4 * 0.1 * 10 * 100 u = 2.4e-5. Weighed by rows: 5e-2 off.
    assert largest(own, trained(heads)) < 2.4e-5


SYNC = tfdp.sync.LocalSGD(every=2, start_step=100, across="replicas")


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"sync": SYNC}])
def test_losses_over_unlike_numbers_are_told(options):
    with pytest.warns(LocalMeanWarning, match="means over different numbers"):
        trained(MIXED, 2, **options)


def test_nothing_is_told_where_no_batches_are_added_up():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        own = trained(MIXED, 2, dynamic_loss_scale=False)
    assert largest(own, trained(MIXED)) < 2.4e-5


class Two(keras.Model):
    """A loss over what a mask leaves and one over rows, each with its own optimizer."""

    def __init__(self, make):
        super().__init__()
        self.networks = [keras.Sequential([keras.layers.Dense(1)]) for _ in range(2)]
        self.losses_of = [
            keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            keras.losses.MeanSquaredError(),
        ]
        self.own = [make(), make()]
        for network, optimizer in zip(self.networks, self.own, strict=True):
            network.build((None, LENGTH))
            optimizer.build(network.trainable_variables)

    def train_step(self, data):
        x, y, weights = data
        parts = zip(self.networks, self.losses_of, self.own, strict=True)
        for (network, loss_of, optimizer), own in zip(
            parts, (weights, None), strict=True
        ):
            with tf.GradientTape() as tape:
                loss = loss_of(y, network(x), sample_weight=own)
            # Only looked at: no gradient flows through it.
            keras.losses.MeanAbsoluteError()(y, network(x))
            trained = network.trainable_variables
            optimizer.apply(tape.gradient(loss, trained), trained)
        return {"steps": tf.ones([])}


def trained_apart(replicas, rows, make):
    strategy = make_strategy(replicas).scope() if replicas else contextlib.nullcontext()
    with strategy:
        keras.utils.set_random_seed(1)
        model = Two(make)
        model.compile(jit_compile=False)
    x = TEXTS.astype("float32") / WORDS
    y, weights = TARGETS["class"], (LENGTHS / LENGTH).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(rows)
    model.fit(data, verbose=0)
    return model.get_weights()


def test_each_optimizer_weighs_by_its_own_losses():
    def accumulating():
        return tfdp.DistributedOptimizer(keras.optimizers.SGD(0.5), accumulate_steps=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        own = trained_apart(2, BATCH // 2, accumulating)
    one_device = trained_apart(None, BATCH, lambda: keras.optimizers.SGD(0.5))
    # As above; weighed by the other one's denominator 1e-2 off.
    assert largest(own, one_device) < 2.4e-5


def summed(replicas, rows, regularizer=None, fewer=0, **options):
    """A network whose loss is a sum over the rows."""
    with make_strategy(replicas).scope() if options else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(1, kernel_regularizer=regularizer)
        model = keras.Sequential([keras.Input((LENGTH,)), layer])
        optimizer = keras.optimizers.SGD(0.01)
        if options:
            optimizer = tfdp.DistributedOptimizer(optimizer, **options)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile(optimizer, loss, jit_compile=False)
    x, y = TEXTS.astype("float32") / WORDS, TARGETS["class"]
    last = ROWS - fewer
    model.fit(x[:last], y[:last], batch_size=rows, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {"accumulate_steps": 2}),
        (2, {"accumulate_steps": 2}),
        (2, {"accumulate_steps": 3}),
        (3, {"sync": tfdp.sync.DiLoCo(every=2, start_step=100, across="replicas")}),
    ],
)
def test_sums_are_added_up(replicas, options):
    steps = options.get("accumulate_steps", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        own = summed(replicas, BATCH // steps, fewer=7 if steps == 1 else 0, **options)
    one_device = summed(1, BATCH, fewer=7 if steps == 1 else 0)
    # Updates of 0.01 with gradients of some 10 (means of K sums: 1 / K of that), each a
    # sum of 12 numbers that are rounded to u: far below 4 * 0.1 * 12 u = 3e-7, and the
    # weights are rounded to 6e-8 each time.
    assert largest(own, one_device) < 1e-6


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"sync": SYNC}])
def test_a_penalty_beside_a_sum_is_told(options):
    with pytest.warns(LocalMeanWarning, match="a loss is a sum over rows"):
        summed(2, BATCH, regularizer="l2", **options)


class Own(keras.Model):
    """A loss that the step takes itself, in one way or another."""

    def __init__(self, way, rows):
        super().__init__()
        self.network, self.way, self.rows = keras.layers.Dense(1), way, rows
        self.mean_of = keras.losses.MeanSquaredError()

    def call(self, x):
        return self.network(x)

    def loss_of(self, x, y):
        predicted = self.network(x)
        if self.way == "noise":
            made = self.network(tf.random.normal((tf.shape(x)[0], LENGTH)))
            other = self.mean_of(tf.ones_like(made), made)
            return self.mean_of(y, predicted) + other
        if self.way == "compiled":
            return self.compute_loss(x, y, predicted) / self.rows
        squares = tf.reduce_sum((y - predicted) ** 2)
        if self.way == "before":
            return tfdp.losses.local_sum(squares / self.rows)
        return tfdp.losses.local_sum(squares) / self.rows

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        trained = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return {"steps": tf.ones([])}


def divided_by_hand(way, replicas, rows):
    with make_strategy(replicas).scope() if replicas else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        model = Own(way, rows)
        model.network.build((None, LENGTH))
        model.built = True
        optimizer = keras.optimizers.SGD(0.01)
        if replicas:
            optimizer = tfdp.DistributedOptimizer(optimizer, accumulate_steps=2)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile(optimizer, loss if way == "compiled" else None, jit_compile=False)
    x, y = TEXTS.astype("float32") / WORDS, TARGETS["class"]
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("way", ["compiled", "before", "behind"])
def test_sums_that_a_step_divides_are_means(way):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        own = divided_by_hand(way, 2, BATCH // 2)
    # As in `test_sums_are_added_up`.
    assert largest(own, divided_by_hand(way, 0, BATCH)) < 1e-6


def test_as_many_numbers_that_are_of_no_row_are_not_suspected():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        divided_by_hand("noise", 2, BATCH // 2)
