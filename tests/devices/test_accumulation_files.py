"""Files that are written between two updates of an accumulation.

What is accumulated then is each replica's own, or the sum over all of them, whole or in
shards: whoever reads the file goes on as one device that was never interrupted. Without
the sum rule weights end 5e-3 to 6e-2 apart; the bound is 1.5e-5.
"""

import contextlib
import functools

import keras
import pytest

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    rounding_bound,
)
from tfdp.checkpoint import Checkpoint

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
        return contextlib.nullcontext()
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
    """Each way with each optimizer, but for those that weigh batches apart in it.

    Without a strategy `DistributedOptimizer` knows no rows: a batch weighs 1 there.
    """
    return [
        pytest.param(*way, optimizer, id="-".join(map(str, (*way, optimizer.__name__))))
        for way in ways
        for optimizer in (keras_own, wrapped)
        if optimizer is keras_own or None not in way
    ]


@pytest.mark.worth_seconds(20)
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
