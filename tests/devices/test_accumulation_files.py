"""Files that are written between two updates of an accumulation.

What is accumulated then is each replica's own, or the sum over all of them, whole or in
shards: whoever reads the file goes on as one device that was never interrupted. Without
the sum rule weights end 5e-3 to 6e-2 apart; the bound is 1.5e-5.
"""

import functools
import warnings
from contextlib import nullcontext as nothing

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    largest_distance,
    normalizing_model,
    rounding_bound,
)
from tfdp.checkpoint import Checkpoint
from tfdp.errors import CheckpointWarning

# Saved by (replicas, stage), read by (replicas, stage); None: plain Keras.
WAYS = [
    *(((2, 0), (2, 2)), ((2, 0), (2, 3)), ((2, 2), (2, 0)), ((2, 3), (2, 1))),
    *(((1, 0), (2, 0)), ((1, 0), (3, 1)), ((2, 0), (3, 0)), ((2, 1), (1, 0))),
    *(((3, 0), (2, 3)), ((2, 3), (3, 0)), ((2, 2), (3, 3)), ((2, 0), (2, 0))),
    *(((2, 0), None), (None, (2, 0)), ((2, 3), None), (None, (2, 3))),
]
# The smallest variable that is cut: all are, or only the kernel of the first layer.
ALL, LARGE = 0, 1024
ROWS, RATE = 12, 0.2
EVERY, SAVED_AT, STEPS = 3, 4, 6


def keras_own():
    return keras.optimizers.SGD(RATE, gradient_accumulation_steps=EVERY)


def wrapped():
    inner = keras.optimizers.SGD(RATE)
    return tfdp.DistributedOptimizer(inner, accumulate_steps=EVERY)


def scope_of(way, min_bytes=ALL):
    if way is None:
        return nothing()
    replicas, stage = way
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tfdp.DataParallelStrategy(
        devices, shard=stage, shard_min_bytes=min_bytes
    ).scope()


def compiled(way, optimizer, min_bytes=ALL):
    with scope_of(way, min_bytes):
        model = dense_model()
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    return model


@functools.cache
def data(are_alike):
    x, y = classification_data(STEPS * ROWS)
    # One row for all: every replica then accumulates the same.
    return (x[:1].repeat(len(x), 0), y[:1].repeat(len(y))) if are_alike else (x, y)


def fit(model, first, last, are_alike=False):
    x, y = data(are_alike)
    rows = slice(first * ROWS, last * ROWS)
    model.fit(x[rows], y[rows], batch_size=ROWS, shuffle=False, verbose=0)
    return model


@functools.cache
def uninterrupted(optimizer, are_alike=False):
    return fit(compiled(None, optimizer), 0, STEPS, are_alike)


@functools.cache
def saved(way, optimizer, min_bytes=ALL, are_alike=False):
    return fit(compiled(way, optimizer, min_bytes), 0, SAVED_AT, are_alike)


def assert_goes_on(model, optimizer, are_alike=False):
    """That it ends as one device that was never interrupted, on the whole batches."""
    fit(model, SAVED_AT, STEPS, are_alike)
    bound = rounding_bound(
        model, STEPS // EVERY, EVERY * ROWS, gradient_bound=3, learning_rate=RATE
    )
    assert largest_difference(model, uninterrupted(optimizer, are_alike)) < bound


def through_a_checkpoint(folder, model, other):
    files = Checkpoint(folder)
    files.save(model, step=SAVED_AT)
    files.wait()
    assert files.restore(other).step == SAVED_AT
    return other


def with_optimizers(ways):
    """Each way with each optimizer."""
    return [
        pytest.param(*way, optimizer, id="-".join(map(str, (*way, optimizer.__name__))))
        for way in ways
        for optimizer in (keras_own, wrapped)
    ]


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("writer, reader, optimizer", with_optimizers(WAYS))
def test_a_checkpoint_is_restored(writer, reader, optimizer, tmp_path):
    other = compiled(reader, optimizer)
    through_a_checkpoint(tmp_path, saved(writer, optimizer), other)
    assert_goes_on(other, optimizer)


@pytest.mark.parametrize(
    "writer, reader, optimizer",
    with_optimizers(
        [((2, 0), (3, 2)), ((2, 2), (3, 0)), ((2, 3), None), (None, (2, 3))]
    ),
)
def test_what_is_too_small_for_shards_is_a_sum_as_well(
    writer, reader, optimizer, tmp_path
):
    other = compiled(reader, optimizer, LARGE)
    through_a_checkpoint(tmp_path, saved(writer, optimizer, LARGE), other)
    assert_goes_on(other, optimizer)


@pytest.mark.parametrize(
    "writer, reader, optimizer",
    with_optimizers([((2, 0), (3, 0)), ((2, 0), (1, 0)), ((3, 0), (2, 2))]),
)
def test_sums_that_are_alike_add_up_as_others_do(writer, reader, optimizer, tmp_path):
    other = compiled(reader, optimizer)
    model = saved(writer, optimizer, are_alike=True)
    through_a_checkpoint(tmp_path, model, other)
    assert_goes_on(other, optimizer, are_alike=True)


def through_a_keras_file(folder, model, reader, optimizer, build=None):
    model.save(folder / "model.keras")
    with scope_of(reader):
        return keras.models.load_model(folder / "model.keras")


def through_weights(folder, model, reader, optimizer, build=compiled):
    other = build(reader, optimizer)
    model.save_weights(folder / "model.weights.h5")
    other.load_weights(folder / "model.weights.h5")
    return other


def through_tensorflow(folder, model, reader, optimizer, build=compiled):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
        folder / "checkpoint"
    )
    other = build(reader, optimizer)
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    return other


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize(
    "through", [through_a_keras_file, through_weights, through_tensorflow]
)
@pytest.mark.parametrize("writer, reader, optimizer", with_optimizers(WAYS[::3]))
def test_files_of_keras_and_tensorflow(writer, reader, optimizer, through, tmp_path):
    model = saved(writer, optimizer)
    other = through(tmp_path, model, reader, optimizer)
    for mine, theirs in zip(
        model.optimizer.variables, other.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    assert_goes_on(other, optimizer)


def accumulators(model):
    return [v for v in model.optimizer.variables if "gradient_accumulator" in v.path]


def test_outside_of_replicas_they_are_their_sum():
    model, plain = saved((2, 0), keras_own), saved(None, keras_own)
    for mine, one in zip(accumulators(model), accumulators(plain), strict=True):
        own = [copy.numpy() for copy in mine.value.values]
        assert np.abs(own[0] - own[1]).max() > 1e-2
        for read in (
            mine.numpy(),
            mine.value.value(),
            keras.ops.convert_to_tensor(mine),
        ):
            np.testing.assert_array_equal(read, own[0] + own[1])
            # Sums of some 36 numbers below 3, in another order.
            np.testing.assert_allclose(read, one.numpy(), atol=1e-5)


def test_what_is_assigned_is_the_sum():
    model = compiled((3, 1), keras_own)
    for variable in accumulators(model):
        value = np.random.default_rng(1).normal(size=variable.shape).astype("float32")
        variable.assign(value)
        np.testing.assert_array_equal(variable.numpy(), value)
        variable.assign_add(value)
        np.testing.assert_array_equal(variable.numpy(), value + value)
        assert not variable.value.values[2].numpy().any()


@pytest.mark.parametrize("is_eager", [False, True])
def test_every_update_ends_with_zeros(is_eager):
    model = compiled((2, 0), keras_own)
    model.run_eagerly = is_eager
    fit(model, 0, STEPS)
    assert largest_difference(model, uninterrupted(keras_own)) < 1e-5
    assert not any(v.numpy().any() for v in accumulators(model))


def test_one_of_several_hosts_says_that_it_has_a_part(monkeypatch, tmp_path):
    model = saved((2, 0), keras_own)
    monkeypatch.setattr(type(model.distribute_strategy), "hosts", 2)
    with pytest.warns(CheckpointWarning, match="one of 2 hosts"):
        model.save(tmp_path / "model.keras")
    fitted = fit(compiled((2, 0), keras_own), 0, EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        fitted.save(tmp_path / "model.keras")


def test_the_second_host_takes_nothing_of_what_is_assigned(monkeypatch):
    model = compiled((2, 0), keras_own)
    monkeypatch.setattr(model.distribute_strategy.extended, "first_rank", 2)
    for variable in accumulators(model):
        variable.assign(np.ones(variable.shape, "float32"))
        assert not variable.numpy().any()


def test_replicas_that_train_apart_keep_their_own():
    def optimizer():
        sync = tfdp.sync.LocalSGD(every=2, across="replicas")
        inner = keras.optimizers.SGD(RATE)
        return tfdp.DistributedOptimizer(inner, accumulate_steps=EVERY, sync=sync)

    for variable in accumulators(saved((2, 0), optimizer)):
        own = [copy.numpy() for copy in variable.value.values]
        np.testing.assert_array_equal(variable.numpy(), own[0])
        variable.assign(own[1])
        for copy in variable.value.values:
            np.testing.assert_array_equal(copy.numpy(), own[1])


def train_on(model, *batches):
    x, y = data(False)
    for first, last in batches:
        model.train_on_batch(x[first:last], y[first:last])
    return model


@pytest.mark.parametrize(
    "writer, reader, weights",
    [
        # Rows are known; of the batch that nobody counts they are the mean, 10.
        ((2, 0), None, (12, 8, 10)),
        # Nobody counted the first two.
        (None, (2, 0), (1, 1, 1)),
        (None, (2, 3), (1, 1, 1)),
        ((2, 0), (3, 0), (12, 8, 4)),
        # A row each, which is no sign that nobody counted.
        ((2, 0), (1, 0), (1, 1, 6)),
    ],
)
def test_batches_of_other_sizes_weigh_in_one_unit(writer, reader, weights, tmp_path):
    """`weights`: what each of three batches counts in their mean."""
    sizes = (1, 1, 6) if weights == (1, 1, 6) else (12, 8, 4)
    edges = np.cumsum((0, *sizes))
    batches = list(zip(edges[:-1], edges[1:], strict=True))
    model = train_on(compiled(writer, wrapped), *batches[:2])
    other = through_weights(tmp_path, model, reader, wrapped)
    train_on(other, batches[2])
    one = compiled(None, lambda: keras.optimizers.SGD(RATE))
    before = [w.numpy() for w in one.weights]
    means = []
    for batch in batches:
        for variable, value in zip(one.weights, before, strict=True):
            variable.assign(value)
        train_on(one, batch)
        means.append([w.numpy() for w in one.weights])
    wanted = [
        np.average(each, axis=0, weights=weights) for each in zip(*means, strict=True)
    ]
    found = [w.numpy() for w in other.weights]
    # One update of some 24 rows; a batch that weighs 1 beside 12 is 1e-2 off.
    assert largest_distance(found, wanted) < 1e-6


def normalizing(way, optimizer):
    with scope_of(way):
        return normalizing_model(optimizer())


def moving_statistics(model):
    return [v.numpy() for v in model.non_trainable_variables]


@pytest.mark.parametrize(
    "through", [through_a_keras_file, through_weights, through_tensorflow]
)
@pytest.mark.parametrize("reader", [(2, 0), (2, 1), (3, 0)])
def test_files_hold_what_layers_have_stored_half_way(reader, through, tmp_path):
    model = fit(normalizing((2, 0), keras_own), 0, SAVED_AT)
    for variable in model.non_trainable_variables:
        first, second = (copy.numpy() for copy in variable.value.values)
        np.testing.assert_array_equal(first, second)
    other = through(tmp_path, model, reader, keras_own, normalizing)
    for mine, theirs in zip(
        moving_statistics(model), moving_statistics(other), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    if reader[0] != 2:
        return  # each normalizes by its own rows
    fit(other, SAVED_AT, STEPS)
    whole = fit(normalizing((2, 0), keras_own), 0, STEPS)
    for mine, theirs in zip(
        moving_statistics(whole), moving_statistics(other), strict=True
    ):
        # Numbers below 10, from gradients whose sum was rounded once more.
        np.testing.assert_allclose(theirs, mine, atol=1e-5)
