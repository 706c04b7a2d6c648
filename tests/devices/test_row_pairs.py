"""Rows that a loss pairs with others: told of where those are a replica's own."""

import warnings

import keras
import pytest
import tensorflow as tf

from tests.support.conformance_fits import rows
from tests.support.parity import make_strategy
from tfdp.errors import LocalMeanWarning
from tfdp.losses import all_rows, local_mean

ops = keras.ops


def contrastive(scores):
    """Each row's own partner against all others."""
    labels = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, scores, True)


def labels_of(y):
    return ops.cast(ops.reshape(y, (-1,)), "float32")


def equal_labels(y, p):
    same = ops.cast(labels_of(y)[:, None] == labels_of(y)[None, :], p.dtype)
    return ops.mean(same, axis=1) * ops.sum(p, axis=-1)


def distances(y, p):
    between = ops.expand_dims(p, 1) - ops.expand_dims(p, 0)
    return ops.sum(ops.square(between), axis=(1, 2))


def of_all(y, p):
    whole = all_rows(p)
    return local_mean(ops.mean(contrastive(ops.matmul(whole, ops.transpose(whole)))))


PAIRED = {
    "transposed": lambda y, p: contrastive(ops.matmul(p, ops.transpose(p))),
    "transpose_b": lambda y, p: contrastive(tf.matmul(p, p, transpose_b=True)),
    "normed": lambda y, p: contrastive(
        ops.matmul(ops.normalize(p), ops.transpose(ops.normalize(p)))
    ),
    "einsum": lambda y, p: contrastive(ops.einsum("id,jd->ij", p, p)),
    "labels": equal_labels,
    "distances": distances,
    "outer": lambda y, p: ops.sum(ops.outer(labels_of(y), labels_of(y)), -1) * p[:, 0],
}
APART = {
    "of all": of_all,
    "own with all": lambda y, p: ops.mean(
        ops.matmul(p, ops.transpose(all_rows(p))), axis=-1
    ),
    "diagonal": lambda y, p: tf.linalg.diag_part(tf.matmul(p, p, transpose_b=True)),
    "each by itself": lambda y, p: ops.einsum("id,id->i", p, p),
    "weighted": lambda y, p: ops.sum(labels_of(y)[:, None] * p, axis=-1),
    "columns": lambda y, p: ops.sum(ops.einsum("bi,bj->bij", p, p), axis=(1, 2)),
    "by its own mean": lambda y, p: ops.sum(
        ops.square(p[:, None, :] - ops.mean(p, axis=-1)[:, None, None]), axis=(1, 2)
    ),
    "classes": lambda y, p: ops.sum(
        ops.cast(labels_of(y)[:, None] == ops.arange(5.0)[None, :], p.dtype) * p, -1
    ),
    "keras": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
}


def two_views(y, p):
    both = ops.normalize(ops.concatenate([p, 1.1 * p], axis=0))
    scores = ops.matmul(both, ops.transpose(both))
    return contrastive(scores)[: ops.shape(p)[0]]


PAIRED["two views"] = two_views


def encoder():
    layers = keras.layers
    x = inputs = keras.Input((12,))
    x = layers.Reshape((4, 3, 1))(x)
    x = layers.Conv2D(4, 2, activation="relu")(layers.ZeroPadding2D((0, 1))(x))
    x = layers.MaxPooling2D((2, 1))(layers.BatchNormalization()(x))
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(5)(x))


def of_tokens():
    layers = keras.layers
    x = inputs = keras.Input((12,))
    x = layers.Dense(6, "relu")(layers.Reshape((4, 3))(x))
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))


def attending():
    layers = keras.layers
    x = inputs = keras.Input((12,))
    x = layers.Reshape((4, 3))(x)
    x = layers.MultiHeadAttention(2, 2)(x, x)
    x = layers.GRU(4)(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(5)(x))


def warned(loss, build, count=13, strategy=None, batch_size=8):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with (strategy or make_strategy(2)).scope():
            keras.utils.set_random_seed(0)
            model = build()
            model.compile(keras.optimizers.SGD(0.01), loss)
        model.fit(**rows(count), batch_size=batch_size, verbose=0)
    return [str(w.message) for w in told if w.category is LocalMeanWarning]


# Even batches, whose rows are known, and a last one with fewer.
@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("count", [16, 13])
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_own_rows_are_told_of(name, count):
    (told,) = warned(PAIRED[name], encoder, count)
    assert "rows are paired with all rows" in told
    assert "all_rows" in told


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("build", [encoder, attending])
@pytest.mark.parametrize("name", APART)
def test_what_is_no_pair_of_own_rows_is_not(name, build):
    assert warned(APART[name], build) == []


@pytest.mark.parametrize("count", [16, 13])
def test_pairs_of_means_of_tokens_are_told_of(count):
    (told,) = warned(PAIRED["transposed"], of_tokens, count)
    assert "rows are paired" in told


def machine():
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(4)(inputs)
    squares = ops.reshape(ops.sum(hidden * hidden, 1), (-1, 1))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs) + squares)


# With a row for each replica nothing tells rows from columns.
@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_factorization_machine_pairs_no_rows(batch_size):
    assert warned("mse", machine, 16, batch_size=batch_size) == []


def test_circle_pairs_rows():
    (told,) = warned(keras.losses.Circle(), encoder)
    assert "rows are paired" in told


def test_on_one_replica_all_rows_are_there():
    assert warned(PAIRED["transposed"], encoder, strategy=make_strategy(1)) == []
