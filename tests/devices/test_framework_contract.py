"""What tfdp relies on inside Keras and TensorFlow: says first when a version moves it.

The names themselves are imported in `tfdp/_private`; here stand the facts about them.
"""

import inspect

import keras
import pytest
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from tensorflow.python.autograph.impl import conversion

from tests.support.parity import make_strategy
from tfdp.seams import table
from tfdp.step import losses
from tfdp.step.table_rows import CLIPPING


def test_keras_asks_for_a_batch_in_the_function_that_is_replaced():
    build = keras.Model._maybe_symbolic_build
    source = inspect.getsource(build)
    assert source.index("self.distribute_strategy.reduce") < source.index(
        "self._symbolic_build"
    )


def test_the_table_is_that_of_this_keras():
    assert table.moved_seams() == table.moved_looks() == []


def test_keras_scales_losses_in_the_functions_that_are_recognised():
    assert keras_loss.__name__ == losses.LOSS_MODULE
    for name in (losses.SCALE, losses.UNSCALE):
        source = inspect.getsource(getattr(keras_loss, name))
        assert "tf.distribute.get_strategy().num_replicas_in_sync" in source
    reduce_values = keras_loss.reduce_values.__code__
    assert {"sample_weight", "reduction"} <= set(reduce_values.co_varnames)
    assert losses.SCALE in reduce_values.co_names
    weighted = keras_loss.reduce_weighted_values.__code__
    assert "mask" in weighted.co_varnames
    assert "reduce_values" in weighted.co_names


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


def test_a_float_subclass_divides_first():
    """Python asks a subclass of float before float itself; the loss count needs it."""
    count = losses.LossReplicaCount(4)
    count.fraction = tf.constant(0.75)
    assert float(1.0 / count) == 0.75
    assert count > 1
    count.report_factor = tf.constant(3.0)
    assert float(keras.ops.cast(count, "float32")) == 3.0


@pytest.mark.parametrize("package", [tf, keras])
def test_the_checked_versions_are_said(package):
    name = package.__name__.split(".")[0]
    assert table.CHECKED_VERSIONS[name].count(".") == 2


def test_autograph_leaves_library_code_as_it_is():
    """It converted all that a program's step calls: five times as long a first step."""
    for function in (losses.loss_replica_count, make_strategy(1).run):
        assert conversion.is_allowlisted(function)
    assert not conversion.is_allowlisted(make_strategy)
