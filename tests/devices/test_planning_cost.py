"""What a plan leaves out because nothing is run, and that its answer is the same."""

import contextlib

import keras
import pytest

from tfdp._private.keras_models import build_symbolically
from tfdp.planning import plan
from tfdp.tools.planning import traced_step

WIDTH = 64
ROWS = 16


class Counting(keras.layers.Layer):
    """Counts in how many graphs it is called."""

    calls = 0

    def call(self, inputs):
        type(self).calls += 1
        return inputs * 2.0


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.counting = Counting()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(self.counting(inputs))


def functional():
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(4)(Counting()(inputs)))


def sequential():
    return keras.Sequential([keras.Input((WIDTH,)), Counting(), keras.layers.Dense(4)])


def with_two_outputs():
    inputs = keras.Input((WIDTH,))
    x = Counting()(inputs)
    first, second = (keras.layers.Dense(4, name=name) for name in ("first", "second"))
    return keras.Model(inputs, {"first": first(x), "second": second(x)})


def compiled(make):
    def build():
        model = make()
        metrics = {"first": ["mae"]} if make is with_two_outputs else ["mae"]
        model.compile("adam", "mse", metrics=metrics, jit_compile=False)
        return model

    return build


def batch_of(make):
    x, y = keras.ops.zeros((ROWS, WIDTH)), keras.ops.zeros((ROWS, 4))
    return x, ({"first": y, "second": y} if make is with_two_outputs else y)


@pytest.mark.parametrize("make", [functional, sequential, with_two_outputs, Own])
def test_metrics_are_built_from_what_a_model_declares(make, monkeypatch):
    def planned():
        Counting.calls = 0
        found = plan(compiled(make), batch_of(make))
        return found, Counting.calls

    found, calls = planned()
    monkeypatch.setattr(
        traced_step,
        "build_as_declared",
        lambda model, batch: build_symbolically(model, data_batch=batch),
    )
    expected, more_calls = planned()
    assert found.parts == expected.parts and found.flops == expected.flops
    # Keras calls the whole model once more; a model of one's own declares nothing.
    assert more_calls - calls == (make is not Own)


class CountingInitializer(keras.initializers.Initializer):
    """Counts the numbers that it is asked for."""

    def __init__(self):
        self.numbers = 0

    def __call__(self, shape, dtype=None):
        self.numbers += keras.ops.prod(shape)
        return keras.ops.ones(shape, dtype)


@pytest.mark.parametrize("replicas", [1, 2])
def test_large_weights_get_no_numbers(replicas, monkeypatch):
    initializer = CountingInitializer()

    def build():
        dense = keras.layers.Dense(1024, kernel_initializer=initializer)
        model = keras.Sequential([keras.Input((512,)), dense])
        model.compile("adam", "mse", jit_compile=False)
        return model

    found = plan(build, 8, replicas=replicas)
    assert initializer.numbers == 0  # of 2 MiB
    assert build().layers[0].kernel.numpy().min() == 1.0
    monkeypatch.setattr(traced_step, "LEAST_EMPTY_BYTES", 2**40)
    initializer.numbers = 0
    expected = plan(build, 8, replicas=replicas)
    assert initializer.numbers > 0
    assert found.parts == expected.parts


def test_a_builder_that_fails_leaves_keras_as_it_was():
    before = keras.Variable._initialize_with_initializer

    def build():
        raise KeyError("no such layer")

    with contextlib.suppress(KeyError):
        plan(build, 8)
    assert keras.Variable._initialize_with_initializer is before
