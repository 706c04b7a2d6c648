"""A Keras whose functions have other local variables: exact, or refused by tfdp.

Each function is compiled again from its source: its signature stays, and its local
variables have other names, as after a patch release.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tests.support.renamed_locals import locals_of, renamed
from tfdp.errors import SeamError
from tfdp.seams import table
from tfdp.seams.replace import replace
from tfdp.strategies import startup_checks

ROWS, BATCH = 19, 7  # two replicas have 4 and 3 rows, and of the last batch 3 and 2


class Level(keras.metrics.Mean):
    """Counts one number per batch, through Keras' own method."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(tf.reduce_mean(y_pred))


def largest_error(y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_true - y_pred))


def trained(strategy, *callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", metrics=[Level(), largest_error, "mae"])
    rng = np.random.default_rng(0)
    # Rows of different size, so that an unweighted mean over replicas is off.
    x = rng.normal(size=(ROWS, 4)) * np.arange(1, ROWS + 1)[:, None] / ROWS
    y = rng.normal(size=(ROWS, 3))
    ended = model.fit(
        x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[*callbacks]
    )
    return {name: values[-1] for name, values in ended.history.items()}


@pytest.fixture(autouse=True)
def checked_anew():
    """A process checks its Keras once."""
    check_anew()
    yield
    check_anew()


def check_anew():
    for check in (startup_checks.check_versions, startup_checks.check_seams):
        getattr(check, "cache_clear", lambda: None)()


def replaced():
    """The methods of Keras that are replaced for good."""
    rows = [seam for seam in table.SEAMS if seam.when == "always"]
    # A look tells of other local variables by itself.
    looks = [(look.owner, look.function) for look in table.LOOKS]
    rows = [row for row in rows if row.owner.startswith("keras")]
    rows = [row for row in rows if (row.owner, row.attribute) not in looks]
    methods = [getattr(table.owner_of(row), row.attribute) for row in rows]
    return [method for method in methods if hasattr(method, "replaced_by_tfdp")]


def test_other_local_variables_in_the_replaced_methods_change_nothing():
    expected = trained(tf.distribute.get_strategy())
    make_strategy(2)  # what is not replaced yet is replaced now
    check_anew()
    with contextlib.ExitStack() as stack:
        for method in replaced():
            stack.enter_context(renamed(method, *locals_of(method)))
        found = trained(make_strategy(2))
    assert len(replaced()) >= 8
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Means of up to 57 float32 terms below 10, summed in another order:
        # 57 u * 10 = 3e-5; of each replica's own mean: 1e-2 and more.
        assert abs(found[name] - value) < 3e-5, name


@pytest.mark.parametrize("name", ["callbacks", "epoch_iterator", "initial_epoch"])
def test_another_local_variable_in_fit_is_refused(name, tmp_path):
    """An argument is found missing when it is read; another one when tfdp starts."""
    checkpoint = tfdp.callbacks.Checkpoint(tmp_path)
    with renamed(keras.Model.fit, name), pytest.raises(SeamError, match=name):
        trained(make_strategy(2), checkpoint)


def test_another_function_for_the_step_is_refused():
    make = table.owner_of(table.LOOKS[0])._make_function
    with renamed(make, "one_step_on_data"):
        with pytest.raises(SeamError, match="no local variable one_step_on_data"):
            make_strategy(2)


def test_the_checks_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(table.UNCHECKED, "1")
    with renamed(keras.Model.fit, "epoch_iterator"):
        make_strategy(2)


def test_what_is_not_in_the_table_is_not_replaced():
    with pytest.raises(SeamError, match="not in its table"):
        replace(keras.layers.Dense(1), "get_config", dict)
    with pytest.raises(SeamError, match="no such attribute"):
        with make_strategy(1).scope():
            replace(keras.Model(), "optimizer", None)
