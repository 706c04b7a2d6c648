"""What tfdp relies on inside Keras and TensorFlow: says first when a version moves it.

The names themselves are imported in `tfdp/_private`; here stand the facts about them.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.trainers import compile_utils
from tensorflow.python.autograph.impl import conversion

from tests.support.parity import make_strategy
from tfdp._private.names import is_in_vectorized_loop
from tfdp._private.optimizer_hooks import CLIPPING
from tfdp._private.step_ops import order_of
from tfdp.seams import table
from tfdp.step.losses import ReplicaLosses
from tfdp.strategies.startup_checks import moved_looks, moved_seams


def test_keras_asks_for_a_batch_in_the_function_that_is_replaced():
    build = keras.Model._maybe_symbolic_build
    source = inspect.getsource(build)
    assert source.index("self.distribute_strategy.reduce") < source.index(
        "self._symbolic_build"
    )


def test_the_table_is_that_of_this_keras():
    assert moved_seams() == moved_looks() == []


def test_keras_calls_the_functions_that_scale_losses():
    trainer = keras.Model
    for name, callers in {
        "scale_loss_for_distribution": [trainer._aggregate_additional_loss],
        "unscale_loss_for_distribution": [
            trainer.train_step,
            trainer.test_step,
            compile_utils.CompileLoss.call,
        ],
    }.items():
        for caller in callers:
            # Attributes of the module, which tfdp replaces.
            assert {"loss_module", name} <= set(caller.__code__.co_names)


def test_a_loss_passes_its_mask_and_weights_as_they_came(monkeypatch):
    """Accumulation compares the masks and weights of losses by identity."""
    passed = {}
    monkeypatch.setattr(
        keras_loss,
        "reduce_weighted_values",
        lambda values, **options: passed.update(options),
    )
    mask, weights = tf.constant([True, False]), np.ones(2)
    predictions = tf.ones((2, 1))
    predictions._keras_mask = mask
    keras.losses.MeanSquaredError()(tf.ones((2, 1)), predictions, weights)
    assert passed["mask"] is mask and passed["sample_weight"] is weights


def test_keras_optimizers_have_what_is_led():
    sgd = keras.optimizers.SGD()
    for name in ("apply", "_all_reduce_sum_gradients", "_clip_gradients"):
        assert callable(getattr(sgd, name))
    for name in CLIPPING:
        assert hasattr(sgd, name)
    assert callable(keras.optimizers.LossScaleOptimizer(sgd).check_finite)


def test_seed_generators_keep_their_state_in_a_recognised_variable():
    from tfdp.variables.mirrored import SeedVariable

    with make_strategy(2).scope():
        dropout = keras.layers.Dropout(0.5)
    assert type(dropout.seed_generator.state.value) is SeedVariable


@pytest.mark.parametrize("package", [tf, keras])
def test_the_checked_versions_are_said(package):
    name = package.__name__.split(".")[0]
    assert table.CHECKED_VERSIONS[name].count(".") == 2


def test_autograph_leaves_library_code_as_it_is():
    """It converted all that a program's step calls: five times as long a first step."""
    run = make_strategy(1).run
    for function in (ReplicaLosses.scaled_mean, keras_loss.reduce_weighted_values, run):
        assert conversion.is_allowlisted(function)
    assert not conversion.is_allowlisted(make_strategy)


def test_ops_of_a_vectorized_loop_are_known_by_their_names():
    """Else an exchange in one would wait for ever."""
    found = []

    def note(x):
        found.append(is_in_vectorized_loop())
        return x

    @tf.function
    def of_map(x):
        note(x)
        return tf.vectorized_map(note, x)

    of_map(tf.ones([3]))
    assert found == [False, True]


def test_later_ops_have_greater_numbers():
    with tf.Graph().as_default() as graph:
        one = tf.identity(tf.constant(1.0))
        tf.add(one, one)
        ops = graph.get_operations()
    assert [order_of(op) for op in ops] == sorted({order_of(op) for op in ops})
