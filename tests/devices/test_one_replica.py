"""One replica does in a step what Keras does without a strategy, and nothing else."""

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfdp

ROWS, BATCH, CLASSES = 19, 8, 3  # the last batch has three rows

# A step begins when its batch is there (`tfdp/step/batch_first.py`): one operation that
# computes nothing, and one constant that waits for it, and so is not shared with an
# equal one that does not.
MORE_OPERATIONS = {"NoOp": 1, "Const": 1}


def _network():
    """Moving statistics, random numbers, a penalty, and slots of an optimizer."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    penalty = keras.regularizers.L2(1e-2)
    return keras.Model(
        inputs, keras.layers.Dense(CLASSES, kernel_regularizer=penalty)(x)
    )


def _transformer():
    """Attention, whose dropout draws as well, and embeddings."""
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8)(inputs)
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(2, 4, dropout=0.2)(y, y)
    x = x + keras.layers.Dense(8)(x)  # TensorFlow loses the shape of its gradient
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


NETWORKS = {"network": _network, "transformer": _transformer}


def _trainee(name, scope):
    keras.utils.set_random_seed(7)
    with scope:
        model = NETWORKS[name]()
        model.compile(
            keras.optimizers.AdamW(1e-2, clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def _both(name):
    one = tfdp.DataParallelStrategy(["CPU:0"], alone=True)
    yield _trainee(name, contextlib.nullcontext())
    yield _trainee(name, one.scope())


def _rows(model):
    generator = np.random.default_rng(3)
    shape = (ROWS, *model.inputs[0].shape[1:])
    whole = model.inputs[0].dtype == "int32"
    x = generator.integers(20, size=shape) if whole else generator.normal(size=shape)
    return x.astype(model.inputs[0].dtype), generator.integers(CLASSES, size=ROWS)


@pytest.mark.parametrize("name", NETWORKS)
def test_fit_equals_keras_bit_for_bit(name):
    found = []
    for model in _both(name):
        x, y = _rows(model)
        history = model.fit(
            x, y, BATCH, epochs=3, validation_data=(x[:5], y[:5]), verbose=0
        )
        found.append(
            [
                *model.get_weights(),
                *(variable.numpy() for variable in model.optimizer.variables),
                *map(np.asarray, history.history.values()),
                model.predict(x, BATCH, verbose=0),
                np.asarray(model.evaluate(x, y, BATCH, verbose=0)),
            ]
        )
    for of_keras, of_tfdp in zip(*found, strict=True):
        np.testing.assert_array_equal(of_tfdp, of_keras)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_runs_the_operations_of_keras(name):
    """Counted in the largest graph that TensorFlow's optimizer leaves to be run."""
    counts = []
    for model in _both(name):
        x, y = _rows(model)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        context.context().enable_graph_collection()
        try:
            model.fit(batches, steps_per_epoch=2, verbose=0)
            graphs = context.context().export_run_metadata().function_graphs
        finally:
            context.context().disable_graph_collection()
        run = [
            [node.op for node in one.node] for g in graphs for one in g.partition_graphs
        ]
        counts.append(collections.Counter(max(run, key=len)))
    of_keras, of_tfdp = counts
    more = of_tfdp - of_keras
    assert not more - collections.Counter(MORE_OPERATIONS), more
    assert sum(of_tfdp.values()) <= sum(of_keras.values()) + len(MORE_OPERATIONS)


def test_a_loop_reads_the_iterator_that_keras_reads():
    """Each call of a step looks at it in Python; others take longer."""
    kinds = []
    for model in _both("network"):
        x, y = _rows(model)
        model.make_train_function()
        step, seen = model.train_function, []

        def noting(iterator, step=step, seen=seen):
            seen.append(type(iterator))
            return step(iterator)

        model.train_function = noting
        model.fit(x, y, BATCH, verbose=0)
        kinds.append(seen)
    assert kinds[0] == kinds[1] and len(kinds[0]) == 3
