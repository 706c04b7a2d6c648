"""Every Keras metric over uneven and empty replicas equals one device's.

Keras keeps a metric's state as sums, one per replica, and adds them when the result is
asked for; what is tested is that nothing in tfdp stands in the way.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    dense_model,
    make_strategy,
)

M = keras.metrics
CLASSES = 3
# Rows of each replica, batch by batch: uneven, even, and one of a single row.
BATCHES = {
    2: [(5, 3), (6, 6), (1, 0)],
    4: [(3, 0, 3, 2), (3, 3, 3, 3), (1, 0, 0, 0)],
}
STRATEGIES = {"2": (2, {}), "2x2": (4, {"hierarchy": (2, 2)})}


@dataclasses.dataclass(frozen=True)
class Row:
    """A metric and what it is given.

    Args:
      make: the metric.
      kind: "values", "real", "positive", "sign", "binary", "one_hot", "sparse" or
        "labels".
    """

    make: Callable[[], keras.metrics.Metric]
    kind: str


ROWS = {
    "Mean": Row(M.Mean, "values"),
    "Sum": Row(M.Sum, "values"),
    "MeanSquaredError": Row(M.MeanSquaredError, "real"),
    "RootMeanSquaredError": Row(M.RootMeanSquaredError, "real"),
    "MeanAbsoluteError": Row(M.MeanAbsoluteError, "real"),
    "MeanAbsolutePercentageError": Row(M.MeanAbsolutePercentageError, "positive"),
    "MeanSquaredLogarithmicError": Row(M.MeanSquaredLogarithmicError, "positive"),
    "LogCoshError": Row(M.LogCoshError, "real"),
    "CosineSimilarity": Row(M.CosineSimilarity, "real"),
    "Poisson": Row(M.Poisson, "positive"),
    "R2Score": Row(M.R2Score, "real"),
    "PearsonCorrelation": Row(M.PearsonCorrelation, "real"),
    "ConcordanceCorrelation": Row(M.ConcordanceCorrelation, "real"),
    "Hinge": Row(M.Hinge, "sign"),
    "SquaredHinge": Row(M.SquaredHinge, "sign"),
    "CategoricalHinge": Row(M.CategoricalHinge, "one_hot"),
    "KLDivergence": Row(M.KLDivergence, "one_hot"),
    "Accuracy": Row(M.Accuracy, "labels"),
    "BinaryAccuracy": Row(M.BinaryAccuracy, "binary"),
    "BinaryCrossentropy": Row(M.BinaryCrossentropy, "binary"),
    "AUC": Row(M.AUC, "binary"),
    "Precision": Row(M.Precision, "binary"),
    "Recall": Row(M.Recall, "binary"),
    "PrecisionAtRecall": Row(functools.partial(M.PrecisionAtRecall, 0.6), "binary"),
    "RecallAtPrecision": Row(functools.partial(M.RecallAtPrecision, 0.9), "binary"),
    "SensitivityAtSpecificity": Row(
        functools.partial(M.SensitivityAtSpecificity, 0.5), "binary"
    ),
    "SpecificityAtSensitivity": Row(
        functools.partial(M.SpecificityAtSensitivity, 0.5), "binary"
    ),
    "TruePositives": Row(M.TruePositives, "binary"),
    "TrueNegatives": Row(M.TrueNegatives, "binary"),
    "FalsePositives": Row(M.FalsePositives, "binary"),
    "FalseNegatives": Row(M.FalseNegatives, "binary"),
    "F1Score": Row(functools.partial(M.F1Score, threshold=0.4), "one_hot"),
    "FBetaScore": Row(
        functools.partial(M.FBetaScore, average="macro", beta=2.0), "one_hot"
    ),
    "CategoricalAccuracy": Row(M.CategoricalAccuracy, "one_hot"),
    "CategoricalCrossentropy": Row(M.CategoricalCrossentropy, "one_hot"),
    "TopKCategoricalAccuracy": Row(
        functools.partial(M.TopKCategoricalAccuracy, k=2), "one_hot"
    ),
    "OneHotIoU": Row(
        functools.partial(M.OneHotIoU, CLASSES, target_class_ids=[0, 2]), "one_hot"
    ),
    "OneHotMeanIoU": Row(functools.partial(M.OneHotMeanIoU, CLASSES), "one_hot"),
    "SparseCategoricalAccuracy": Row(M.SparseCategoricalAccuracy, "sparse"),
    "SparseCategoricalCrossentropy": Row(M.SparseCategoricalCrossentropy, "sparse"),
    "SparseTopKCategoricalAccuracy": Row(
        functools.partial(M.SparseTopKCategoricalAccuracy, k=2), "sparse"
    ),
    "IoU": Row(functools.partial(M.IoU, CLASSES, target_class_ids=[1]), "labels"),
    "MeanIoU": Row(functools.partial(M.MeanIoU, CLASSES), "labels"),
    "BinaryIoU": Row(functools.partial(M.BinaryIoU, threshold=0.4), "binary"),
}
# Base classes, which are no metric by themselves.
BASES = {"Metric", "MeanMetricWrapper"}


def test_every_keras_metric_is_in_the_table():
    classes = {
        name for name, value in vars(keras.metrics).items() if isinstance(value, type)
    }
    assert classes == ROWS.keys() | BASES


@functools.cache
def data():
    """By kind (targets, predictions), and the weights; rows of very different size."""
    rng = np.random.default_rng(7)
    rows = sum(map(sum, BATCHES[2]))
    assert rows == sum(map(sum, BATCHES[4]))
    spread = np.geomspace(0.3, 3.0, rows)[rng.permutation(rows), None]
    real = rng.normal(size=(rows, CLASSES)) * spread
    near = real + rng.normal(size=real.shape) * 0.5
    sparse = rng.integers(0, CLASSES, rows)
    one_hot = np.eye(CLASSES)[sparse]
    scores = one_hot + rng.uniform(0.2, 3.0, size=one_hot.shape)
    distribution = scores / scores.sum(axis=1, keepdims=True)
    binary = (rng.random((rows, 1)) > 0.5).astype("float32")
    probability = np.clip(0.3 * binary + 0.7 * rng.random((rows, 1)), 0.01, 0.99)
    labels = np.where(rng.random(rows) > 0.4, sparse, rng.integers(0, CLASSES, rows))
    pairs = {
        "values": (real[:, 0], real[:, 0]),
        "real": (real, near),
        "positive": (np.abs(real) + 0.5, np.abs(near) + 0.1),
        "sign": (np.sign(real), near),
        "binary": (binary, probability),
        "one_hot": (one_hot, distribution),
        "sparse": (sparse, distribution),
        "labels": (sparse, labels),
    }
    weights = rng.uniform(0.1, 2.0, rows)
    return tf.nest.map_structure(lambda a: a.astype("float32"), (pairs, weights))


def update_all(metrics, pairs, weights):
    for name, metric in metrics.items():
        targets, predictions = pairs[ROWS[name].kind]
        if ROWS[name].kind == "values":
            metric.update_state(targets, sample_weight=weights)
        else:
            metric.update_state(targets, predictions, sample_weight=weights)


def make_all():
    return {name: row.make() for name, row in ROWS.items()}


def results_of(metrics):
    return {name: np.asarray(metric.result()) for name, metric in metrics.items()}


@functools.cache
def one_device(weighted):
    metrics = make_all()
    pairs, weights = data()
    update_all(metrics, pairs, weights if weighted else None)
    return results_of(metrics)


@functools.cache
def each_replica_alone(weighted, layout):
    """What every replica would report from its own rows: a missing exchange."""
    replicas, _ = STRATEGIES[layout]
    batches = list(rows_of_parts(BATCHES[replicas]))
    results = []
    for rank in range(replicas):
        rows = np.concatenate([parts[rank] for parts in batches])
        pairs, weights = tf.nest.map_structure(lambda a, rows=rows: a[rows], data())
        metrics = make_all()
        update_all(metrics, pairs, weights if weighted else None)
        results.append(results_of(metrics))
    return results


def rows_of_parts(batches):
    """For each batch, the row numbers of each replica's part."""
    first = 0
    for counts in batches:
        parts = []
        for count in counts:
            parts.append(np.arange(first, first + count))
            first += count
        yield parts


@functools.cache
def on_replicas(weighted, layout):
    replicas, options = STRATEGIES[layout]
    strategy = make_strategy(replicas, **options)
    with strategy.scope():
        metrics = make_all()

    def parts():
        for batch in rows_of_parts(BATCHES[replicas]):
            for rows in batch:
                yield tf.nest.map_structure(lambda a, rows=rows: a[rows], data())

    specification = tf.nest.map_structure(
        lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), data()
    )
    dataset = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_generator(
            parts, output_signature=specification
        )
    )

    def replica_step(pairs, weights):
        update_all(metrics, pairs, weights if weighted else None)

    @tf.function(input_signature=[dataset.element_spec], autograph=False)
    def step(batch):
        strategy.run(replica_step, args=batch)

    for batch in dataset:
        step(batch)
    return results_of(metrics)


@pytest.fixture(autouse=True)
def _clean_session():
    """In the place of the folder's: the results of a run serve many tests."""


SLOW = pytest.mark.slow
RUNS = [
    pytest.param(True, "2", id="weighted-2"),
    pytest.param(False, "2", id="plain-2", marks=SLOW),
    pytest.param(True, "2x2", id="weighted-2x2", marks=SLOW),
    pytest.param(False, "2x2", id="plain-2x2", marks=SLOW),
]


@pytest.mark.worth_seconds(14)
@pytest.mark.filterwarnings("ignore:You are passing weight as `float`")
@pytest.mark.parametrize("weighted, layout", RUNS)
@pytest.mark.parametrize("name", ROWS)
def test_result_equals_one_device(name, weighted, layout):
    expected = one_device(weighted)[name]
    # Sums of 21 rows x 3 numbers in another order, divided: 2 * 63 u relative to sums
    # of magnitudes, which are below ten times the results.
    tolerance = 10 * 2 * 63 * np.finfo("float32").eps / 2 * np.abs(expected).max()
    got = on_replicas(weighted, layout)[name]
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    alone = [results[name] for results in each_replica_alone(weighted, layout)]
    assert max(np.abs(one - expected).max() for one in alone) > 10 * tolerance


def test_fit_and_evaluate_report_them():
    names = ["SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy"]

    def reports(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = dense_model()
            model.compile(
                keras.optimizers.SGD(0.05),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=[ROWS[name].make() for name in names],
                weighted_metrics=[M.SparseCategoricalAccuracy(name="weighted")],
                jit_compile=False,
            )
        x, y = classification_data(samples=21)
        weights = np.linspace(0.1, 3.0, 21).astype("float32")
        history = model.fit(
            x, y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0
        )
        evaluated = model.evaluate(
            x, y, sample_weight=weights, batch_size=8, verbose=0, return_dict=True
        )
        return {**history.history, **evaluated}

    expected, got = reports(None), reports(make_strategy(4))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        # Counts and weights of 21 rows, and the losses of models 1e-6 apart.
        np.testing.assert_allclose(got[key], value, rtol=1e-5)


def test_what_a_metric_has_summed_is_a_number_of_python_and_an_array():
    """Outside of replicas, as of one device: the sum over all of them."""
    strategy = make_strategy(2)
    with strategy.scope():
        mean = keras.metrics.Mean()

    @tf.function
    def step():
        def update():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            mean.update_state(tf.cast([2 * rank + 1, 2 * rank + 2], tf.float32))

        strategy.run(update)

    step()
    assert float(mean.total) == float(mean.total.value) == 1 + 2 + 3 + 4
    assert int(mean.count) == 4
    with strategy.scope():
        inside = np.asarray(mean.total.value)
    assert inside == np.array(mean.total.value, "float64") == 10


class Rows(keras.metrics.Metric):
    """Counts rows, and returns the variable in which it does."""

    def __init__(self, as_dictionary):
        super().__init__(name="rows")
        self.as_dictionary = as_dictionary
        self.rows = self.add_weight(shape=(), initializer="zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return {"rows": self.rows} if self.as_dictionary else self.rows


@pytest.mark.parametrize("as_dictionary", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_metric_may_return_its_variable(replicas, as_dictionary):
    x, y = classification_data(samples=13)
    with make_strategy(replicas).scope():
        model = dense_model()
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[Rows(as_dictionary)],
        )
    history = model.fit(x, y, batch_size=6, verbose=0).history
    assert history["rows"] == [13.0]
    found = model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)
    assert found["rows"] == 13.0
