"""What a plan does not know: it never says then that a training fits."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.planning import plan
from tfdp.tools.planning.answer import Answer


def compiled(*layers):
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
    return model


def grouped():
    # Keras has XLA compile a convolution in groups on a CPU.
    return compiled(keras.Input((8, 8, 4)), keras.layers.Conv2D(4, 3, groups=2))


def until_small():
    def halve(x):
        return tf.while_loop(
            lambda y: tf.reduce_sum(y) > 1.0, lambda y: (y * 0.5,), (x,)
        )[0]

    layers = [keras.layers.Dense(8), keras.layers.Lambda(halve, (8,))]
    return compiled(keras.Input((8,)), *layers)


@pytest.mark.parametrize("build", [grouped, until_small])
def test_what_is_not_known_does_not_fit(build):
    found = plan(build, 4, memory_bytes=2**40)
    assert found.fits is False
    assert found.notes
    assert "unknown" in Answer("it", found, None, []).sentence


def test_a_recurrent_layer_is_counted_by_its_turns():
    def build(length):
        model = keras.Sequential(
            [keras.Input((length, 16)), keras.layers.LSTM(32, unroll=False)]
        )
        model.compile("sgd", "mse", jit_compile=False)
        return model

    short, long = (plan(functools.partial(build, n), 64) for n in (20, 80))
    assert long.is_known
    # Each turn keeps the carry, the output and the four gates, at least 6 x 32 numbers.
    turn_bytes = 64 * 6 * 32 * 4
    assert long.parts["activations"] - short.parts["activations"] >= 60 * turn_bytes
    assert 3.5 < long.flops / short.flops < 4.2


WORDS, WIDTH = 20_000, 64


def words_and_layers():
    layers = [keras.layers.Dense(WIDTH) for _ in range(16)]
    looked_up = keras.layers.Embedding(WORDS, WIDTH)
    return compiled(keras.Input((5,), dtype="int32"), looked_up, *layers)


@pytest.mark.worth_seconds(6)
def test_rows_of_a_table_that_are_made_whole_count_as_the_table():
    """With shards; how large they are stands in the graph behind them."""
    found = plan(words_and_layers, 16, replicas=4, shard="optimizer")
    table_bytes = WORDS * WIDTH * 4
    stored = found.parts["weights"] + found.parts["slots"]
    assert found.peak_bytes >= stored + table_bytes


@pytest.mark.parametrize("by_rows", [True, False])
def test_texts_are_planned(by_rows):
    def build():
        words = keras.Input((4,), dtype="string")
        numbers = keras.layers.Hashing(16)(words)
        rows = keras.layers.Flatten()(keras.layers.Embedding(16, 8)(numbers))
        model = keras.Model(words, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    arrays = (np.full((64, 4), "word"), np.zeros((64, 1), "float32"))
    found = plan(build, 64 if by_rows else arrays, replicas=2, memory_bytes=2**30)
    assert found.parts["weights"] == pytest.approx(4 * (16 * 8 + 4 * 8 + 1), abs=16)
    assert found.fits


@pytest.mark.parametrize("option", ["jit_compile", "run_eagerly"])
def test_a_step_that_runs_in_another_way_is_told(option):
    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **{"jit_compile": False, option: True})
        return model

    [note] = plan(build, 4).notes
    assert note.startswith("planned ") and option in note
