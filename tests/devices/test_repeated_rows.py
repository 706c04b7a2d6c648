"""Rows of embeddings that occur several times: added where that changes no update."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_engines import SETTINGS, replicate
from tests.support.conformance import replicas_of
from tests.support.conformance_table import OPTIMIZERS
from tests.support.parity import (
    UNIT_ROUND_OFF,
    largest_difference,
    largest_distance,
    make_strategy,
    unequal_copies,
)
from tfdp.chain.table_rows import sums_repeated_rows
from tfdp.errors import ConfigurationError
from tfdp.exchange import sparse
from tfdp.exchange.sparse import SMALL_TABLE_BYTES, merge_rows, travels_dense

# Above SMALL_TABLE_BYTES, or it would travel as a whole.
WORDS, WIDTH = 1500, 6

INDICES = {
    "many": lambda rng, rank: np.minimum(rng.zipf(1.5, 40), WORDS) - 1,
    "none twice": lambda rng, rank: np.arange(40) + 40 * rank,
    "one row of all": lambda rng, rank: np.full(40, 3),
    "none on the first": lambda rng, rank: rng.integers(0, 9, 40 * rank),
    "none at all": lambda rng, rank: np.zeros(0, int),
}


def summed_rows(strategy, tables):
    """The pipeline's sums on every replica, twice: by table, values and indices.

    Args:
      tables: by table a list of (values, indices), one for each replica.
    """
    reducer = strategy.extended.reducer

    @tf.function(autograph=False)
    def step(tables):
        def replica(*pairs):
            context = tf.distribute.get_replica_context()
            rank = int(tf.get_static_value(context.replica_id_in_sync_group))
            shape = tf.constant([WORDS, WIDTH])
            slices = [tf.IndexedSlices(*pair, shape) for pair in pairs]
            sums, _ = reducer.sum_gradients(slices, [], rank, sum_rows=True)
            return [(total.values, total.indices) for total in sums]

        return [
            [strategy.experimental_local_results(part) for part in pair]
            for pair in strategy.run(replica, args=tables)
        ]

    given = tuple(
        tuple(replicate(strategy, part) for part in zip(*pairs, strict=True))
        for pairs in tables
    )
    return step(given), step(given)


HALF = [("in_process-2x2", "bfloat16"), ("tensorflow-2", "float16")]


@pytest.mark.parametrize(
    "replicas, options, dtype",
    [
        pytest.param(*row.values, dtype, id=f"{row.id}-{dtype}")
        for row in SETTINGS
        for dtype in ("float32", "float16", "bfloat16")
        if dtype == "float32" or (row.id, dtype) in HALF
    ],
)
def test_each_row_comes_back_once_with_the_same_bits_everywhere(
    replicas, options, dtype
):
    rng = np.random.default_rng(4)
    round_off = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    tables, sums, magnitudes = [], [], []
    for draw in INDICES.values():
        indices = [draw(rng, rank).astype("int32") for rank in range(replicas)]
        values = [
            tf.cast(rng.normal(size=(len(index), WIDTH)) * 3.0**rank, dtype)
            for rank, index in enumerate(indices)
        ]
        tables.append(list(zip(values, indices, strict=True)))
        parts = [table_of(*pair) for pair in tables[-1]]
        sums.append(sum(parts))
        magnitudes.append(sum(table_of(tf.abs(v), i) for v, i in tables[-1]))
    strategy = make_strategy(replicas, **options)
    found, again = summed_rows(strategy, tables)
    for kind, pair, repeated, total, magnitude in zip(
        INDICES, found, again, sums, magnitudes, strict=True
    ):
        # Sums of a replica, of a host and of all: three roundings to the type, and
        # float32's of the additions of 160 rows.
        factor = (1 + round_off) ** 3 * (1 + UNIT_ROUND_OFF) ** 160 - 1
        copies = [*zip(*pair, strict=True), *zip(*repeated, strict=True)]
        for values, indices in copies:
            assert values.dtype == dtype
            assert len(set(indices.numpy())) == len(indices), kind
            error = np.abs(table_of(values, indices) - total)
            assert (error <= factor * magnitude).all(), kind
        bits = {
            tf.cast(values, "float64").numpy().tobytes() + indices.numpy().tobytes()
            for values, indices in copies
        }
        assert len(bits) == 1, kind


def table_of(values, indices):
    table = np.zeros((WORDS, WIDTH))
    np.add.at(table, np.asarray(indices), tf.cast(values, "float64").numpy())
    return table


def test_a_small_table_goes_into_a_bucket_and_a_large_one_does_not():
    def slices(rows):
        return tf.IndexedSlices(tf.zeros([1, 4]), [0], tf.constant([rows, 4]))

    assert travels_dense(slices(SMALL_TABLE_BYTES // 16))
    assert not travels_dense(slices(SMALL_TABLE_BYTES // 16 + 1))
    assert not travels_dense(tf.IndexedSlices(tf.zeros([1, 4]), [0]))


def one_device(optimizer, gradients):
    """Where a table ends whose gradients these are; of 20 words, some many times."""
    start = np.random.default_rng(1).normal(size=(20, 6)).astype("float32")
    table = keras.Variable(start, name="embeddings")
    optimizer.build([table])
    for gradient in gradients:
        optimizer.apply([gradient], [table])
    return table.numpy()


@functools.cache
def repeated(steps=2):
    found = []
    for seed in range(steps):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(30, 6)).astype("float32")
        indices = tf.constant(rng.integers(0, 8, 30), tf.int32)
        found.append(tf.IndexedSlices(values, indices, tf.constant([20, 6])))
    return found


@pytest.mark.parametrize("options", [{}, {"clipvalue": 0.1}], ids=["plain", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_added_for_those_who_make_the_same_update(name, options):
    """Not for Adam's kind, which squares each; and not left out where it could be."""
    make = functools.partial(OPTIMIZERS[name], **options)
    as_they_come = one_device(make(), repeated())
    added = one_device(make(), [merge_rows(g) for g in repeated()])
    dense = one_device(make(), [tf.convert_to_tensor(g) for g in repeated()])
    # Sums of 30 numbers below 4, in two steps of rates up to 1, and the update's own.
    np.testing.assert_allclose(added, dense, rtol=0, atol=1e-5)
    difference = np.max(np.abs(as_they_come - dense))
    if sums_repeated_rows(make()):
        assert difference < 1e-5
    elif name != "MultiOptimizer":  # whose table is SGD's; its other part is Adam's
        assert difference > 1e-3


def test_wrapped_ones_and_those_of_others_are_looked_into():
    class Mine(keras.optimizers.SGD):
        pass

    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
    scaler = keras.optimizers.LossScaleOptimizer
    assert sums_repeated_rows(tfdp.DistributedOptimizer(sgd()))
    assert sums_repeated_rows(scaler(sgd()))
    assert sums_repeated_rows(tfdp.optimizers.LAMB())
    assert not sums_repeated_rows(scaler(adam()))
    assert not sums_repeated_rows(tfdp.DistributedOptimizer(sgd(global_clipnorm=1.0)))
    assert not sums_repeated_rows(Mine())


def trained(strategy, optimizer, policy="float32", run_eagerly=False):
    """A model of a table of which a batch has few words, some of them often."""
    rng = np.random.default_rng(5)
    x = np.minimum(rng.zipf(1.5, (15, 5)), WORDS) - 1
    y = rng.normal(size=(15, 2)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(3)
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(WORDS, WIDTH),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        keras.config.set_dtype_policy("float32")
        model.compile(optimizer(), "mse", jit_compile=False, run_eagerly=run_eagerly)
    # 15 rows by 7: the last batch has one row, and a replica none.
    model.fit(x, y, batch_size=7, shuffle=False, epochs=2, verbose=0)
    return model


SGD = functools.partial(keras.optimizers.SGD, 0.5, momentum=0.9)
ADAM = functools.partial(keras.optimizers.Adam, 0.01, epsilon=1e-3)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize(
    "optimizer, options",
    [
        (SGD, {}),
        (SGD, {"policy": "mixed_bfloat16"}),
        (functools.partial(SGD, gradient_accumulation_steps=2), {}),
        (ADAM, {}),
    ],
    ids=["sgd", "bfloat16", "accumulation", "adam"],
)
def test_by_default_training_is_that_of_one_device(optimizer, options):
    expected = trained(tf.distribute.get_strategy(), optimizer, **options)
    found = trained(make_strategy(2), optimizer, **options)
    # In bfloat16 activations are rounded row by row, alike on both; what the sum of the
    # rows' gradients is rounded to may be another by 2^-8 of it.
    most = 2e-6 if not options else 2e-2
    assert largest_difference(found, expected) < most


def test_products_of_added_rows_are_taken_alike_everywhere(monkeypatch):
    """The optimizer of graphs reorders them by what it knows of shapes.

    A row of the conformance table whose copies were a last bit apart.
    """
    monkeypatch.setattr(sparse, "SMALL_TABLE_BYTES", 0)
    replicas = replicas_of("SGD", "global_clipnorm", "2-sum")
    replicas.run("even")
    assert unequal_copies(replicas.variables) == []


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize(
    "replicas, options",
    [
        (1, {}),
        (2, {}),
        (4, {"hierarchy": (2, 2)}),
        (3, {"engine": "tensorflow"}),
        (2, {"shard": "optimizer"}),
    ],
    ids=["1", "2", "2x2", "tensorflow", "shard"],
)
def test_asked_for_adam_squares_the_sum_on_any_number_of_replicas(replicas, options):
    strategy = make_strategy(replicas, repeated_rows="sum", **options)
    found = trained(strategy, ADAM)
    as_keras = trained(tf.distribute.get_strategy(), ADAM)
    dense = trained(tf.distribute.get_strategy(), DenseAdam)
    assert largest_difference(found, dense) < 2e-6
    # Another update indeed, by the words that occur twice.
    assert largest_difference(found, as_keras) > 1e-3


class DenseAdam(keras.optimizers.Adam):
    def __init__(self):
        super().__init__(0.01, epsilon=1e-3)

    def apply(self, gradients, trainable_variables=None):
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return super().apply(dense, trainable_variables)


def of_sparse_rows(strategy, optimizer):
    """A model whose first layer has a gradient of each column that a batch has."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(15, 12)).astype("float32")
    x[np.abs(x) < 0.8] = 0
    y = rng.normal(size=(15, 2)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((12,), sparse=True), *layers])
        model.compile(optimizer(), "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    length = tf.data.experimental.assert_cardinality(3)
    data = data.map(lambda x, y: (tf.sparse.from_dense(x), y)).apply(length)
    model.fit(data, epochs=2, verbose=0)
    return model


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [ADAM, functools.partial(SGD, global_clipnorm=0.1)],
    ids=["adam", "global_clipnorm"],
)
def test_rows_that_one_device_has_once_are_added(optimizer, replicas):
    """The first layer's product with a sparse matrix: its columns, each once."""
    expected = of_sparse_rows(tf.distribute.get_strategy(), optimizer)
    found = of_sparse_rows(make_strategy(replicas), optimizer)
    # Sums of 15 rows in 6 steps; without the addition Adam is off by 3e-2.
    assert largest_difference(found, expected) < 2e-6
    for weight in found.weights:
        copies = {copy.numpy().tobytes() for copy in weight.value.values}
        assert len(copies) == 1


class ClippedByHand(keras.Model):
    """Clips in its own step, from the sums over the replicas, to a norm of 0.1."""

    def __init__(self, first, make_dense):
        super().__init__()
        self.first, self.second = first, keras.layers.Dense(2)
        self.unused = keras.layers.Dense(1)
        self.unused.build((None, 1))
        self.make_dense = make_dense

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        weights = self.trainable_variables
        given = gradients = tape.gradient(loss, weights)
        if self.make_dense:
            given = [None if g is None else tf.convert_to_tensor(g) for g in given]
        norm = tf.linalg.global_norm(tfdp.losses.all_sum(given))
        factor = 0.1 / tf.maximum(norm, 0.1)
        scaled = [None if g is None else g * factor for g in gradients]
        self.optimizer.apply(scaled, weights)
        return {"norm": norm}


def words_of(rng):
    return np.minimum(rng.zipf(1.5, (17, 5)), WORDS).astype("int32") - 1


def sparse_rows(rng):
    x = rng.normal(size=(17, 12)).astype("float32")
    return tf.sparse.from_dense(np.where(np.abs(x) < 0.8, 0, x))


# The first layer, and its input; the gradient of its table has, on one device,
FIRST = {
    "a row for each word": (lambda: keras.layers.Embedding(WORDS, WIDTH), words_of),
    "a row for each place": (lambda: WithPositions(by_place), words_of),
    "a row three times": (lambda: WithPositions(by_place_of_three), words_of),
    "a row for each column": (lambda: keras.layers.Dense(5, "tanh"), sparse_rows),
}


def trained_by_hand(strategy, first, make_dense):
    """The weights after clipped steps, and the last norm; 1 row in the second batch."""
    make, rows_of = FIRST[first]
    rng = np.random.default_rng(5)
    data = tf.data.Dataset.from_tensor_slices(rows_of(rng))
    y = rng.normal(size=(17, 1, 2) if rows_of is words_of else (17, 2))
    data = tf.data.Dataset.zip((data, tf.data.Dataset.from_tensor_slices(y))).batch(16)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = ClippedByHand(make(), make_dense)
        for x, _ in data.take(1):
            model(x)
        model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    history = model.fit(data, epochs=2, verbose=0)
    return model, history.history["norm"][-1]


@pytest.mark.worth_seconds(4)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("make_dense", [False, True], ids=["rows", "dense"])
@pytest.mark.parametrize("first", FIRST)
def test_a_norm_of_all_sum_is_one_devices(first, make_dense):
    """Of the rows as one device has them; of dense gradients, that of the true sum."""
    one = tf.distribute.get_strategy()
    expected, norm = trained_by_hand(one, first, make_dense)
    found, norm_found = trained_by_hand(make_strategy(2), first, make_dense)
    # Sums of 16 rows of 10 numbers in 4 steps, each of a length of 0.1.
    np.testing.assert_allclose(norm_found, norm, rtol=1e-5)
    assert largest_difference(found, expected) < 2e-6
    _, of_other = trained_by_hand(one, first, not make_dense)
    has_repeated_rows = first != "a row for each column"
    assert (abs(of_other / norm - 1) > 1e-2) == has_repeated_rows


def test_it_is_refused_where_replicas_train_alone():
    strategy = make_strategy(2, repeated_rows="sum")
    sync = tfdp.sync.LocalSGD(every=2, across="replicas")
    with pytest.raises(ConfigurationError, match=r"repeated_rows='sum'\).*sync"):
        trained(strategy, lambda: tfdp.DistributedOptimizer(SGD(), sync=sync))


def test_what_is_no_such_word_is_refused():
    with pytest.raises(ConfigurationError, match="'auto' or 'sum'. Received: 'none'"):
        tfdp.Communication(repeated_rows="none")


class WithPositions(keras.layers.Layer):
    """Adds a row for each place of a sequence, as transformers do."""

    def __init__(self, places_of):
        super().__init__()
        self.words = keras.layers.Embedding(WORDS, WIDTH)
        self.places = keras.layers.Embedding(WORDS, WIDTH)
        self.places_of = places_of

    def build(self, shape):
        self.words.build(shape)
        self.places.build(shape)

    def call(self, words):
        return self.words(words) + self.places(self.places_of(words))


def by_place(words):
    return keras.ops.arange(words.shape[1])


def by_place_of_three(words):
    return tf.range(tf.shape(words)[1]) % 3


@pytest.mark.parametrize("rows", [32, 17], ids=["even", "a replica without rows"])
@pytest.mark.parametrize(
    "places_of",
    [by_place, by_place_of_three],
    ids=["each once", "some several times"],
)
def test_rows_of_positions_are_those_of_one_device(places_of, rows):
    """Their indices are equal on all replicas, so Adam must square the sums."""

    def weights(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((5,), dtype="int32"), WithPositions(places_of)]
            )
            model.add(keras.layers.Dense(3))
            model.compile(
                keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1), "mse"
            )
        rng = np.random.default_rng(0)
        words = rng.integers(0, 30, (rows, 5)).astype("int32")
        model.fit(
            words,
            rng.normal(size=(rows, 5, 3)).astype("float32"),
            batch_size=16,
            epochs=2,
            shuffle=False,
            verbose=0,
        )
        return [weight.numpy() for weight in model.trainable_variables]

    alone = weights(tf.distribute.get_strategy())
    # A gradient is a sum of 16 rows of 5 places and 3 units, so two orders differ by
    # 2 (16 * 5 + 3) u of it at most. Adam's update is 0.01 g / (|g| + 1e-3) at first,
    # with a slope of 10 at g = 0; clipped gradients are below 0.1, in 4 updates.
    bound = 4 * 10 * 0.1 * 2 * (16 * 5 + 3) * UNIT_ROUND_OFF
    found = weights(make_strategy(2))
    assert largest_distance(found, alone) < bound
