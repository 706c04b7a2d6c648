"""Losses: the sum of the replicas' gradients is the gradient of the whole batch's loss.

Every Keras loss x every way of weighting, with uneven and empty replicas, in one
`strategy.run` for each way. `test_fits_exact.py` has what only `fit` knows.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses.loss import unscale_loss_for_distribution

from tests.support import conformance_losses as table
from tests.support.parity import (
    UNIT_ROUND_OFF,
    classification_data,
    dense_model,
    make_strategy,
)
from tfdp.errors import ConfigurationError

# Rows of each replica: uneven, an empty one, and one whose rows are all masked.
PARTS = {3: (9, 0, 3), 4: (5, 0, 4, 3)}
STRATEGIES = {"3": (3, {}), "2x2": (4, {"hierarchy": (2, 2)})}

# Every loss with these ways of weighting, which use all that the others use; and these
# losses with every way. The rest is slow.
ALL_LOSSES = ("mean", "masked-sample_weight", "mean_with_sample_weight-masked")
ALL_WEIGHTINGS = ("MeanSquaredError", "SparseCategoricalCrossentropy", "Dice")


def is_covering(weighting, loss, layout):
    return layout == "3" and (weighting in ALL_LOSSES or loss in ALL_WEIGHTINGS)


def traced_with(loss):
    """The losses that are compiled together with `loss`: those as common as it."""
    is_common = loss in ALL_WEIGHTINGS
    return {
        name: row
        for name, row in table.LOSSES.items()
        if (name in ALL_WEIGHTINGS) == is_common
    }


def gradients_of_losses(rows, weighting):
    """A function of a batch: by loss, the gradient and the reported loss."""
    reduction = weighting.get("reduction", "sum_over_batch_size")
    losses = {name: row.make(reduction=reduction) for name, row in rows.items()}

    def step(x, weights, mask, targets):
        results = {}
        for name, row in rows.items():
            weight_matrix = table.kernel()
            with tf.GradientTape() as tape:
                tape.watch(weight_matrix)
                predictions = table.PREDICTIONS[row.predictions](x @ weight_matrix)
                if weighting.get("mask") and name not in table.PER_SAMPLE:
                    predictions._keras_mask = mask
                loss = losses[name](
                    targets[row.targets],
                    predictions,
                    weights_for(name, weights) if weighting.get("weights") else None,
                )
            # Keras' metrics weigh a replica's report by its rows.
            count = tf.cast(tf.shape(x)[0], tf.float32)
            reported = unscale_loss_for_distribution(loss) * count / table.ROWS
            results[name] = tape.gradient(loss, weight_matrix), reported
        return results

    return step


def weights_for(loss, weights):
    """One weight per time step, or per sample where the loss gives one number."""
    return weights[:, 0] if loss in table.PER_SAMPLE else weights


@functools.cache
def batch():
    x, weights, mask = table.inputs()
    kinds = {row.targets for row in table.LOSSES.values()}
    return x, weights, mask, {kind: table.targets_of(kind) for kind in kinds}


def rows_of_batch(rows):
    return tf.nest.map_structure(lambda array: array[rows], batch())


SPECIFICATION = tf.nest.map_structure(
    lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), batch()
)


@functools.cache
def one_device(weighting, group):
    """A function of rows: each loss's gradient and value on one device."""
    step = gradients_of_losses(traced_with(group), table.WEIGHTINGS[weighting])
    compiled = tf.function(step, input_signature=SPECIFICATION, autograph=False)

    def call(rows):
        return tf.nest.map_structure(
            lambda t: t.numpy(), compiled(*rows_of_batch(rows))
        )

    return call


@functools.cache
def on_replicas(weighting, group, layout):
    """By loss: the gradient and the reported loss, added up over the replicas."""
    replicas, options = STRATEGIES[layout]
    strategy = make_strategy(replicas, **options)

    def parts():
        yield from map(rows_of_batch, parts_of(replicas))

    dataset = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_generator(
            parts, output_signature=SPECIFICATION
        )
    )
    step = gradients_of_losses(traced_with(group), table.WEIGHTINGS[weighting])

    @tf.function(input_signature=[dataset.element_spec], autograph=False)
    def run(batch):
        return strategy.run(step, args=batch)

    results = run(next(iter(dataset)))
    return tf.nest.map_structure(
        lambda value: sum(
            v.numpy() for v in strategy.experimental_local_results(value)
        ),
        results,
    )


def parts_of(replicas):
    ends = np.cumsum((0, *PARTS[replicas]))
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def mean_of_means(weighting, loss, replicas):
    """What adding each replica's mean loss / R gives, as Keras does by itself."""
    gradients = one_device(weighting, group_of(loss))
    filled = [rows for rows in parts_of(replicas) if rows.stop > rows.start]
    return sum(gradients(rows)[loss][0] for rows in filled) / replicas


def group_of(loss):
    return ALL_WEIGHTINGS[0] if loss in ALL_WEIGHTINGS else "Huber"


@functools.cache
def largest_gradients_of_a_row(group):
    """By loss: a bound for the terms that a mean over rows adds up."""
    gradients = one_device("mean", group)
    found = [gradients(slice(i, i + 1)) for i in range(table.ROWS)]
    return {
        name: max(np.abs(result[name][0]).max() for result in found)
        for name in traced_with(group)
    }


def bound(weighting, loss):
    """2 n u A: two orders of summation (Higham 2002, eq. 4.4), see parity.py.

    n: the rows and time steps, the dot products forward and back, and some twenty
    elementwise operations (logarithms, powers, the shares). A: the largest term: a
    row's gradient, times the largest weight (2) over the mean weight (1), and for a
    sum times the rows.
    """
    terms = table.ROWS * table.TIMES + table.FEATURES + table.CLASSES + 20
    largest = 2 * largest_gradients_of_a_row(group_of(loss))[loss]
    if weighting == "sum":
        largest *= table.ROWS * table.TIMES
    return 2 * terms * UNIT_ROUND_OFF * largest


@pytest.fixture(autouse=True)
def _clean_session():
    """In the place of the folder's: the results of a run serve many tests."""


def test_every_keras_loss_is_in_the_table():
    classes = {
        name
        for name, value in vars(keras.losses).items()
        if isinstance(value, type) and name != "Loss"
    }
    assert classes == table.LOSSES.keys() | table.EXEMPT.keys()


ROWS = [
    pytest.param(
        *row, id="-".join(row), marks=() if is_covering(*row) else pytest.mark.slow
    )
    for row in itertools.product(table.WEIGHTINGS, table.LOSSES, STRATEGIES)
]


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("weighting, loss, layout", ROWS)
def test_gradient_and_report_equal_one_device(weighting, loss, layout):
    group = group_of(loss)
    gradient, reported = on_replicas(weighting, group, layout)[loss]
    expected, expected_report = one_device(weighting, group)(slice(None))[loss]
    tolerance = bound(weighting, loss)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(reported, expected_report, rtol=1e-5)
    if weighting != "sum":
        by_keras_alone = mean_of_means(weighting, loss, STRATEGIES[layout][0])
        assert np.abs(by_keras_alone - expected).max() > 10 * tolerance


def test_weights_of_a_replica_that_cancel_out_are_told_of():
    """Keras makes 0 of such a replica's mean, whatever its rows bring."""
    x, y = classification_data(8)
    strategy = make_strategy(2)
    with strategy.scope():
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile("sgd", loss, jit_compile=False)

    def fit(weights):
        weights = np.array(weights, "float32")
        model.fit(x, y, 8, verbose=0, shuffle=False, sample_weight=weights)

    fit([1, 1, 1, 1, 0, 0, 0, 0])
    fit([1, 1, 1, -1, -1, -1, -1, 1])
    with pytest.raises(ConfigurationError, match="sum_over_batch_size"):
        fit([1, 1, 1, 1, 1, 1, -1, -1])
