"""KerasRS: ranking losses and metrics, layers of retrieval, embeddings of features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_rs
import numpy as np

import tfdp
from benchmarks.downstream.cases import (
    BATCH,
    EPOCHS,
    ROWS,
    Numbers,
    draw,
    fit,
    integers,
)

layers, losses = keras_rs.layers, keras_rs.losses
ITEMS, WIDTH, WORDS = 6, 8, 40


def _ranked(loss: keras.losses.Loss) -> Numbers:
    """Lists of six items, some of them masked."""
    entry = keras.Input((ITEMS, WIDTH))
    hidden = keras.layers.Dense(16, "relu")(entry)
    # These losses do not change with a bias: its gradient is the rounding alone, which
    # Adam would make as large as any other.
    score = keras.layers.Dense(1, use_bias=False)(hidden)
    scores = keras.ops.squeeze(score, -1)
    model = keras.Model(entry, scores)
    metrics = [keras_rs.metrics.NDCG(k=3), keras_rs.metrics.MeanReciprocalRank()]
    model.compile(keras.optimizers.Adam(1e-3), loss, weighted_metrics=metrics)
    relevance = integers(4, ROWS, ITEMS).astype("float32") - 1
    return fit(model, draw(ROWS, ITEMS, WIDTH), relevance)


def pairwise_logistic_loss() -> Numbers:
    return _ranked(losses.PairwiseLogisticLoss())


def pairwise_hinge_loss() -> Numbers:
    return _ranked(losses.PairwiseHingeLoss())


def list_mle_loss() -> Numbers:
    return _ranked(losses.ListMLELoss())


def dlrm_with_dot_interaction() -> Numbers:
    dense, sparse = keras.Input((WIDTH,)), keras.Input((3,), dtype="int32")
    bottom = keras.layers.Dense(WIDTH, "relu")(dense)
    rows = keras.layers.Embedding(WORDS, WIDTH)(sparse)
    features = [bottom, *(rows[:, at] for at in range(3))]
    x = keras.layers.Concatenate()([bottom, layers.DotInteraction()(features)])
    model = keras.Model([dense, sparse], keras.layers.Dense(1)(x))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adagrad(0.01), loss, metrics=["mae"])
    return fit(
        model, [draw(ROWS, WIDTH), integers(WORDS, ROWS, 3)], integers(3, ROWS, 1) - 1
    )


def dcn_with_feature_cross() -> Numbers:
    entry = keras.Input((WIDTH,))
    x = layers.FeatureCross(projection_dim=4)(entry, entry)
    x = layers.FeatureCross(projection_dim=4)(entry, x)
    model = keras.Model(entry, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return fit(model, draw(ROWS, WIDTH), draw(ROWS, 1))


def embed_reduce_of_padded_bags() -> Numbers:
    entry = keras.Input((5,), dtype="int32")
    x = layers.EmbedReduce(WORDS, WIDTH, combiner="mean")(entry)
    model = keras.Model(entry, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return fit(model, integers(WORDS, ROWS, 5), draw(ROWS, 1))


def distributed_embedding() -> Numbers:
    table = layers.TableConfig("words", WORDS, WIDTH, placement="default_device")
    feature = layers.FeatureConfig("word", table, (None,), (None, WIDTH))
    entry = keras.Input((), dtype="int32")
    x = layers.DistributedEmbedding({"word": feature})({"word": entry})["word"]
    model = keras.Model(entry, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return fit(model, integers(WORDS, ROWS), draw(ROWS, 1))


class TwoTowers(keras.Model):
    """A query tower and a candidate tower; each row's negatives are the other rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query = keras.layers.Embedding(WORDS, WIDTH)
        self.candidate = keras.layers.Embedding(WORDS, WIDTH)
        self.hits = layers.RemoveAccidentalHits()
        self.hard = layers.HardNegativeMining(2)

    def call(self, inputs):
        return self.query(inputs["user"]), self.candidate(inputs["item"])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        queries, candidates = y_pred
        logits = keras.ops.matmul(queries, keras.ops.transpose(candidates))
        labels = keras.ops.eye(keras.ops.shape(logits)[0])
        logits = self.hits(logits, labels, x["item"])
        logits, labels = self.hard(logits, labels)
        loss = keras.ops.categorical_crossentropy(labels, logits, from_logits=True)
        return keras.ops.mean(loss)


def _two_towers(change: Callable[[keras.Model], Any]) -> Numbers:
    model = TwoTowers()
    model.compile(keras.optimizers.Adam(1e-2))
    change(model)
    x = {"user": integers(WORDS, ROWS), "item": integers(WORDS - 1, ROWS)}
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return dict(model.fit(x, np.zeros(ROWS), **options).history)


def in_batch_negatives_of_two_towers() -> Numbers:
    """Replicas see the negatives of their own rows only, which tfdp has to tell."""
    return _two_towers(lambda model: None)


def in_batch_negatives_on_all_rows() -> Numbers:
    return _two_towers(tfdp.losses.on_all_rows)


CASES = {
    function.__name__: function
    for function in (
        pairwise_logistic_loss,
        pairwise_hinge_loss,
        list_mle_loss,
        dlrm_with_dot_interaction,
        dcn_with_feature_cross,
        embed_reduce_of_padded_bags,
        distributed_embedding,
        in_batch_negatives_of_two_towers,
        in_batch_negatives_on_all_rows,
    )
}
