"""Files of a model that a mesh cuts: whole weights, which any mesh and shard= reads."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.grids import MLP_RULES, blocks_of, grid, rows_of
from tests.support.parity import make_strategy, rounding_bound
from tfdp.checkpoint import Checkpoint, merge_parts

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

#: One after the other: each reads what the one before has written.
WAYS = {
    "2x2": lambda: grid((2, 2), RULES),
    "1x4": lambda: grid((1, 4), RULES),
    "4x1": lambda: grid((4, 1), RULES),
    "one": tf.distribute.get_strategy,
    "parameters": lambda: make_strategy(4, "parameters"),
    "mixed": lambda: grid((2, 2), MLP_RULES, shard="optimizer", shard_min_bytes=0),
    "again": lambda: grid((2, 2), RULES),
}
RULES = {**MLP_RULES, "head/kernel": ("data", "model")}


SEEDS = "seed_generator/seed_generator_state"


def build():
    keras.utils.set_random_seed(3)
    layers = keras.layers
    inputs = keras.Input((12,))
    hidden = layers.Dense(16, "gelu", name="up")(inputs)
    hidden = tfdp.layers.SyncBatchNormalization(name="norm")(hidden)
    # Has a seed, and drops none of these few entries.
    hidden = layers.Dropout(1e-7, seed=5, name="drop")(hidden)
    hidden = layers.Dense(12, name="down")(hidden)
    return keras.Model(inputs, layers.Dense(4, name="head")(hidden))


def compiled(way, **options):
    with WAYS[way]().scope():
        model = build()
        # Each number of its state is of the size of the gradient, not of its sign.
        adam = keras.optimizers.Adam(0.01, epsilon=1e-3, use_ema=True, **options)
        model.compile(
            adam,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, seed):
    x, y = rows_of(48, seed)
    model.fit(x, y % 4, batch_size=12, shuffle=False, verbose=0)
    return model


def state_of(model):
    """All variables by their paths, which do not depend on the cut."""
    variables = [*model.variables, *model.optimizer.variables]
    # Keras numbers what it names itself by what the process made before.
    own = re.compile(r"^(seed_generator|adam)_\d+/")
    state = {
        own.sub(r"\1/", variable.path): np.asarray(variable.numpy())
        for variable in variables
    }
    assert len(state) == len(variables)
    return state


def assert_same(left, right):
    assert list(left) == list(right)
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def by_keras_file(model, way, path):
    model.save(path / "model.keras")
    with WAYS[way]().scope():
        return keras.models.load_model(path / "model.keras")


def by_weights(model, way, path):
    model.save_weights(path / "model.weights.h5")
    loaded = compiled(way)
    loaded.load_weights(path / "model.weights.h5")
    for old, new in zip(
        model.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        new.assign(old.numpy())  # the file has none of them
    return loaded


def by_tensorflow(model, way, path):
    def files(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    written = files(model).save(path / "checkpoint")
    loaded = compiled(way)
    files(loaded).restore(written).assert_existing_objects_matched()
    return loaded


def by_tfdp(model, way, path):
    Checkpoint(path / "run").save(model, step=1)
    files, loaded = Checkpoint(path / "run"), compiled(way)
    assert files.restore(loaded).step == 1
    return loaded


def by_merged_parts(model, way, path):
    files = Checkpoint(path / "run")
    files.save(model, step=1)
    files.wait()
    merge_parts(path / "run", path / "merged.keras")
    with WAYS[way]().scope():
        return keras.models.load_model(path / "merged.keras")


def by_arrays(model, way, path):
    loaded = compiled(way)
    loaded.set_weights(model.get_weights())
    for old, new in zip(
        [*model.variables, *model.optimizer.variables],
        [*loaded.variables, *loaded.optimizer.variables],
        strict=True,
    ):
        new.assign(old.numpy())
    return loaded


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize(
    "move",
    [
        *(by_keras_file, by_tfdp),
        *map(slow, (by_weights, by_tensorflow, by_merged_parts, by_arrays)),
    ],
)
def test_any_mesh_reads_what_another_has_written(move, tmp_path):
    model = fit(compiled("2x2"), seed=1)
    state, arrays = state_of(model), model.get_weights()
    if move not in (by_tfdp, by_arrays):
        state[SEEDS][1] = 0  # the files of Keras and TensorFlow have no seeds
    one = fit(move(model, "one", _made(tmp_path / "first")), seed=2)
    bound = rounding_bound(one, 4, 12, 8.0, 10.0)
    for way in [*WAYS][1:]:
        model = move(model, way, _made(tmp_path / way))
        assert_same(state_of(model), state)
        for mine, first in zip(model.get_weights(), arrays, strict=True):
            np.testing.assert_array_equal(mine, first)
        if way not in ("1x4", "parameters", "again"):
            continue
        goes_on = fit(move(model, way, _made(tmp_path / f"{way}-on")), seed=2)
        for name, value in state_of(goes_on).items():
            close = {"rtol": 0, "atol": bound, "err_msg": name}
            np.testing.assert_allclose(value, state_of(one)[name], **close)
    assert blocks_of(model.get_layer("head").kernel)[0].shape == (6, 2)


def _made(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_a_model_in_blocks_is_exported(shape, tmp_path):
    model = fit(compiled("2x2" if shape == (2, 2) else "1x4"), seed=1)
    model.export(tmp_path, verbose=False)
    served = tf.saved_model.load(tmp_path)
    stored = [variable for variable in served.variables if variable.dtype.is_floating]
    for mine, weight in zip(stored, model.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), weight.numpy())
    x, _ = rows_of(8)
    # Two orders of a dot product of 16 terms each way, of numbers below 30.
    np.testing.assert_allclose(served.serve(x), model.predict(x, verbose=0), atol=4e-5)
    fit(model, seed=2)  # and trains on


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("way", ["one", "1x4", *map(slow, ("parameters", "mixed"))])
def test_an_accumulation_goes_on_where_it_was_saved(way, tmp_path):
    """Saved between two updates: an accumulator holds the block's sums so far."""
    options = {"gradient_accumulation_steps": 3}
    model, files = fit(compiled("2x2", **options), seed=1), Checkpoint(tmp_path)
    files.save(model, step=4)
    files.wait()
    other = compiled(way, **options)
    assert files.restore(other).step == 4
    found = state_of(fit(other, seed=2))
    bound = rounding_bound(model, 8, 12, 8.0, 10.0)
    for path, value in state_of(fit(model, seed=2)).items():
        # Others sum gradients, and statistics, at an update only.
        if "accumulator" not in path and "norm/moving" not in path:
            np.testing.assert_allclose(
                found[path], value, rtol=0, atol=bound, err_msg=path
            )


@functools.cache
def names_of(way):
    return list(state_of(compiled(way)))


@pytest.mark.parametrize("way", WAYS)
def test_the_names_of_variables_do_not_depend_on_the_cut(way):
    assert names_of(way) == names_of("one")


def test_a_training_is_resumed_on_another_mesh(tmp_path):
    """By the callback, in the middle of an epoch: as if nothing had happened."""
    x, y = rows_of(48, 1)
    data = tf.data.Dataset.from_tensor_slices((x, y % 4)).batch(12)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    def training(way, *callbacks):
        model = compiled(way)
        files = tfdp.callbacks.Checkpoint(tmp_path, every_steps=2)
        model.fit(data, epochs=2, verbose=0, callbacks=[files, *callbacks])
        return model

    whole = compiled("2x2")
    whole.fit(data, epochs=2, verbose=0)
    with pytest.raises(KeyboardInterrupt):
        training("2x2", Stop())
    resumed = training("1x4")
    bound = rounding_bound(whole, 8, 12, 8.0, 10.0)
    for path, value in state_of(whole).items():
        np.testing.assert_allclose(
            state_of(resumed)[path], value, rtol=0, atol=bound, err_msg=path
        )
