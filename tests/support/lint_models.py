"""Programs of the table in `lint_programs`: towers, `compute_loss`, metrics."""

import functools

import keras
import tensorflow as tf

from tests.support.lint_layers import lookup
from tests.support.lint_programs import (
    CLASSES,
    WIDTH,
    Wrapped,
    add,
    cross_entropy,
    dense,
    fitted,
    of_rows,
    rows_and_anchors,
    rows_and_labels,
    rows_and_targets,
    summed,
    words_and_items,
)
from tfdp.losses import all_rows, local_mean, own_rows

ops = keras.ops
layers = keras.layers


# Two towers: each query's item against the other items of the batch.


def hashed():
    buckets = layers.Hashing(num_bins=11)
    return [buckets, layers.Embedding(11, WIDTH), layers.GlobalMaxPooling1D()]


QUERIES = {
    "embedding": lambda: [layers.Embedding(20, WIDTH), layers.Flatten()],
    "dense": lambda: [layers.CategoryEncoding(20, "multi_hot"), layers.Dense(WIDTH)],
    "lookup": lookup,
    "hash": hashed,
    "GRU": lambda: [layers.Embedding(20, WIDTH), layers.GRU(WIDTH)],
    "LSTM": lambda: [layers.Embedding(20, WIDTH), layers.LSTM(WIDTH)],
    "convolution": lambda: [
        layers.Embedding(20, WIDTH),
        layers.Conv1D(WIDTH, 3, activation="relu"),
        layers.GlobalMaxPooling1D(),
    ],
}


class Towers(keras.Model):
    """As the tutorials of recommenders have it: the loss is within the model."""

    def __init__(self, query, of_all):
        super().__init__()
        self.query = keras.Sequential([*QUERIES[query](), layers.Dense(WIDTH)])
        self.item = layers.Embedding(20, WIDTH)
        self.of_all = of_all
        self.of_pairs = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, words):
        return self.query(words)

    def build(self, shape):
        self.item.build((None,))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **more):
        items = self.item(y)
        labels = ops.arange(ops.shape(y)[0])
        if self.of_all:
            labels = own_rows(ops.arange(ops.shape(all_rows(items))[0]), y)
            items = all_rows(items)
        return self.of_pairs(labels, ops.matmul(y_pred, ops.transpose(items)))


def retrieval(query, of_all=False):
    def build():
        model = Towers(query, of_all)
        model.build((None, 5))
        return model

    return lambda strategy: fitted(strategy, build, data=words_and_items())


for _name in QUERIES:
    add(f"towers: {_name}", "warn", retrieval(_name), "all_rows")
for _name in ("dense", "lookup"):
    add(f"towers: {_name}, fixed", "exact", retrieval(_name, True))


# `compute_loss` of one's own.


def with_compute_loss(function, loss=cross_entropy, data=rows_and_labels, **options):
    """`function` takes the model, Keras' `compute_loss`, y and the predictions."""

    class Model(Wrapped):
        outputs_of_inner = options.pop("outputs", CLASSES)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **more):
            keras_loss = functools.partial(super().compute_loss, x)
            return function(self, keras_loss, y, y_pred)

    return lambda strategy: fitted(strategy, Model, loss and loss(), data(), **options)


def detector(total):
    """Weights of the anchors: 1 / number of positive anchors in the batch."""

    def compute(model, keras_loss, y, p):
        positive = ops.cast(y > 0.5, "float32")
        weights = positive / ops.maximum(total(ops.sum(positive)), 1.0)
        return keras_loss(y[..., None], p[..., None], weights)

    return compute


def detection(total):
    return with_compute_loss(
        detector(total),
        functools.partial(keras.losses.Huber, reduction="sum"),
        rows_and_anchors,
        outputs=5,
        rate=0.05,
    )


def with_penalty(scale):
    def compute(model, keras_loss, y, p):
        decay = sum(ops.sum(ops.square(w)) for w in model.trainable_variables)
        return keras_loss(y, p) + scale(0.01 * decay)

    return compute


def sure(scale):
    """A penalty on sure predictions, whose mean is taken by hand."""

    def compute(model, keras_loss, y, p):
        entropy = -ops.sum(ops.softmax(p) * ops.log_softmax(p), axis=-1)
        return keras_loss(y, p) - scale(0.1 * ops.mean(entropy))

    return compute


def normalised_weights(gather):
    def compute(model, keras_loss, y, p):
        weights = 1.0 + ops.cast(y, "float32")
        return keras_loss(y, p, weights / ops.mean(gather(weights)))

    return compute


def by_hand(scale):
    return lambda model, keras_loss, y, p: scale(tf.reduce_mean(of_rows(y, p)))


def two_objects(model, keras_loss, y, p):
    """A mean of two Keras losses, one of them of softened predictions, scaled."""
    soft = keras.losses.KLDivergence()
    right = ops.one_hot(y, CLASSES)
    both = cross_entropy()(y, p) + 3.0 * soft(right, ops.softmax(p / 2))
    return 0.5 * both


def masked(model, keras_loss, y, p):
    """Rows of class 0 do not count, among the others is the mean."""
    chosen = y > 0
    return cross_entropy()(tf.boolean_mask(y, chosen), tf.boolean_mask(p, chosen))


COMPUTED = {
    "penalty": ("warn", with_compute_loss(with_penalty(lambda x: x)), "local_mean"),
    "penalty, fixed": ("exact", with_compute_loss(with_penalty(local_mean)), None),
    "sure": ("warn", with_compute_loss(sure(lambda x: x)), "local_mean"),
    "sure, fixed": ("exact", with_compute_loss(sure(local_mean)), None),
    "mean by hand": (
        "warn",
        with_compute_loss(by_hand(lambda x: x), None),
        "local_mean",
    ),
    "mean by hand, fixed": (
        "exact",
        with_compute_loss(by_hand(local_mean), None),
        None,
    ),
    "weights normalised": (
        "warn",
        with_compute_loss(normalised_weights(lambda x: x)),
        "all_sum|all_rows",
    ),
    "weights normalised, fixed": (
        "exact",
        with_compute_loss(normalised_weights(all_rows)),
        None,
    ),
    "two Keras losses": ("exact", with_compute_loss(two_objects, None), None),
    "mean of chosen rows": ("exact", with_compute_loss(masked, None), None),
    "detector": ("warn", detection(lambda count: count), "all_sum|all_rows"),
    "detector, fixed": ("exact", detection(summed), None),
}
for _name, (_kind, _run, _fix) in COMPUTED.items():
    add(f"compute_loss: {_name}", _kind, _run, _fix)


# Metrics that are given to `compile`.


def with_metric(make, data=rows_and_labels, loss=cross_entropy):
    return lambda strategy: fitted(
        strategy, dense, loss(), data(), metrics=lambda: [make()]
    )


def rmse(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def rmse_of_all(y, p):
    return rmse(all_rows(y), all_rows(p))


def accuracy(y, p):
    hit = ops.cast(ops.argmax(p, -1), y.dtype) == ops.reshape(y, (-1,))
    return ops.mean(ops.cast(hit, "float32"))


class FScore(keras.metrics.Metric):
    """Counts over all rows; the quotient is taken in `result`."""

    def __init__(self):
        super().__init__(name="f_score")
        self.hits = self.add_variable((), "zeros", name="hits")
        self.all = self.add_variable((), "zeros", name="all")

    def update_state(self, y, p, sample_weight=None):
        right = ops.cast(ops.reshape(y, (-1,)) == 1, "float32")
        found = ops.cast(ops.argmax(p, -1) == 1, "float32")
        self.hits.assign_add(ops.sum(right * found))
        self.all.assign_add(ops.sum(right) + ops.sum(found))

    def result(self):
        return 2 * self.hits / (self.all + 1e-6)


class Largest(keras.metrics.Metric):
    """The largest prediction of the epoch."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(p)))

    def result(self):
        return self.largest


class Error(keras.metrics.Mean):
    """A subclass of Mean with a number for each row."""

    def update_state(self, y, p, sample_weight=None):
        return super().update_state(of_rows(y, p), sample_weight)


def mse():
    return keras.losses.MeanSquaredError()


METRICS = {
    "root, function": ("warn", with_metric(lambda: rmse, rows_and_targets, mse)),
    "root, fixed": ("exact", with_metric(lambda: rmse_of_all, rows_and_targets, mse)),
    "running maximum": ("warn", with_metric(Largest)),
    "mean, function": ("exact", with_metric(lambda: accuracy)),
    "F score class": ("exact", with_metric(FScore)),
    "subclass of Mean": ("exact", with_metric(Error)),
}
for _name, (_kind, _run) in METRICS.items():
    _fix = "all_rows" if _kind == "warn" else None
    add(f"metric: {_name}", _kind, _run, _fix)
