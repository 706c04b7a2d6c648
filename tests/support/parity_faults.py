"""Models that TensorFlow's own strategy trains wrongly, each with its known cause.

Its sums go through one device here, because its collectives abort when strategies of
different size meet in one process.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data

EVEN, UNEVEN = 16, 13
FEATURES, CLASSES = 6, 3


def rows(count):
    return classification_data(samples=count, features=FEATURES, classes=CLASSES)


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(*layers, optimizer=None, loss=None, model_class=keras.Sequential, **options):
    """A `build` for a small classifier with `layers` before its last one."""

    def build():
        model = model_class(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(7, activation="tanh", name="first"),
                *[make() for make in layers],
                keras.layers.Dense(CLASSES, name="last"),
            ]
        )
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9),
            loss or cross_entropy(),
            **options,
        )
        return model

    return build


def token_model():
    """Sequences of different length: the loss is a mean over unmasked steps."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Embedding(9, 4, mask_zero=True, name="tokens"),
            keras.layers.Dense(9),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), cross_entropy())
    return model


def token_rows(count=EVEN):
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 9, (count, 5))
    lengths = rng.integers(1, 6, (count, 1))
    lengths[: count // 2] = 1  # the first replica has far fewer tokens
    tokens[np.arange(5) >= lengths] = 0
    return tokens, rng.integers(0, 9, (count, 5))


class PlainMean(keras.Sequential):
    """A train_step of its own whose loss is a mean over the replica's rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
            loss = self.share_of(tf.reduce_mean(losses))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def share_of(self, loss):
        return loss


class LocalMean(PlainMean):
    def share_of(self, loss):
        return tfdp.losses.local_mean(loss)


class DividedTwice(PlainMean):
    def share_of(self, loss):
        return loss / tf.distribute.get_strategy().num_replicas_in_sync ** 2


class CoupledRows(PlainMean):
    """The loss looks at the hardest row of the batch."""

    def train_step(self, data):
        x, y = data
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
            loss = tf.reduce_max(losses) / replicas
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class SignedBeforeTheSum(keras.optimizers.SGD):
    """Takes the sign of each replica's own gradient."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.sign(g) for g in grads], trainable_variables)


def scalar_loss(y_true, y_pred):
    labels = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y_pred)
    )


def normalised_first(layer):
    """Normalises inputs whose mean is large against their deviation."""

    def build():
        layers = [keras.Input((FEATURES,)), layer(), keras.layers.Dense(CLASSES)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), cross_entropy())
        return model

    return build


def far_rows(count):
    x, y = rows(count)
    return (1000 + 0.1 * x).astype("float32"), y


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.1, **options)


def batch_norm(**options):
    return lambda: keras.layers.BatchNormalization(name="norm", **options)


@dataclasses.dataclass
class Case:
    """What is trained, and the causes that must be named: (name, where)."""

    build: object
    data: object = dataclasses.field(default_factory=lambda: rows(2 * EVEN))
    causes: tuple = ()
    options: dict = dataclasses.field(default_factory=dict)
    exact_with_tfdp: bool = True


def weighted_rows(count=2 * EVEN):
    weights = np.random.default_rng(1).uniform(0.1, 3, count).astype("float32")
    weights[: count // 2] *= 0.1
    return *rows(count), weights


UNEVEN_ROWS = ("uneven batches", ("batch 2 of 13 rows",))
PER_REPLICA_NORM = ("batch normalization per replica", ("norm",))
SUM_OF_MEANS = "sum of local means"

FAULTS = {
    "uneven-last-batch": Case(mlp(), rows(EVEN + UNEVEN), (UNEVEN_ROWS,)),
    "clipnorm": Case(
        mlp(optimizer=sgd(clipnorm=0.05)),
        causes=(("clipping before the reduction", ("clipnorm=0.05",)),),
    ),
    "clipping-and-uneven": Case(
        mlp(optimizer=sgd(global_clipnorm=0.05)),
        rows(EVEN + UNEVEN),
        (UNEVEN_ROWS, ("clipping before the reduction", ("global_clipnorm=0.05",))),
    ),
    "masked-loss": Case(token_model, token_rows(), (("means of means", ("tokens",)),)),
    "mean-with-sample-weight": Case(
        mlp(
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
        ),
        weighted_rows(),
        (("means of means", ("sample_weight",)),),
    ),
    "batch-norm": Case(
        mlp(batch_norm()), causes=(PER_REPLICA_NORM,), exact_with_tfdp=False
    ),
    "keras-synchronized-batch-norm-far-from-zero": Case(
        normalised_first(batch_norm(synchronized=True)),
        far_rows(2 * EVEN),
        (("cancellation in synchronized batch normalization", ("norm",)),),
        exact_with_tfdp=False,
    ),
    "train-step-with-plain-mean": Case(
        mlp(model_class=PlainMean),
        causes=((SUM_OF_MEANS, ("PlainMean.train_step",)),),
        exact_with_tfdp=False,
    ),
    "plain-mean-with-adam": Case(
        mlp(model_class=PlainMean, optimizer=lambda: keras.optimizers.Adam(0.01)),
        causes=((SUM_OF_MEANS, ("PlainMean.train_step",)),),
        exact_with_tfdp=False,
    ),
    "scalar-loss-function": Case(
        mlp(loss=scalar_loss),
        causes=((SUM_OF_MEANS, ("loss scalar_loss",)),),
        exact_with_tfdp=False,
    ),
    "divided-twice": Case(
        mlp(model_class=DividedTwice),
        causes=(("divided by the replicas twice", ("DividedTwice.train_step",)),),
        exact_with_tfdp=False,
    ),
    "coupled-rows": Case(
        mlp(model_class=CoupledRows),
        causes=(("rows of a batch depend on each other", ()),),
        exact_with_tfdp=False,
    ),
    "optimizer-looks-before-the-sum": Case(
        mlp(optimizer=lambda: SignedBeforeTheSum(0.01)),
        causes=(("the optimizer", ("SignedBeforeTheSum",)),),
        exact_with_tfdp=False,
    ),
    "dropout": Case(
        mlp(lambda: keras.layers.Dropout(0.3, name="dropped")),
        causes=(("random layers", ("dropped",)),),
        options={"random_layers": "keep"},
        exact_with_tfdp=False,
    ),
}
