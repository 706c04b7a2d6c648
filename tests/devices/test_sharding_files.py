"""Files of a sharded model: any replicas, any stage and plain Keras read them.

A file holds whole variables, so what is loaded equals what was saved to the last bit.
Training goes on after it as it does unsharded from the same file.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    rounding_bound,
    train,
)

# Saved by (replicas, stage), read by (replicas, stage); None: plain Keras.
WAYS = [
    ((2, 1), (3, 3)),
    ((2, 2), (4, 1)),
    ((3, 3), (2, 2)),
    ((2, 3), (2, 0)),
    ((2, 0), (4, 3)),
    ((4, 3), (1, 3)),
    ((2, 3), None),
    ((3, 1), None),
]
ids = "{}".format


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def scope_of(reader):
    """The scope of a strategy of (replicas, stage); of one device for None."""
    if reader is None:
        return tf.distribute.get_strategy().scope()
    return make_strategy(*reader).scope()


def compiled(reader):
    with scope_of(reader):
        model = dense_model()
        model.compile(
            adam(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    return model


def go_on(model):
    # Other batches than before: a step that was not restored would show.
    x, y = classification_data(seed=8)
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    return model


def assert_equal_variables(a, b):
    """Weights, slots, counters: to the last bit."""
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


@functools.cache
def saved(writer):
    model, _ = train(make_strategy(*writer), optimizer=adam, epochs=1)
    return model


@pytest.mark.parametrize("writer, reader", WAYS, ids=ids)
def test_a_keras_file_is_loaded_and_training_goes_on(writer, reader, tmp_path):
    model, path = saved(writer), tmp_path / "model.keras"
    model.save(path)
    with scope_of(reader):
        loaded = keras.models.load_model(path)
    assert_equal_variables(loaded.weights, model.weights)
    assert_equal_variables(loaded.optimizer.variables, model.optimizer.variables)
    assert loaded.optimizer.iterations.numpy() == 4

    replicas = 1 if reader is None else reader[0]
    with scope_of((replicas, 0)):
        unsharded = keras.models.load_model(path)
    difference = largest_difference(go_on(loaded), go_on(unsharded))
    if replicas < 3:
        assert difference == 0.0
    # As in test_strategy.py; the sums of three replicas have an order.
    bound = rounding_bound(model, 4, batch_size=24, gradient_bound=3, learning_rate=0.5)
    assert difference <= bound
    assert largest_difference(loaded, model) > 10 * bound


@pytest.mark.parametrize("writer, reader", WAYS, ids=ids)
def test_a_file_of_weights_is_loaded(writer, reader, tmp_path):
    model, path = saved(writer), tmp_path / "model.weights.h5"
    model.save_weights(path)
    with scope_of(reader):
        other = dense_model()
        other.set_weights([w + 1 for w in other.get_weights()])
    other.load_weights(path)
    assert_equal_variables(other.weights, model.weights)


@pytest.mark.parametrize("writer, reader", WAYS, ids=ids)
def test_a_checkpoint_of_tensorflow_is_restored(writer, reader, tmp_path):
    model = saved(writer)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    other = compiled(reader)
    assert largest_difference(other, model) > 1e-3
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    assert_equal_variables(other.weights, model.weights)
    assert_equal_variables(other.optimizer.variables, model.optimizer.variables)


def test_a_checkpoint_holds_the_whole_variables(tmp_path):
    model = saved((3, 3))
    path = tf.train.Checkpoint(kernel=model.weights[0].value).save(tmp_path / "c")
    (name,) = [n for n, _ in tf.train.list_variables(path) if n.startswith("kernel")]
    stored = tf.train.load_variable(path, name)
    np.testing.assert_array_equal(stored, model.weights[0].numpy())


def normalised_model():
    # The moving statistics stay whole; 165 weights do not divide by 2.
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(33, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(5),
        ]
    )


@pytest.mark.parametrize("replicas, stage", [(2, 1), (2, 2), (2, 3), (3, 3)])
def test_a_model_is_exported_by_the_program_that_trains_it(replicas, stage, tmp_path):
    x, _ = classification_data(samples=8)
    strategy = make_strategy(replicas, stage)
    model, _ = train(strategy, build=normalised_model, optimizer=adam, epochs=1)
    for folder in (tmp_path / "first", tmp_path / "second"):
        model.export(folder, verbose=False)
        artifact = tf.saved_model.load(folder)  # kept, or its variables are gone
        assert_equal_variables(artifact.variables, model.weights)
        # Two orders of a dot product of 33 terms each way, of numbers below 10.
        served = artifact.serve(x)
        np.testing.assert_allclose(served, model.predict(x, verbose=0), atol=4e-5)
        go_on(model)
    # The file does not change with the model.
    assert np.abs(artifact.serve(x) - model.predict(x, verbose=0)).max() > 1e-3


def test_training_goes_on_after_an_export_as_without(tmp_path):
    models = []
    for is_exported in (False, True):
        model, _ = train(make_strategy(2, 3), optimizer=adam, epochs=1)
        if is_exported:
            model.export(tmp_path, verbose=False)
        models.append(go_on(model))
    assert_equal_variables(*[model.weights for model in models])
    assert_equal_variables(*[model.optimizer.variables for model in models])


def test_a_saved_model_takes_no_memory_for_sharded_weights(tmp_path):
    model = saved((2, 3))
    model.export(tmp_path, verbose=False)
    for weight in model.weights:
        handle = weight.value.saved_model_stand_in.handle
        assert not tf.raw_ops.VarIsInitializedOp(resource=handle)
    stored = tf.train.list_variables(str(tmp_path / "variables" / "variables"))
    # Once, and whole.
    shapes = [tuple(shape) for name, shape in stored if shape]
    assert sorted(shapes) == sorted(tuple(weight.shape) for weight in model.weights)


def test_a_function_of_a_module_is_saved_with_sharded_weights(tmp_path):
    x, _ = classification_data(samples=8)
    module = tf.Module()
    module.model = saved((3, 3))
    module.score = tf.function(
        lambda rows: module.model(rows),
        input_signature=[tf.TensorSpec((None, 12), tf.float32)],
    )
    expected = module.score(x)  # traced before, with the shards
    tf.saved_model.save(module, tmp_path)
    artifact = tf.saved_model.load(tmp_path)
    np.testing.assert_array_equal(artifact.score(x), expected)
    np.testing.assert_array_equal(module.score(x), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_interrupted_run_goes_on_from_its_backup(stage, tmp_path):
    x, y = classification_data()
    model, uninterrupted = compiled((2, stage)), compiled((2, stage))
    options = {"batch_size": 24, "shuffle": False, "verbose": 0}
    uninterrupted.fit(x, y, epochs=2, **options)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, epochs=2, callbacks=[backup, Interrupt()], **options)
    fresh = compiled((2, stage))
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    fresh.fit(x, y, epochs=2, callbacks=[backup], **options)
    assert largest_difference(fresh, uninterrupted) == 0.0
