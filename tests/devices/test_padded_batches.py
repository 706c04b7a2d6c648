"""Short batches filled up: fixed shapes, and one device's numbers all the same.

Over the TPU's stand-in, where batches are always filled up, and over a mirrored
strategy that was asked to.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_fits_exact import fit_and_evaluate
from tests.support.conformance_fits import (
    BATCH_SIZE,
    FITS,
    ROWS_OF_FIT,
    crossentropy,
    penalised_model,
    random_weights,
    rows,
    two_outputs,
)
from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY
from tests.support.parity import classification_data, dense_model, train
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.data.padding import global_batch_rows, is_of_one_size, pad_parts
from tfdp.errors import ConfigurationError, DataError, LocalMeanWarning


def padding_mirrored(replicas, pad_batches=True):
    return tfdp.DataParallelStrategy(
        [f"CPU:{i}" for i in range(replicas)], pad_batches=pad_batches
    )


STRATEGIES = {
    "tpu-1": lambda: StandInStrategy(1),
    "tpu-2": lambda: StandInStrategy(2),
    "mirrored-1": lambda: padding_mirrored(1),
    "mirrored-4": lambda: padding_mirrored(4),
}
COVERING = {
    ("class_weight", "tpu-1"),
    ("mean_with_sample_weight", "mirrored-4"),
    ("masked", "tpu-2"),
    ("masked", "mirrored-1"),
    ("two-outputs-masked", "tpu-2"),
    ("ctc", "tpu-1"),
}
# What a layer adds to the loss by itself counts the filling: refused, see below.
EXACT_FITS = [name for name in FITS if name != "regularizers-add_loss"]


def assert_equal_to_one_device(strategy, fit):
    start, one, history_one, report_one = fit_and_evaluate(None, *fit)
    _, several, history, report = fit_and_evaluate(strategy, *fit)
    # As in test_fits_exact: 3 updates, 2e-5; a wrong share of one is above 1e-2.
    for a, b, before in zip(one, several, start, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5)
        assert np.abs(a - before).max() > 2e-4
    assert history.keys() == history_one.keys()
    for key, values in history_one.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5)
    assert report.keys() == report_one.keys()
    for key, value in report_one.items():
        np.testing.assert_allclose(report[key], value, rtol=1e-5)


@pytest.mark.parametrize(
    "name, strategy",
    [
        pytest.param(
            name,
            strategy,
            marks=() if (name, strategy) in COVERING else pytest.mark.slow,
        )
        for name in EXACT_FITS
        for strategy in STRATEGIES
    ],
)
def test_fit_and_evaluate_equal_one_device(name, strategy):
    assert_equal_to_one_device(STRATEGIES[strategy](), FITS[name])


def metrics():
    return {
        "metrics": ["accuracy", "sparse_top_k_categorical_accuracy"],
        "weighted_metrics": ["sparse_categorical_crossentropy"],
    }


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_count_real_rows_once(strategy, weighted):
    more = {"sample_weight": random_weights()} if weighted else {}
    assert_equal_to_one_device(
        STRATEGIES[strategy](), (dense_model, crossentropy(), rows(**more), metrics())
    )


def test_confusion_metrics_count_real_rows_once():
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, "sigmoid")])

    x, y = classification_data(samples=ROWS_OF_FIT)
    options = {"metrics": ["auc", "recall"]}
    fit = (build, "binary_crossentropy", {"x": x, "y": (y > 2)[:, None]}, options)
    assert_equal_to_one_device(StandInStrategy(2), fit)


def test_confusion_metrics_of_sequences_count_real_rows_once():
    """As many time steps as a replica has rows: weights along either axis fit."""
    steps = BATCH_SIZE // 2

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((steps, 3))
        return keras.Model(inputs, keras.layers.Dense(2, "sigmoid")(inputs))

    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS_OF_FIT, steps, 3)).astype("float32")
    y = (rng.uniform(size=(ROWS_OF_FIT, steps, 2)) > 0.5).astype("float32")
    options = {"metrics": ["auc", "recall", "binary_accuracy"]}
    fit = (build, "binary_crossentropy", {"x": x, "y": y}, options)
    assert_equal_to_one_device(StandInStrategy(2), fit)


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
)
def test_losses_of_sequences(reduction):
    """Several loss entries for each row, none of them masked."""

    def build():
        keras.utils.set_random_seed(0)
        return two_outputs()

    x, y = classification_data(samples=ROWS_OF_FIT)
    targets = np.random.default_rng(3).normal(size=(ROWS_OF_FIT, 3, 2))
    loss = {"a": crossentropy(), "b": keras.losses.MeanAbsoluteError(reduction)}
    data = {"x": x, "y": {"a": y, "b": targets.astype("float32")}}
    assert_equal_to_one_device(StandInStrategy(2), (build, loss, data, {}))


@pytest.mark.parametrize("strategy", ["tpu-2", "mirrored-1", "mirrored-4"])
def test_reports_of_losses_of_single_rows(strategy):
    """Keras takes no mean of them in the loss, but where it is reported."""

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12,))
        heads = {name: keras.layers.Dense(5, name=name)(inputs) for name in "ab"}
        return keras.Model(inputs, heads)

    x, y = classification_data(samples=ROWS_OF_FIT)
    loss = dict.fromkeys("ab", crossentropy(reduction="none"))
    # Sums over 6 rows move weights as far as means do of rows that are 6 times less.
    data = {"x": x / 6, "y": {"a": y, "b": y}}
    assert_equal_to_one_device(STRATEGIES[strategy](), (build, loss, data, {}))


class OfUnknownLength(keras.layers.Layer):
    """Hides the static number of rows from Keras, which weighs reports by it."""

    def call(self, x):
        is_symbolic = isinstance(x, tf.Tensor) and not tf.executing_eagerly()
        shape = (None, *x.shape[1:])
        return tf.compat.v1.placeholder_with_default(x, shape) if is_symbolic else x


def test_reports_of_outputs_without_a_static_length():
    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12,))
        rows_of = OfUnknownLength()(inputs)
        heads = [keras.layers.Dense(5, name=name)(rows_of) for name in "ab"]
        return keras.Model(inputs, heads)

    x, y = classification_data(samples=ROWS_OF_FIT)
    fit = (build, [crossentropy(), crossentropy()], {"x": x, "y": [y, y]}, {})
    assert_equal_to_one_device(StandInStrategy(2), fit)


@pytest.mark.parametrize("strategy", ["tpu-1", "mirrored-1"])
def test_a_mean_beside_losses_of_single_rows(strategy):
    """Keras adds the mean to the loss of each row. Several replicas refuse this."""

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12,))
        return keras.Model(
            inputs, [keras.layers.Dense(5, name=n)(inputs) for n in "ab"]
        )

    x, y = classification_data(samples=ROWS_OF_FIT)
    loss = [crossentropy(reduction="none"), crossentropy()]
    data = {"x": x / 6, "y": [y, y]}
    assert_equal_to_one_device(STRATEGIES[strategy](), (build, loss, data, {}))


@pytest.mark.parametrize(
    "layer, strategy",
    [
        (tfdp.layers.SyncBatchNormalization, "tpu-2"),
        (tfdp.layers.SyncBatchNormalization, "mirrored-4"),
        (keras.layers.BatchNormalization, "tpu-1"),
    ],
)
def test_batch_statistics_leave_the_filling_out(layer, strategy):
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(6, "tanh"),
                layer(epsilon=0.1),
                keras.layers.Dense(5),
            ]
        )

    # 13 rows: the last batch has 6, for which a variance is well conditioned.
    assert_equal_to_one_device(
        STRATEGIES[strategy](), (build, crossentropy(), rows(13), {})
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [1, 7, 13])
def test_predict_gives_each_row_once_and_in_order(strategy, count):
    x, _ = classification_data(samples=count)
    with STRATEGIES[strategy]().scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Identity()])
    np.testing.assert_array_equal(model.predict(x, batch_size=5, verbose=0), x)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(5)
    np.testing.assert_array_equal(model.predict(dataset, verbose=0), x)


@pytest.mark.parametrize("strategy", ["tpu-2", "mirrored-4"])
@pytest.mark.parametrize("count", [1, 13, 20])
def test_predict_of_two_inputs(strategy, count):
    x, _ = classification_data(samples=count)
    with STRATEGIES[strategy]().scope():
        a, b = keras.Input((12,)), keras.Input((12,))
        model = keras.Model([a, b], keras.layers.Add()([a, b]))
    got = model.predict([x, 2 * x], batch_size=5, verbose=0)
    np.testing.assert_array_equal(got, 3 * x)


def test_predict_of_several_outputs_and_steps():
    x, _ = classification_data(samples=13)
    with StandInStrategy(2).scope():
        inputs = keras.Input((12,))
        model = keras.Model(
            inputs, {"a": keras.layers.Identity()(inputs), "b": inputs[:, :1] * 2}
        )
        model.compile(steps_per_execution=2)
    got = model.predict(x, batch_size=5, verbose=0)
    np.testing.assert_array_equal(got["a"], x)
    np.testing.assert_array_equal(got["b"], x[:, :1] * 2)


def test_accumulation_weighs_batches_by_their_real_rows():
    def run(strategy, **options):
        data = classification_data(samples=17)  # 12 and 5 rows: one update
        return train(strategy, data=data, batch_size=12, epochs=1, **options)[0]

    def accumulating():
        return tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulate_steps=2)

    whole, _ = train(
        None,
        data=classification_data(samples=17),
        batch_size=17,
        epochs=1,
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )
    filled = run(StandInStrategy(2), optimizer=accumulating)
    for a, b in zip(whole.weights, filled.weights, strict=True):
        # One update of 0.1 with a gradient below 10, from sums of 17 + 66 terms.
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=1e-5)


COMPILING = """
import sys
import keras
import tfdp
from tests.support.package_source import REPOSITORY
from tests.support.parity import classification_data, dense_model
tfdp.use_virtual_devices(2)
strategy = tfdp.DataParallelStrategy(pad_batches=sys.argv[1] == "pad")
with strategy.scope():
    model = dense_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=True)
x, y = classification_data(samples=53)
model.fit(x, y, batch_size=24, epochs=2, verbose=0)
"""


def test_jit_compile_of_replicas_compiles_once(tmp_path):
    """XLA's own dump of what it compiled, in a process of its own."""
    program = tmp_path / "program.py"
    program.write_text(COMPILING, "utf-8")

    def compilations(mode):
        dump = tmp_path / mode
        done = run_python(
            program,
            mode,
            cwd=tmp_path,
            environment={
                "PYTHONPATH": str(REPOSITORY),
                "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
            },
        )
        assert done.returncode == 0, done.stderr
        return len(
            [
                path
                for path in dump.iterdir()
                if re.search(r"compute.*before_optimizations\.txt$", path.name)
            ]
        )

    # One for each replica; a last batch of 5 rows (3 and 2) costs one more for each.
    assert compilations("pad") == 2
    assert compilations("no") == 4


class OwnLoss(keras.Model):
    def __init__(self, calls_compute_loss):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.calls_compute_loss = calls_compute_loss

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            if self.calls_compute_loss:
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            else:
                per_row = keras.losses.sparse_categorical_crossentropy(
                    y, y_pred, from_logits=True
                )
                loss = tf.reduce_sum(per_row) / 24
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def fit_own_loss(strategy, calls_compute_loss):
    x, y = classification_data(samples=13)
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(0)
        model = OwnLoss(calls_compute_loss)
        model.compile(keras.optimizers.SGD(0.1), crossentropy(), jit_compile=False)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_step_of_ones_own_that_asks_for_the_loss_is_exact():
    one = fit_own_loss(None, True)
    several = fit_own_loss(StandInStrategy(2), True)
    for a, b in zip(one, several, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5)


def test_a_step_of_ones_own_that_does_not_is_refused():
    with pytest.raises(ConfigurationError, match="compute_loss"):
        fit_own_loss(StandInStrategy(2), False)


def test_a_loss_of_ones_own_is_followed_in_the_program_of_all_replicas():
    class ByHand(OwnLoss):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                per_row = keras.losses.sparse_categorical_crossentropy(
                    y, self(x, training=True), from_logits=True
                )
                loss = tf.reduce_mean(per_row)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": tfdp.losses.local_mean(loss)}

    x, y = classification_data(samples=16)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    with StandInStrategy(2).scope():
        model = ByHand(True)
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    with pytest.warns(LocalMeanWarning, match="a mean over the replica.s rows"):
        model.fit(batches, verbose=0)


def test_losses_that_layers_add_are_refused():
    fit = (penalised_model, crossentropy(), rows(), {})
    with pytest.raises(ConfigurationError, match="adds a loss of its own"):
        fit_and_evaluate(StandInStrategy(2), *fit)
    # Batches of one size are not filled up, so nothing is refused.
    x, y = classification_data(samples=14)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6, drop_remainder=True)
    with StandInStrategy(2).scope():
        model = penalised_model()
        model.compile("sgd", crossentropy())
    model.fit(dataset, verbose=0)


def test_a_loop_of_ones_own_gets_whole_batches_as_they_are():
    strategy = StandInStrategy(2)
    numbers = tf.data.Dataset.range(12, output_type=tf.int32)

    def sums(dataset):
        @tf.function
        def step(batch):
            return strategy.run(lambda x: tf.reduce_sum(x), args=(batch,))

        distributed = strategy.experimental_distribute_dataset(dataset)
        return [
            [int(v) for v in strategy.experimental_local_results(step(batch))]
            for batch in distributed
        ]

    assert sums(numbers.batch(4, drop_remainder=True)) == [
        [0 + 1, 2 + 3],
        [4 + 5, 6 + 7],
        [8 + 9, 10 + 11],
    ]
    with pytest.raises(ConfigurationError, match="not a\\s+method of a Keras model"):
        sums(numbers.batch(5))


def test_a_loss_taken_by_hand_is_refused():
    class Local(OwnLoss):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return tfdp.losses.local_mean(tf.reduce_mean(y_pred))

    x, y = classification_data(samples=13)
    with StandInStrategy(2).scope():
        model = Local(True)
        model.compile("sgd", crossentropy())
    with pytest.raises(ConfigurationError, match="a custom loss counts the padding"):
        model.fit(x, y, batch_size=8, verbose=0)


def elements(dataset):
    return [
        ([int(v) for v in element.batch], [int(v) for v in element.rows])
        for element in dataset
    ]


def test_parts_hold_copies_of_their_own_batch():
    dataset = tf.data.Dataset.range(7).batch(4)  # 4 rows, then 3
    assert elements(pad_parts(dataset, 4, 2)) == [
        ([0, 1], [4, 4]),
        ([2, 3], [4, 4]),
        ([4, 5], [3, 3]),
        ([6, 4], [3, -3]),
    ]
    # 3 rows for 2 replicas make parts of 2; fewer rows than replicas leave one empty.
    assert elements(pad_parts(tf.data.Dataset.range(4).batch(3), 3, 2)) == [
        ([0, 1], [3, 3]),
        ([2, 0], [3, -3]),
        ([3, 3], [1, -1]),
        ([3, 3], [-1, -1]),
    ]


def test_hosts_take_parts_in_turn():
    dataset = tf.data.Dataset.range(8).batch(8)
    hosts = [elements(pad_parts(dataset, 8, 4, host, 2)) for host in range(2)]
    parts = [[data for data, _ in of_host] for of_host in hosts]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_parts_have_fixed_shapes():
    dataset = tf.data.Dataset.from_tensor_slices(classification_data()).batch(24)
    spec = pad_parts(dataset, 24, 4).element_spec
    assert [s.shape for s in tf.nest.flatten(spec)] == [(6, 12), (6,), (6,)]
    assert not is_of_one_size(dataset, 4)
    static = tf.data.Dataset.range(10).batch(4, drop_remainder=True)
    assert is_of_one_size(static, 2) and not is_of_one_size(static, 3)


@pytest.mark.parametrize(
    "behind",
    [
        lambda batches: batches,
        lambda batches: batches.prefetch(1).cache().repeat(2).take(2).skip(1),
        lambda batches: batches.shuffle(2, seed=1).with_options(tf.data.Options()),
        lambda batches: batches.filter(lambda rows: tf.shape(rows)[0] > 0),
    ],
)
@pytest.mark.parametrize("calls", [None, 2])
def test_the_size_of_batches_costs_no_pass_of_a_shuffle(behind, calls):
    def passes(looks):
        numbers = tf.data.Dataset.range(20).shuffle(20, seed=7)
        batches = behind(numbers.batch(8, num_parallel_calls=calls))
        if looks:
            assert global_batch_rows(batches) == 8
        return [[each.tolist() for each in batches.as_numpy_iterator()] for _ in "ab"]

    assert passes(looks=True) == passes(looks=False)


def test_a_batch_is_no_larger_than_the_data():
    numbers = tf.data.Dataset.range(20)
    assert global_batch_rows(numbers.batch(10**9)) == 20
    assert global_batch_rows(numbers.repeat().batch(50)) == 50
    unknown = numbers.filter(lambda number: number != 3)
    assert global_batch_rows(unknown.batch(10**9)) == 19
    assert global_batch_rows(unknown.batch(50)) == 50


def test_batches_that_are_changed_are_looked_at():
    batches = tf.data.Dataset.range(20).batch(8).map(lambda rows: rows[:5])
    assert global_batch_rows(batches) == 5


def test_the_size_of_a_batch_is_found_or_asked_for():
    numbers = tf.data.Dataset.range(10)
    assert global_batch_rows(numbers.batch(4)) == 4
    assert global_batch_rows(numbers.batch(4, drop_remainder=True)) == 4
    assert global_batch_rows(numbers.batch(4), stated=6) == 6
    with pytest.raises(DataError, match="no batch"):
        global_batch_rows(numbers.take(0).batch(4).map(tf.negative))

    def generator():
        for _ in range(3):
            yield np.zeros((4, 12), "float32"), np.zeros((4,), "int64")

    with StandInStrategy(2).scope():
        model = dense_model()
        model.compile("sgd", crossentropy())
    with pytest.raises(ConfigurationError, match="pad_batches=<global batch size>"):
        model.fit(generator(), verbose=0)
    with StandInStrategy(2, pad_batches=4).scope():
        model = dense_model()
        model.compile("sgd", crossentropy())
    model.fit(generator(), verbose=0)


def test_a_batch_larger_than_the_first_is_refused():
    sizes = tf.data.Dataset.from_tensor_slices([2, 3])
    dataset = sizes.map(lambda n: tf.zeros([n, 1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than 2 rows"):
        list(pad_parts(dataset, 2, 2))


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.range(4).map(lambda n: tf.RaggedTensor.from_tensor([[n]])),
        tf.data.Dataset.range(4).map(lambda n: tf.sparse.from_dense([[n]])),
        tf.data.Dataset.range(4),
        tf.data.Dataset.from_generator(
            lambda: [], output_signature=tf.TensorSpec((None, None))
        ),
    ],
    ids=["ragged", "sparse", "scalars", "unknown"],
)
def test_what_cannot_be_filled_up_is_refused(dataset):
    with pytest.raises(DataError, match="Received"):
        pad_parts(dataset, 2, 2)


def test_batch_size_is_in_use():
    """The fits above have a short last batch, which leaves a replica without a row."""
    assert ROWS_OF_FIT % BATCH_SIZE == 1


def test_a_seeded_shuffle_has_the_order_of_one_device():
    x, y = classification_data(samples=41)

    def of(strategy):
        keras.utils.set_random_seed(
            3
        )  # the dataset's seed is mixed with the global one
        shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(41, seed=7)
        with (strategy or tf.distribute.get_strategy()).scope():
            model = dense_model()
            model.compile(keras.optimizers.SGD(0.1), crossentropy())
        return model.fit(shuffled.batch(12), epochs=2, verbose=0).history["loss"]

    # The loss of another order is another one from its third number on.
    np.testing.assert_allclose(of(padding_mirrored(4)), of(None), rtol=1e-5)
