"""The doors of the parity check: what it takes as data, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import classification_data, make_strategy
from tfdp.errors import ConfigurationError, DeviceError, ScopeError
from tfdp.testing import check_parity
from tfdp.tools.testing.batches import as_dataset, collect_batches, row_count, take_rows

EVEN = 16


def rows(count):
    return classification_data(samples=count, features=6, classes=3)


def mlp(*layers):
    """A `build` for a small classifier with `layers` before its last one."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                *[make() for make in layers],
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    return build


def test_it_ends_with_the_settings_it_found():
    tf.config.experimental.enable_tensor_float_32_execution(True)
    check_parity(mlp(), rows(EVEN), 2, steps=1)
    assert tf.config.experimental.tensor_float_32_execution_enabled()


SAME = mlp()()


@pytest.mark.parametrize(
    "arguments, error, expected",
    [
        ({"build": SAME}, ConfigurationError, "build must be a function"),
        ({"build": lambda: SAME}, ConfigurationError, "same model twice"),
        ({"build": lambda: None}, ConfigurationError, "returned: NoneType"),
        (
            {"build": lambda: keras.Sequential([keras.Input((2,))])},
            ConfigurationError,
            "was not compiled",
        ),
        ({"data": "rows"}, ConfigurationError, "data must be"),
        ({"data": ()}, ConfigurationError, "no rows|same number"),
        ({"data": []}, ConfigurationError, "no rows"),
        ({"data": (np.zeros((4, 2)), np.zeros(3))}, ConfigurationError, "3.*4"),
        (
            {"data": (np.zeros((4, 2)), None, None, object())},
            ConfigurationError,
            "consist of arrays",
        ),
        ({"strategy": 1}, ConfigurationError, "at least 2"),
        ({"strategy": True}, ConfigurationError, "strategy must be"),
        ({"strategy": "mirrored"}, ConfigurationError, "strategy must be"),
        ({"strategy": 64}, DeviceError, "use_virtual_devices"),
        ({"steps": 0}, ConfigurationError, "steps must be"),
        ({"steps": 1.5}, ConfigurationError, "steps must be"),
        ({"batch_size": 0}, ConfigurationError, "batch_size must be"),
        ({"seed": -1}, ConfigurationError, "seed must be"),
        ({"random_layers": "on"}, ConfigurationError, "random_layers must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, expected):
    given = {"build": mlp(), "data": rows(4), "strategy": 2, **arguments}
    with pytest.raises(error, match=expected):
        check_parity(**given)


def test_a_model_that_nothing_trains_is_refused():
    def build():
        model = mlp()()
        model.trainable = False
        return model

    with pytest.raises(ConfigurationError, match="No weight of the model"):
        check_parity(build, rows(4), 2)


def test_one_replica_is_nothing_to_compare():
    with pytest.raises(ConfigurationError, match="one replica"):
        check_parity(mlp(), rows(4), tf.distribute.OneDeviceStrategy("CPU:0"))


def test_a_call_within_a_scope_is_refused():
    with make_strategy(2).scope(), pytest.raises(ScopeError, match="outside"):
        check_parity(mlp(), rows(4), 2)


def test_models_that_differ_from_call_to_call_are_refused():
    units = iter([3, 4, 5])
    build = mlp(lambda: keras.layers.Dense(next(units)))
    with pytest.raises(ConfigurationError, match="different variables"):
        check_parity(build, rows(4), 2)


# How the batches are taken: rows of each.
DATA = {
    "arrays-first-and-last": (rows(3 * EVEN + 5), 2, [EVEN, 5]),
    "arrays-again": (rows(EVEN), 3, [EVEN] * 3),
    "batches": ([rows(4), rows(6)], 4, [4, 6, 4, 6]),
    "generator": ((rows(n) for n in (2, 4, 6, 8)), 3, [2, 4, 6]),
    "dataset": (
        tf.data.Dataset.from_tensor_slices(rows(20)).batch(8),
        3,
        [8, 8, 4],
    ),
    "endless-dataset": (
        tf.data.Dataset.from_tensor_slices(rows(8)).repeat().batch(8),
        2,
        [8, 8],
    ),
}


@pytest.mark.parametrize("kind", DATA)
def test_batches_of_data(kind):
    data, steps, expected = DATA[kind]
    batches = collect_batches(data, steps, EVEN)
    assert [row_count(batch) for batch in batches] == expected


def test_rows_of_every_kind_of_tensor_are_taken_in_order():
    sparse = tf.sparse.from_dense(np.diag([1.0, 2, 3]))
    ragged = tf.ragged.constant([[1], [2, 3], []])
    (batch,) = collect_batches([({"s": sparse, "r": ragged}, np.arange(3))], 1, 1)
    taken, numbers = take_rows(batch, [2, 1])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(taken["s"]).numpy(), [[0, 0, 3], [0, 2, 0]]
    )
    assert taken["r"].to_list() == [[], [2, 3]]
    np.testing.assert_array_equal(numbers, [2, 1])
    (again,) = as_dataset([batch])
    assert again[0]["r"].to_list() == ragged.to_list()


def test_batches_of_different_types_are_refused():
    batches = [(np.zeros((2, 3)), np.zeros(2)), (np.zeros((2, 3)), np.zeros(2, int))]
    with pytest.raises(ConfigurationError, match="differ in structure or type"):
        as_dataset(collect_batches(batches, 2, 1))
