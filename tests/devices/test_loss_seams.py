"""The functions of Keras that make a mean of a loss: replaced in replicas, and nowhere
else; and whatever Keras calls its local variables, the numbers stay."""

import ast
import importlib
import inspect
import sys
import textwrap
import types
import unittest

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import testing
from keras.src.losses import loss as keras_losses

from tests.devices.test_threads import Thread
from tests.support.parity import UNIT_ROUND_OFF, make_strategy, stock_strategy
from tfdp.errors import SeamError
from tfdp.seams import losses as seam
from tfdp.seams import table

SEAMS = {row.attribute: row for row in table.SEAMS if row.owner == table.LOSS}
MSE = keras.losses.MeanSquaredError
ROWS, STEPS, FEATURES = 6, 4, 3
# Rows of the replicas: 4 and 2, of 3 and of 8 words.
CUTS = slice(0, 4), slice(4, 6)


def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, STEPS, FEATURES)).astype("float32")
    y = rng.normal(size=(ROWS, STEPS, 1)).astype("float32")
    weights = rng.uniform(0.1, 3.0, (ROWS, STEPS)).astype("float32")
    mask = np.zeros((ROWS, STEPS), bool)
    mask[0, :3] = mask[4:] = True
    return x, y, weights, mask


def gradients_and_reports(x, y, weights, mask):
    """By loss: the gradient, and the report, which Keras weighs by rows."""
    found = {}
    for name, loss, given_weights, given_mask in (
        ("masked", MSE(), None, mask),
        ("weighted", MSE(), weights, None),
        ("both", MSE(), weights, mask),
        ("by weights", MSE(reduction="mean_with_sample_weight"), weights, None),
        ("by both", MSE(reduction="mean_with_sample_weight"), weights, mask),
    ):
        kernel = tf.reshape(tf.linspace(0.5, -1.0, FEATURES), (FEATURES, 1))
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            predictions = tf.convert_to_tensor(x) @ kernel
            if given_mask is not None:
                predictions._keras_mask = tf.convert_to_tensor(given_mask)
            value = loss(y, predictions, given_weights)
        report = keras_losses.unscale_loss_for_distribution(value)
        found[name] = tape.gradient(value, kernel), report * (x.shape[0] / ROWS)
    return found


def on_replicas(strategy, function, *arrays):
    """The sums over replicas of what `function` gives for their rows, without graphs:
    a trace is most of a test's time."""

    parts = [
        strategy.experimental_distribute_values_from_function(
            lambda context, array=array: tf.convert_to_tensor(
                array[CUTS[context.replica_id_in_sync_group]]
            )
        )
        for array in arrays
    ]
    parts = strategy.run(function, parts)
    return tf.nest.map_structure(
        lambda value: strategy.reduce("sum", value, None).numpy(), parts
    )


def renamed(function, name):
    """`function` with one variable of its body renamed, its parameters as they were."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == name:
                node.id = "of_another_name"
            if isinstance(node, ast.alias) and name == (node.asname or node.name):
                node.asname = "of_another_name"
    if name in inspect.signature(function).parameters:
        tree.body[:0] = ast.parse(f"of_another_name = {name}\ndel {name}").body
    code = compile(ast.unparse(tree), function.__code__.co_filename, "exec")
    made = {}
    exec(code, dict(vars(keras_losses)), made)
    code = made[function.__name__].__code__
    assert name not in code.co_varnames[code.co_argcount :]
    return types.FunctionType(
        code, vars(keras_losses), function.__name__, function.__defaults__
    )


def put_in_place(monkeypatch, new):
    """Puts a function in the place of Keras', in all modules that hold it."""
    old = getattr(keras_losses, new.__name__)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(new.__name__) is old:
            monkeypatch.setitem(vars(module), new.__name__, new)


@pytest.mark.parametrize("name", SEAMS)
def test_a_renamed_variable_of_keras_changes_nothing(name, monkeypatch):
    one = gradients_and_reports(*batch())
    function = inspect.unwrap(getattr(keras_losses, name))
    for variable in function.__code__.co_varnames:
        with monkeypatch.context() as patch:
            put_in_place(patch, renamed(function, variable))
            found = on_replicas(make_strategy(2), gradients_and_reports, *batch())
        for loss, values in one.items():
            for value, expected in zip(found[loss], values, strict=True):
                np.testing.assert_allclose(value, expected, rtol=0, atol=bound())


def bound():
    """How far two orders of the same float32 sums can be apart.

    The largest is a gradient, of 24 addends 2 w (p - y) x / D; p sums 3 products. Up to
    10 factors (means, shares, masks) are rounded. (24 + 3 + 10) u A bounds each order,
    with A the sum of the absolute values. Wrong denominators are 0.1 off.
    """
    x, y, weights, mask = (np.abs(array.astype("float64")) for array in batch())
    error = x @ np.abs(np.linspace(0.5, -1.0, FEATURES))[:, None] + y
    addends = 2 * np.maximum(weights, 1)[..., None] * np.maximum(x, error) * error
    divisor = min(mask.sum(), (weights * mask).sum())
    return 2 * (24 + 3 + 10) * UNIT_ROUND_OFF * addends.sum((0, 1)).max() / divisor


def test_what_the_seam_calls_of_keras_is_in_the_table():
    tree = ast.parse(inspect.getsource(seam))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "keras_losses"
    }
    assert called and called | set(seam._REPLACEMENTS) == set(SEAMS)


@pytest.mark.parametrize("name", SEAMS)
def test_another_signature_is_refused(name, monkeypatch):
    original = getattr(keras_losses, name)

    def other(*args, a_new_one=None, **kwargs):
        return inspect.unwrap(original)(*args, **kwargs)

    other.__name__ = name
    put_in_place(monkeypatch, other)
    with pytest.raises(SeamError, match=rf"{table.LOSS} has {name}\(\*args.*3.15.1"):
        make_strategy(2)
    monkeypatch.setenv(table.UNCHECKED, "1")
    x, y, weights, mask = batch()
    found = on_replicas(make_strategy(2), gradients_and_reports, x, y, weights, mask)
    assert np.isfinite(found["both"][0]).all()


def test_a_function_that_a_module_has_imported_is_replaced_there(monkeypatch):
    """As `keras.src.losses.losses` of Keras 3.16 has."""
    original = inspect.unwrap(keras_losses.reduce_weighted_values)
    put_in_place(monkeypatch, original)
    module = types.ModuleType("module")
    module.reduce_weighted_values = original
    monkeypatch.setitem(sys.modules, "module", module)
    make_strategy(2)
    assert module.reduce_weighted_values is keras_losses.reduce_weighted_values
    assert module.reduce_weighted_values is not original


def test_a_mean_that_is_taken_elsewhere_is_refused():
    strategy = make_strategy(2)
    unseen = inspect.unwrap(keras_losses.reduce_weighted_values)
    assert unseen(tf.constant([1.0, 3.0])) == 2
    with pytest.raises(SeamError, match="did not pass through reduce_weighted_values"):
        strategy.run(unseen, [tf.constant([1.0, 3.0])])


def losses_by_hand():
    x, y, weights, mask = batch()
    return gradients_and_reports(x, y, weights, mask)


def test_a_loss_outside_of_replicas_is_the_plain_one():
    def of_model():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((STEPS, FEATURES)), keras.layers.Masking()]
            + [keras.layers.Dense(1, kernel_regularizer="l2")]
        )
        model.compile("sgd", "mse")
        x, y, weights, mask = batch()
        return model.compute_loss(y=y, y_pred=model(x * mask[..., None])).numpy()

    plain, plain_of_model = losses_by_hand(), of_model()
    with make_strategy(2).scope():
        found, of_scope = losses_by_hand(), of_model()
    # The same operations in the same order.
    tf.nest.map_structure(np.testing.assert_array_equal, found, plain)
    assert of_scope == plain_of_model > 0


@pytest.mark.parametrize("other", ["none", "stock"])
def test_another_thread_has_keras_own_losses(other, monkeypatch):
    def in_thread():
        if other == "none":
            return losses_by_hand()
        return on_replicas(stock, gradients_and_reports, *batch())

    def step():
        thread = Thread(in_thread)
        thread.start()
        found.append(thread.join_for_result())

    strategy, stock, found = make_strategy(2), stock_strategy(), []
    with monkeypatch.context() as patch:
        for name in seam._REPLACEMENTS:
            put_in_place(patch, inspect.unwrap(getattr(keras_losses, name)))
        expected = in_thread()
    strategy.run(step)
    assert len(found) == 2
    for numbers in found:
        tf.nest.map_structure(np.testing.assert_array_equal, numbers, expected)


def test_keras_own_tests_of_compiled_losses_pass_in_the_scope(monkeypatch):
    """Keras' wheel ships them. `setUp` clears the session, and the scope with it."""
    name = "keras.src.trainers.compile_utils_test"
    if importlib.util.find_spec(name) is None:
        pytest.skip("this wheel of Keras has no tests")
    case, strategy = testing.TestCase, make_strategy(2)
    set_up = case.setUp

    def set_up_in_scope(self):
        set_up(self)
        self.enterContext(strategy.scope())

    monkeypatch.setattr(case, "setUp", set_up_in_scope)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    assert result.testsRun > 20
    assert [test.id() for test, _ in result.failures + result.errors] == []
