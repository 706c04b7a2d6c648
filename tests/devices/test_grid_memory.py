"""No device has more of a weight than its block while a model is made, or loaded.

The replicas are on CPU:2 and CPU:3; the host, where weights may be whole, is CPU:0.
"""

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import tfdp
from tests.support.grids import rows_of
from tfdp.checkpoint import Checkpoint
from tfdp.grid import updates
from tfdp.grid.updates import BlockSums, MeshVariable

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

DEVICES = ("CPU:2", "CPU:3")
WHOLE = 12 * 16


@contextlib.contextmanager
def largest_by_device():
    """The most elements of a tensor that an operation read or made on each device,
    outside of functions."""
    most = collections.Counter()

    def note(op_type, inputs, attributes, outputs, op_name=None, graph=None):
        tensors = [*inputs, *(outputs or ())]
        if graph is None and tensors:
            # A resource is where the operation runs; its inputs are copied there.
            placed = (
                [t for t in tensors if t.dtype == tf.resource] or outputs or tensors
            )
            device = placed[0].device.split("device:")[-1]
            sizes = [t.shape.num_elements() or 1 for t in tensors]
            most[device] = max(most[device], *sizes)

    op_callbacks.add_op_callback(note)
    try:
        # Where there are GPUs, the first one is the place of all else.
        with tf.device(DEVICES[0]):
            yield most
    finally:
        op_callbacks.remove_op_callback(note)


def strategy_of(shape=(1, 2)):
    mesh = keras.distribution.DeviceMesh(shape, ["data", "model"], list(DEVICES))
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*up/kernel"] = (None, "model")
    return tfdp.DataParallelStrategy(layout=layout)


def build():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(16, use_bias=False, name="up")]
    )


def compiled():
    with strategy_of().scope():
        model = build()
        model.compile(
            keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.optimizer.build(model.trainable_variables)
    return model


def by_keras_file(model, path):
    model.save(path / "model.keras")

    def load():
        with strategy_of().scope():
            return keras.models.load_model(path / "model.keras")

    return load


def by_weights(model, path):
    model.save_weights(path / "model.weights.h5")
    return lambda: compiled().load_weights(path / "model.weights.h5")


def by_arrays(model, path):
    weights = [tf.constant(weight) for weight in model.get_weights()]
    return lambda: compiled().set_weights(weights)


def by_tensorflow(model, path):
    written = tf.train.Checkpoint(model=model).save(path / "checkpoint")
    return lambda: tf.train.Checkpoint(model=compiled()).restore(written)


def by_tfdp(model, path):
    files = Checkpoint(path)
    files.save(model, step=1)
    files.wait()
    return lambda: files.restore(compiled())


WAYS = [by_keras_file, by_weights, by_arrays, by_tensorflow, by_tfdp]


def assert_in_blocks(most):
    assert 0 < max(most[device] for device in DEVICES) <= WHOLE // 2, most


def test_a_model_is_made_in_blocks():
    with largest_by_device() as most:
        model = compiled()
    assert_in_blocks(most)
    kept = [v.value for v in model.optimizer.variables if v.shape == (12, 16)]
    assert len(kept) == 4  # momentum, velocity, average, accumulator
    for variable in [*kept, model.get_layer("up").kernel.value]:
        for block, device in zip(variable.values, DEVICES, strict=True):
            assert block.shape == (12, 8) and block.device.endswith(device)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_written_and_loaded_in_blocks(way, tmp_path):
    model = compiled()
    with largest_by_device() as most:
        load = way(model, tmp_path)
        load()
    assert_in_blocks(most)


@pytest.mark.parametrize(
    "changed, name, value",
    [
        (MeshVariable, "cutting_device", None),
        (BlockSums, "cutting_device", None),
        (updates, "HOST", DEVICES[0]),
    ],
)
def test_the_count_sees_a_whole_weight_on_a_device(changed, name, value, monkeypatch):
    monkeypatch.setattr(changed, name, value)
    with largest_by_device() as most:
        compiled().get_weights()
    assert max(most[device] for device in DEVICES) >= WHOLE


def test_the_first_step_makes_slots_in_blocks():
    with strategy_of().scope():
        model = build()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    x, y = rows_of(4)
    with largest_by_device() as most:
        model.fit(x, y, batch_size=2, verbose=0)
    assert_in_blocks(most)
    assert np.isfinite(model.get_weights()[0]).all()
