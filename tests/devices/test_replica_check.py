"""`callbacks.ReplicaCheck`: quiet over all that is kept alike, loud over one bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, make_strategy, stock_strategy
from tfdp.callbacks import ReplicaCheck
from tfdp.errors import ConfigurationError, ReplicaDriftError, ReplicaDriftWarning
from tfdp.step.replicated_state import replicated_state_of
from tfdp.variables.bit_hash import GOLDEN, STEPS, WORDS_AT_ONCE, bit_hash

WORDS = 2**32


class CountsInAllTypes(keras.layers.Layer):
    """Stores in every type; how many of its inputs are positive is each
    replica's own."""

    def build(self, shape):
        def number(name, dtype, value):
            return self.add_weight(
                shape=(3,), dtype=dtype, name=name, trainable=False, initializer=value
            )

        self.positive = number("positive", "int32", "zeros")
        self.calls = number("calls", "int64", "zeros")
        self.table = number("table", "uint8", "ones")
        self.mask = number("mask", "bool", "ones")
        self.half = number("half", "bfloat16", "ones")

    def call(self, x):
        positive = tf.math.count_nonzero(x > 0, dtype=tf.int32)
        self.positive.assign_add(tf.fill([3], positive))
        self.calls.assign_add(tf.ones([3], tf.int64))
        return x * tf.cast(self.table[0], x.dtype)


def build():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(33, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            CountsInAllTypes(dtype="float32"),
            keras.layers.Dense(5, dtype="float32"),
        ]
    )


def compiled(strategy, optimizer=None, **options):
    with strategy.scope():
        model = build()
        model.compile(
            optimizer() if optimizer else keras.optimizers.Adam(0.01, use_ema=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **{"jit_compile": False, **options},
        )
    return model


def fit(model, *callbacks, rows=70, batch_size=24):
    # Batches of 24, 24 and 22: of four replicas 6 each, then 6, 6, 5 and 5.
    x, y = classification_data(rows)
    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def sync(what, **arguments):
    return lambda: tfdp.DistributedOptimizer(keras.optimizers.Adam(0.01), sync=what)


def accumulating():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)


def accumulating_by_tfdp():
    return tfdp.DistributedOptimizer(keras.optimizers.Adam(0.01), accumulate_steps=2)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**30)


# Strategy, optimizer, what compile is told.
HEALTHY = {
    "plain": (lambda: make_strategy(4), None, {}),
    "collectives": (lambda: make_strategy(3, engine="tensorflow"), None, {}),
    "simulated-hosts": (lambda: make_strategy(4, hierarchy=(2, 2)), None, {}),
    "optimizer": (lambda: make_strategy(4, "optimizer"), None, {}),
    "gradients": (lambda: make_strategy(2, "gradients"), accumulating, {}),
    "parameters": (lambda: make_strategy(3, "parameters"), None, {}),
    "accumulation": (lambda: make_strategy(4), accumulating, {}),
    "accumulation-by-tfdp": (lambda: make_strategy(2), accumulating_by_tfdp, {}),
    "loss-scale": (lambda: make_strategy(2), scaled, {}),
    "executions": (lambda: make_strategy(2), None, {"steps_per_execution": 3}),
    "jit": (lambda: make_strategy(2), None, {"jit_compile": True}),
    "eager": (lambda: make_strategy(2), None, {"run_eagerly": True}),
    "local-sgd": (
        lambda: make_strategy(4),
        sync(tfdp.sync.LocalSGD(every=2, across="replicas")),
        {},
    ),
    "diloco-of-hosts": (
        lambda: make_strategy(4, hierarchy=(2, 2)),
        sync(tfdp.sync.DiLoCo(every=2, across="hosts")),
        {},
    ),
    "top-k": (
        lambda: make_strategy(
            4,
            compression=tfdp.compression.TopK(0.1),
            compression_across="replicas",
        ),
        None,
        {},
    ),
    "power-sgd": (
        lambda: make_strategy(
            2, compression=tfdp.compression.PowerSGD(2), compression_across="replicas"
        ),
        None,
        {},
    ),
}


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("row", HEALTHY)
def test_replicas_that_train_are_alike(row):
    make, optimizer, options = HEALTHY[row]
    model, check = compiled(make(), optimizer, **options), ReplicaCheck(1)
    fit(model, check)
    assert check.checks == (2 if row == "executions" else 6)
    names = [kept.name for kept in replicated_state_of(model, 0)]
    # An eager step counts the rows of all replicas, and stores the number on each.
    own = [name for name in names if name.endswith("/positive")]
    assert bool(own) == (row == "eager")
    for stored in ("calls", "table", "mask", "half", "moving_mean"):
        assert [name for name in names if name.endswith(f"/{stored}")], stored


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_alike(policy):
    keras.config.set_dtype_policy(policy)
    check = ReplicaCheck(2)
    fit(compiled(make_strategy(2)), check)
    assert check.checks == 3


class Pokes(keras.callbacks.Callback):
    """Assigns to one replica's copy of a variable in the third batch of each epoch."""

    def __init__(self, find, rank, change):
        super().__init__()
        self.find, self.rank, self.change = find, rank, change

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            copy = self.find(self.model).value.values[self.rank]
            copy.assign(self.change(copy.numpy()))


def next_bit(value):
    flat = value.copy().reshape(-1)
    flat[-1] = np.nextafter(flat[-1], np.float32(9))
    return flat.reshape(value.shape)


def named(ending):
    def find(model):
        everything = [*model.variables, *model.optimizer.variables]
        return next(v for v in everything if v.path.endswith(ending))

    return find


def turned(value):
    return np.ascontiguousarray(value[::-1])


PLANTED = {
    "weight": ("dense/kernel", next_bit),
    "moved": ("dense/kernel", turned),
    "momentum": ("dense_bias_momentum", next_bit),
    "average": ("dense_bias_average", next_bit),
    "statistics": ("moving_variance", next_bit),
    "counter": ("iteration", lambda value: value + 1),
    "uint8": ("table", lambda value: np.uint8([1, 1, 2])),
    "bool": ("mask", lambda value: np.array([True, False, True])),
    "bfloat16": ("half", lambda value: (value * 2).astype(value.dtype)),
    "sign-of-zero": ("beta", lambda value: np.where(value < 9, -0.0, 0.0)),
}


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("row", PLANTED)
def test_what_drifted_is_named(row):
    ending, change = PLANTED[row]
    optimizer = None
    if row == "sign-of-zero":
        optimizer = lambda: keras.optimizers.SGD(0.0)  # noqa: E731
    model = compiled(make_strategy(4), optimizer)
    pokes = Pokes(named(ending), 2, change)
    with pytest.raises(ReplicaDriftError, match=r"between step 2 and step 3") as caught:
        fit(model, pokes, ReplicaCheck(1))
    (drift,) = caught.value.drifts
    assert drift.variable.endswith(ending)
    assert (drift.ranks, drift.holders, drift.is_known) == ((2,), 4, True)
    words = str(caught.value)
    assert "replica 2 (CPU:2) differs from the 3 others" in words and ending in words


@pytest.mark.slow
def test_of_two_replicas_both_are_named():
    pokes = Pokes(named("dense/kernel"), 1, next_bit)
    with pytest.raises(ReplicaDriftError, match="no majority") as caught:
        fit(compiled(make_strategy(2)), pokes, ReplicaCheck(3))
    assert caught.value.drifts[0].ranks == (0, 1)
    assert "replica 0 (CPU:0), replica 1 (CPU:1) differ" in str(caught.value)


@pytest.mark.slow
def test_a_warning_comes_once_and_training_goes_on():
    model, check = compiled(make_strategy(4)), ReplicaCheck(1, on_drift="warn")
    # Nobody else assigns to it: it stays as it is.
    pokes = Pokes(named("table"), 3, lambda value: np.uint8([7, 7, 7]))
    with pytest.warns(ReplicaDriftWarning, match=r"replica 3 \(CPU:3\)") as caught:
        fit(model, pokes, check)
    ours = [w for w in caught if issubclass(w.category, ReplicaDriftWarning)]
    assert len(ours) == 1
    assert check.checks == 6
    assert [drift.ranks for drift in check.drifts] == [(3,)] * 4


@pytest.mark.slow
def test_local_weights_are_compared_within_their_group():
    hosts = tfdp.sync.DiLoCo(every=50, across="hosts")
    model = compiled(make_strategy(4, hierarchy=(2, 2)), sync(hosts))

    class PokesLocal(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            copy = named("dense/kernel")(model).value.local_copy(2)
            copy.assign(next_bit(copy.numpy()))

    with pytest.raises(ReplicaDriftError) as caught:
        fit(model, PokesLocal(), ReplicaCheck(1))
    (drift,) = caught.value.drifts
    assert drift.variable.endswith("dense/kernel (local)")
    assert drift.ranks == (2, 3) and not drift.is_known


def hash_by_hand(words):
    total = 0
    for place, word in enumerate(words):
        mixed = int(word) ^ (place * GOLDEN % WORDS)
        for shift, factor in STEPS:
            mixed = (mixed ^ mixed >> shift) * factor % WORDS
        total += mixed
    return total % WORDS


@pytest.mark.parametrize(
    "dtype, words",
    [
        ("float32", [0x3F800000, 0x80000000, 0x7FC00001]),
        ("float16", [0x3C00, 0x8000, 0x7E01]),
        ("bfloat16", [0x3F80, 0x8000, 0x7FC1]),
        ("int64", [1, 0, 0xFFFFFFFF, 0xFFFFFFFF]),
        ("uint8", [1, 0, 255]),
        ("bool", [1, 0, 1]),
    ],
)
def test_the_hash_is_of_the_bits(dtype, words):
    width = {"int64": np.uint32, "bool": np.uint8}.get(
        dtype, f"uint{8 * tf.as_dtype(dtype).size}"
    )
    numbers = np.array(words, width).view(tf.as_dtype(dtype).as_numpy_dtype)
    assert int(bit_hash(tf.Variable(numbers))) == hash_by_hand(words)


def test_long_variables_are_hashed_in_pieces():
    words = np.random.default_rng(0).integers(0, WORDS, 2 * WORDS_AT_ONCE + 5)
    variable = tf.Variable(words.astype("uint32"))
    before = int(bit_hash(variable))
    piece = words[WORDS_AT_ONCE : WORDS_AT_ONCE + 100]
    places = WORDS_AT_ONCE + np.arange(100)
    # The hash is a sum over places: change a hundred words in the second piece.
    changed = words.copy()
    changed[places] = piece[::-1]
    variable.assign(changed.astype("uint32"))
    expected = before
    for place in places:
        expected += _mixed(changed[place], place) - _mixed(words[place], place)
    assert int(bit_hash(variable)) == expected % WORDS


def _mixed(word, place):
    mixed = int(word) ^ (int(place) * GOLDEN % WORDS)
    for shift, factor in STEPS:
        mixed = (mixed ^ mixed >> shift) * factor % WORDS
    return mixed


@pytest.mark.slow
def test_one_replica_has_nothing_to_compare():
    model, check = compiled(make_strategy(1)), ReplicaCheck(1)
    fit(model, check)
    assert check.checks == 0


@pytest.mark.parametrize("arguments", [(0,), (True,), (1.5,), (1, "repair")])
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="Received"):
        ReplicaCheck(*arguments)


def test_a_stock_strategy_is_refused():
    stock = stock_strategy()
    with pytest.raises(ConfigurationError, match="MirroredStrategy"):
        fit(compiled(stock), ReplicaCheck(1))
