"""Input that one device takes: generators, None, sparse rows, nothing at all."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    copies,
    make_strategy,
    unequal_copies,
)
from tfdp.data.split import in_parts, parts
from tfdp.errors import DataError

# 4 steps at rate 0.05 (0.5 with momentum 0.9) with gradients below 1, sums of less than
# 50 terms: 4 x 0.5 x 50 x 6e-8 = 6e-6 at most. A batch that is left out moves weights
# by 1e-2.
TOLERANCE = 1e-5

x, y = classification_data(samples=9)


def model_of(strategy, features=12, **options):
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((features,)), keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.05)
        model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def both(run):
    """What `run(strategy)` gives on three replicas and on one device."""
    return run(make_strategy(3)), run(None)


def assert_alike(several, one):
    pairs = zip(tf.nest.flatten(several), tf.nest.flatten(one), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_no_batch_of_a_generator_is_lost():
    """One-row batches leave replicas without rows; the sixth never comes again."""

    def batches():
        for start, stop in [(0, 1), (1, 4), (4, 5), (5, 6), (6, 8), (8, 9)]:
            yield x[start:stop], y[start:stop]

    def run(strategy):
        model = model_of(strategy)
        losses = model.fit(
            batches(), validation_data=batches(), epochs=1, verbose=0
        ).history
        steps = model.fit(batches(), steps_per_epoch=2, epochs=2, verbose=0).history
        return losses, steps, model.get_weights()

    assert_alike(*both(run))


def test_building_a_model_reads_no_batch():
    read = []

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, place):
            read.append(place)
            return x[3 * place : 3 * place + 3], y[3 * place : 3 * place + 3]

    def adapter_reads():
        """Keras reads the first batch of its own accord, for shapes."""
        read.clear()
        keras.src.trainers.data_adapters.get_data_adapter(Batches()).get_tf_dataset()
        return len(read)

    own = adapter_reads()
    model = model_of(make_strategy(3))
    read.clear()
    model.fit(Batches(), shuffle=False, verbose=0)
    assert len(read) - own == 3


def test_empty_input_is_evaluated_and_trained_as_on_one_device():
    none = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(0)

    def run(strategy):
        model = model_of(strategy)
        before = model.evaluate(none, verbose=0)
        history = model.fit(
            x, y, batch_size=8, shuffle=False, validation_data=none, verbose=0
        ).history
        return before, history, model.get_weights()

    with pytest.warns(UserWarning, match="ran out of data"):
        assert_alike(*both(run))


def test_sparse_rows_where_a_replica_has_none():
    dense = x.copy()
    dense[dense < 0] = 0
    batches = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), y))

    def run(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            keras.utils.set_random_seed(3)
            inputs = keras.Input((12,), sparse=True)
            model = keras.Model(inputs, keras.layers.Dense(5)(inputs))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=False)
        history = model.fit(batches.batch(8), verbose=0).history
        features = batches.map(lambda x, y: x).batch(8)
        return history, model.get_weights(), model.predict(features, verbose=0)

    assert_alike(*both(run))


def test_none_in_a_batch():
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with_none = batches.map(lambda x, y: (x, y, None))

    def run(strategy):
        model = model_of(strategy)
        history = model.fit(with_none, verbose=0).history
        return history, model.evaluate(with_none, verbose=0), model.get_weights()

    assert_alike(*both(run))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda x, y: (x, y, tf.constant(1.0)), "2 of each batch is a scalar"),
        (lambda x, y: (x[:4], y[:2]), "0 and 1 of each batch have 4 and 2 rows"),
        (lambda x, y: (x, y, None), "2 of each batch is None"),
    ],
)
def test_elements_that_cannot_be_split_are_refused(add, message):
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    with pytest.raises(DataError, match=message):
        make_strategy(3).experimental_distribute_dataset(batches.map(add))


def test_lengths_that_only_the_data_tell_are_refused_with_the_batch():
    """TensorFlow would leave rows of the longer element out."""
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    longer = batches.map(lambda x, y: (x, tf.concat([y, y], axis=0)))
    distributed = make_strategy(3).experimental_distribute_dataset(longer)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="different numbers of rows"
    ):
        next(iter(distributed))


def test_the_check_of_lengths_does_not_hide_the_size_of_batches():
    strategy = make_strategy(3)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    (first, _), *_ = strategy.experimental_distribute_dataset(batches)
    assert [len(part) for part in strategy.experimental_local_results(first)] == [
        3,
        3,
        2,
    ]


@pytest.mark.parametrize(
    ("rows", "expected"), [(8, [3, 3, 2]), (4, [2, 1, 1]), (1, [1, 0, 0])]
)
def test_parts_of_a_batch(rows, expected):
    sparse = tf.sparse.from_dense(np.arange(1.0, 1 + 2 * rows).reshape(rows, 2))
    dense = np.arange(rows)
    batches = tf.data.Dataset.from_tensors((sparse, dense))
    split = list(parts(batches, 3))
    assert [int(part.dense_shape[0]) for part, _ in split] == expected
    np.testing.assert_array_equal(np.concatenate([part for _, part in split]), dense)
    joined = tf.sparse.concat(0, [part for part, _ in split])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(joined), tf.sparse.to_dense(sparse)
    )


def words_model(strategy, reduction):
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(6, 5),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(5),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )
        optimizer = keras.optimizers.SGD(0.05, global_clipnorm=0.1)
        model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=False)
    return model


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
def test_one_batch_is_split_like_those_of_fit(reduction):
    """A sum over the whole batch on every replica is N times too large, and the rows of
    an embedding's gradient that all replicas have enter its norm N times."""
    words = np.random.default_rng(5).integers(0, 6, (9, 4))
    weights = np.linspace(0.2, 2.0, 9)

    def run(strategy):
        model = words_model(strategy, reduction)
        logs = [
            model.train_on_batch(
                words[:rows], y[:rows], sample_weight=weights[:rows], return_dict=True
            )
            for rows in (9, 5, 1)
        ]
        logs.append(model.test_on_batch(words[:5], y[:5], return_dict=True))
        return logs, model.predict_on_batch(words[:5]), model.get_weights()

    assert_alike(*both(run))
    with pytest.raises(DataError, match="scalar"):
        in_parts((words, np.float32(1)), ["CPU:0", "CPU:1"])


def from_generator(batches):
    """A dataset of unknown length: its end is found by a step that fails."""
    spec = tf.nest.map_structure(
        lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), batches[0]
    )
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


@pytest.mark.parametrize("pad_batches", [False, 8])
def test_a_step_that_got_no_batch_changes_nothing(pad_batches):
    """Counters, decay, seeds and the weight of a report need nothing of a batch.

    One device that knows the length makes no such step.
    """

    def run(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            keras.utils.set_random_seed(3)
            inputs = keras.Input((12,))
            seeded = keras.layers.Dropout(1e-7, seed=1)(inputs)
            first = keras.layers.Dense(5, name="first")(seeded)
            second = keras.layers.Dense(5, name="second")(inputs)
            model = keras.Model(inputs, [first, second])
            optimizer = keras.optimizers.SGD(0.05, weight_decay=0.1)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, [loss, loss], jit_compile=False)
        batches = from_generator([(x[:8], (y[:8], y[:8]))])
        if strategy is None:
            batches = batches.apply(tf.data.experimental.assert_cardinality(1))
        history = model.fit(batches, epochs=2, verbose=0).history
        state = [*model.variables, *optimizer.variables]
        assert unequal_copies(state) == []
        return history, [copies(variable)[0] for variable in state]

    devices = ["CPU:0", "CPU:1"]
    strategy = tfdp.DataParallelStrategy(devices, pad_batches=pad_batches)
    assert_alike(run(strategy), run(None))


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["plain", "tf"])
def test_a_loop_of_your_own_that_got_no_batch_changes_nothing(wrap):
    strategy = make_strategy(2)
    with strategy.scope():
        steps = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    @wrap
    def step(batch):
        steps.assign(steps + 1)

    @tf.function
    def train(batches):
        strategy.run(step, args=(next(batches),))

    batches = iter(strategy.experimental_distribute_dataset(from_generator([x, x])))
    with pytest.raises(tf.errors.OutOfRangeError):
        while True:
            train(batches)
    assert copies(steps) == [2, 2]


class OfValues(keras.Model):
    """Takes a ragged tensor apart, which Keras' shapes of a batch are not."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)

    def call(self, inputs):
        values = inputs.with_values(self.dense(inputs.values))
        return tf.reduce_mean(values, axis=1)


@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_a_built_model_is_not_called_on_shapes(metrics):
    """Under a strategy Keras does, before it trains; one device does not."""
    lengths = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    values = np.random.default_rng(0).normal(size=(25, 4)).astype("float32")
    ragged = tf.RaggedTensor.from_row_lengths(values, lengths)
    data = tf.data.Dataset.from_tensor_slices((ragged, y)).batch(4)

    def run(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            keras.utils.set_random_seed(3)
            model = OfValues()
            model(ragged[:2])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=metrics, jit_compile=False)
        return model.fit(data, epochs=2, verbose=0).history, model.get_weights()

    assert_alike(*both(run))


def test_a_layer_that_works_in_training_only():
    """`RandomCrop` does not crop outside of it (Keras 3.15)."""
    with make_strategy(2).scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.RandomCrop(6, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", "mse", jit_compile=False)
    images = np.random.default_rng(0).normal(size=(7, 8, 8, 1))
    history = model.fit(images, np.ones((7, 3)), batch_size=4, verbose=0).history
    assert np.isfinite(history["loss"]).all()
