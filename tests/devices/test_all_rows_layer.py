"""`tfdp.layers.AllRows`: a layer that sees the rows of all replicas."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import UNIT_ROUND_OFF, make_strategy
from tfdp.errors import ConfigurationError

ops = keras.ops

# Six steps of rate 0.1, in each of which two orders of a gradient's sums differ by
# 2 n u A (docs/notes/exactness.md): n is at most 12 rows of 8 entries, A below 20.
BOUND = 6 * 0.1 * 2 * 12 * 8 * 20 * UNIT_ROUND_OFF


@functools.cache
def strategy_of(replicas):
    return make_strategy(replicas)


def batches(rows, batch=12):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 6)) * draw.uniform(0.3, 2.0, size=(rows, 1))
    y = np.sin(x.sum(axis=1, keepdims=True))
    rows = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y))
    return rows.batch(batch)


def trained(replicas, make, rows, wrap=tfdp.layers.AllRows):
    strategy = strategy_of(replicas) if replicas else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, "tanh"), wrap(make()), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.1, 0.5), "mse", jit_compile=False)
    history = model.fit(batches(rows), epochs=2, verbose=0).history
    evaluated = model.evaluate(batches(rows), verbose=0)
    found = [np.asarray(v) for v in model.weights if "float" in v.dtype]
    return found, history["loss"][-1], evaluated, model


@functools.cache
def alone(make, rows):
    return trained(None, make, rows, wrap=lambda layer: layer)[:3]


def assert_one_devices(make, replicas, rows, bound=BOUND, wrap=tfdp.layers.AllRows):
    weights, loss, evaluated = alone(make, rows)
    found, found_loss, found_evaluated, _ = trained(replicas, make, rows, wrap)
    for own, expected in zip(found, weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=bound)
    np.testing.assert_allclose([found_loss, found_evaluated], [loss, evaluated], 2e-5)


def normalization():
    return keras.layers.BatchNormalization(momentum=0.5)


@keras.saving.register_keras_serializable("tests")
class BetweenRows(keras.layers.Layer):
    """Attention between rows after dropout, the balance of a mixture, and a mean of
    features that it keeps."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drop = keras.layers.Dropout(0.5, seed=3)

    def build(self, shape):
        self.experts = self.add_weight(shape=(shape[-1], 4))
        self.kept = self.add_weight(
            shape=(4,), initializer="zeros", trainable=False, name="kept"
        )
        self.last = self.add_weight(
            shape=(3, shape[-1]), initializer="zeros", trainable=False, name="last"
        )

    def call(self, x, training=None):
        x = self.drop(x, training=training)
        scores = ops.softmax(ops.matmul(x, self.experts))
        load = ops.mean(scores, axis=0)
        if training:
            self.kept.assign(0.9 * self.kept + 0.1 * load)
            self.last.assign(ops.concatenate([x[:1], self.last[:-1]], axis=0))
        self.add_loss(ops.sum(load * ops.log(load)))
        alike = ops.softmax(0.3 * ops.matmul(x, ops.transpose(x)))
        mixed = ops.matmul(scores, ops.transpose(self.experts))
        queue = ops.mean(ops.matmul(x, ops.transpose(self.last)), axis=1, keepdims=True)
        return ops.matmul(alike, x) + mixed + self.kept[:1] + 0.1 * queue


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("rows", [24, 21, 25])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("make", [normalization, BetweenRows])
def test_a_layer_has_the_numbers_of_one_device(make, replicas, rows):
    assert_one_devices(make, replicas, rows)


@keras.saving.register_keras_serializable("tests")
class Pairs(keras.layers.Layer):
    """A contrastive loss of its input; it states no shape, and has no `build`."""

    def __init__(self, units=None, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(units) if units else None

    def call(self, x):
        x = x if self.inner is None else self.inner(x)
        scores = ops.matmul(x, ops.transpose(x))
        log = ops.log_softmax(0.3 * scores, axis=1)
        self.add_loss(-ops.mean(ops.diagonal(log)))
        return x


class WithShape(Pairs):
    def compute_output_shape(self, shape):
        return shape[0], 5


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "make",
    [
        Pairs,
        functools.partial(Pairs, 5),
        functools.partial(WithShape, 5),
        lambda: keras.Sequential([keras.layers.Dense(5), Pairs()]),
    ],
    ids=["loss alone", "layer within", "shape", "sequential"],
)
def test_a_layer_that_has_only_a_call(make):
    def functional(layer):  # which asks for shapes; a Sequential puts that off
        inputs = keras.Input((8,))
        return keras.Model(inputs, tfdp.layers.AllRows(layer)(inputs))

    assert_one_devices(make, 2, 21, wrap=functional)


def test_without_it_the_numbers_are_others():
    weights, _, _ = alone(normalization, 21)
    found, *_ = trained(2, normalization, 21, wrap=lambda layer: layer)
    pairs = zip(found, weights, strict=True)
    assert max(np.max(np.abs(own - expected)) for own, expected in pairs) > 1e-3


def test_on_all_rows_and_all_rows_together():
    def make(strategy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(8), tfdp.layers.AllRows(normalization())]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile(
                keras.optimizers.SGD(0.1),
                lambda y, p: ops.std(p - ops.mean(y)) - ops.mean(ops.max(p, axis=0)),
                jit_compile=False,
            )
        tfdp.losses.on_all_rows(model)
        model.fit(batches(21), epochs=2, verbose=0)
        return [np.asarray(v) for v in model.weights if "float" in v.dtype]

    for own, expected in zip(make(strategy_of(3)), make(None), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=BOUND)


def test_masks_travel_with_their_rows():
    @keras.saving.register_keras_serializable("tests")
    class MaskedMean(keras.layers.Layer):
        """Words minus the mean of the batch's words in their place."""

        supports_masking = True

        def call(self, x, mask=None):
            weights = ops.cast(mask, x.dtype)[..., None]
            count = ops.sum(weights, axis=0, keepdims=True) + 1
            return x - ops.sum(weights * x, axis=0, keepdims=True) / count

    def run(strategy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(0)
            model = keras.Sequential(
                [
                    keras.Input((5,), dtype="int32"),
                    keras.layers.Embedding(9, 6, mask_zero=True),
                    tfdp.layers.AllRows(MaskedMean()),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        draw = np.random.default_rng(1)
        words = draw.integers(0, 9, (21, 5))
        words[:, 0] = 1
        rows = tf.data.Dataset.from_tensor_slices((words, draw.random((21, 1))))
        model.fit(rows.batch(12), epochs=2, verbose=0)
        return [np.asarray(v) for v in model.weights]

    for own, expected in zip(run(strategy_of(3)), run(None), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=BOUND)


def test_files_are_read_without_replicas(tmp_path):
    *_, model = trained(2, BetweenRows, 24)
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    x = next(iter(batches(24)))[0]
    np.testing.assert_allclose(read(x), model(x), rtol=0, atol=1e-6)
    assert type(read.layers[1].layer) is BetweenRows


@pytest.mark.parametrize(
    "layer,match",
    [
        (keras.layers.MultiHeadAttention(2, 3), "with one argument"),
        (lambda x: x, "takes a Keras layer"),
        (keras.layers.Dense, r"call it: Dense\(\)"),
    ],
)
def test_what_is_no_layer_of_one_argument_is_refused(layer, match):
    with pytest.raises(ConfigurationError, match=match):
        tfdp.layers.AllRows(layer)


def test_compiled_replicas_are_refused():
    with strategy_of(2).scope():
        layers = [keras.Input((6,)), tfdp.layers.AllRows(normalization())]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", jit_compile=True)
    x, y = np.zeros((12, 6), "float32"), np.zeros((12, 6), "float32")
    with pytest.raises(ConfigurationError, match="jit_compile"):
        model.train_on_batch(x, y)


class BesideTable(keras.layers.Layer):
    """Rows times the rows of a table, which is the same on all replicas."""

    def call(self, inputs):
        x, table = inputs
        return (
            ops.matmul(x - ops.mean(x, axis=0), ops.transpose(table)) / table.shape[0]
        )


class WithTable(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.table = self.add_weight(shape=(6, 5), initializer="glorot_normal")
        self.beside = tfdp.layers.AllRows(BesideTable())

    def call(self, x):
        return self.beside([self.dense(x), 1.0 * self.table])


def test_what_is_the_same_on_all_replicas_is_not_gathered():
    def run(strategy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(0)
            model = WithTable()
            model(np.zeros((2, 6), "float32"))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(batches(21), epochs=2, verbose=0)
        return [np.asarray(v) for v in model.weights]

    for own, expected in zip(run(strategy_of(3)), run(None), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=BOUND)


class Reading(keras.layers.Layer):
    """Reads rows that no argument brings, or a metric that one replica counts."""

    rows = None

    def __init__(self, what):
        super().__init__()
        self.what, self.seen = what, keras.metrics.Mean()

    def call(self, x):
        if self.what == "rows" and self.rows is not None:
            return x + ops.mean(self.rows)
        self.seen.update_state(ops.mean(x))
        return x + self.seen.result()


@pytest.mark.parametrize("what", ["rows", "metric"])
def test_a_layer_that_reads_one_replica_is_refused(what):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.inner = keras.layers.Dense(5), Reading(what)
            self.all_rows = tfdp.layers.AllRows(self.inner)

        def call(self, x):
            x = self.dense(x)
            self.inner.rows = x
            return self.all_rows(x)

    with strategy_of(2).scope():
        model = Model()
        model.compile("sgd", "mse", jit_compile=False)
    match = "reads those of one replica" if what == "rows" else "state of a metric"
    with pytest.raises(ConfigurationError, match=match):
        model.fit(batches(12), verbose=0)
