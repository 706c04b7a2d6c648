"""Short batches leave replicas without rows, and programs must not notice.

Nine rows in batches of 8 on three replicas: 3 + 3 + 2 rows, then 1 + 0 + 0.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import DeviceWarning
from tfdp.strategies.idle_replicas import idle_ranks
from tfdp.tracing.rows import Rows
from tfdp.tracing.step import Step

ROWS = 9
BATCH = 8
REPLICAS = 3

# float32 rounding: 4 steps at rate 0.05 with gradients below 10, sums of less than
# 1,000 terms (u = 2^-24; two orders of a sum of random signs differ by about its square
# root): 4 x 0.05 x 10 x 32 x 6e-8 = 4e-6. A row that counts too much or too little
# moves weights by 0.05 x 0.1 or more.
TOLERANCE = 1e-5


def chain(*makers):
    """A branch: the layers that `makers` make, one behind the other."""

    def branch(x):
        for make in makers:
            x = make()(x)
        return x

    return branch


class Tokens(layers.Layer):
    """Whole numbers from 0 to 6 made of floats, for lookups."""

    def call(self, x):
        return tf.cast(tf.abs(x) * 3.0, tf.int64) % 7


class MeanSquare(layers.Layer):
    """Adds the mean of squares to the loss: of no rows, that is not a number."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


def masked(x):
    return layers.LSTM(3)(layers.Masking(-9.0)(x))


def masked_words(x):
    words = layers.Embedding(7, 3, mask_zero=True)(Tokens()(x))
    return layers.LSTM(3)(words)


def self_attention(x):
    return layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)


def merged(x):
    """Two inputs of rank 2, merged in every way."""
    one, other = layers.Dense(4)(x), layers.Dense(4, "tanh")(x)
    kinds = "Add Subtract Multiply Average Maximum Minimum Concatenate".split()
    merges = [getattr(layers, kind)()([one, other]) for kind in kinds]
    return layers.Concatenate()([*merges, layers.Dot(1)([one, other])])


def broadcast(x):
    """A matrix and a vector for each row: Keras adds axes to the shorter one."""
    return layers.Add()([x, layers.GlobalAveragePooling1D()(x)])


def pools_of_rank(rank):
    """Every kind of pooling of images of `rank` axes."""
    kinds = "MaxPooling", "AveragePooling"
    whole = [getattr(layers, f"Global{kind}{rank}D") for kind in kinds]
    windows = [lambda kind=kind: getattr(layers, f"{kind}{rank}D")(2) for kind in kinds]
    return [chain(make) for make in (*whole, *windows)]


IMAGE, VOLUME, SEQUENCE, FRAMES, VECTOR = (
    (8, 8, 3),
    (4, 4, 4, 2),
    (6, 4),
    (3, 4, 4, 2),
    (5,),
)

# Shape of a row, and branches that are computed beside each other.
FAST = {
    "convolutions": (
        IMAGE,
        [
            chain(
                lambda: layers.Conv2D(4, 3, activation="relu"),
                lambda: layers.Conv2D(3, 3),
            ),
            chain(
                lambda: layers.Conv2D(4, 3, use_bias=False),
                tfdp.layers.SyncBatchNormalization,
                lambda: layers.MaxPooling2D(),
            ),
            chain(lambda: layers.Conv2D(2, 3), MeanSquare),
        ],
    ),
    "recurrent": (
        SEQUENCE,
        [chain(lambda: layers.LSTM(3)), masked, broadcast],
    ),
}
SLOW = {
    "more convolutions": (
        IMAGE,
        [
            chain(lambda: layers.Conv2D(4, 3, strides=2), lambda: layers.Conv2D(4, 2)),
            chain(
                lambda: layers.Conv2D(4, 3),
                lambda: layers.Conv2D(4, 2, dilation_rate=2),
            ),
            chain(lambda: layers.Conv2D(4, 3), lambda: layers.Conv2DTranspose(4, 3)),
            chain(lambda: layers.DepthwiseConv2D(3), lambda: layers.DepthwiseConv2D(3)),
            chain(
                lambda: layers.SeparableConv2D(4, 3),
                lambda: layers.SeparableConv2D(4, 3),
            ),
            chain(lambda: layers.Conv2D(4, 3), lambda: layers.UpSampling2D(2)),
            chain(lambda: layers.UpSampling2D(2, interpolation="bilinear")),
            chain(
                lambda: layers.Conv2D(4, 3, kernel_regularizer="l2"),
                lambda: layers.ZeroPadding2D(1),
                lambda: layers.Cropping2D(2),
            ),
            chain(lambda: layers.BatchNormalization(synchronized=True)),
        ],
    ),
    "convolutions of volumes": (
        VOLUME,
        [
            chain(lambda: layers.Conv3D(4, 2), lambda: layers.Conv3D(2, 2)),
            chain(lambda: layers.Conv3D(2, 2), lambda: layers.Conv3DTranspose(2, 2)),
            *pools_of_rank(3),
        ],
    ),
    "convolutions of sequences": (
        SEQUENCE,
        [
            chain(lambda: layers.Conv1D(4, 3), lambda: layers.Conv1D(4, 2)),
            chain(lambda: layers.Conv1DTranspose(4, 3)),
            chain(lambda: layers.DepthwiseConv1D(3)),
            chain(lambda: layers.SeparableConv1D(4, 3)),
            chain(lambda: layers.TimeDistributed(layers.Dense(3))),
            *pools_of_rank(1),
        ],
    ),
    "pooling and images": (
        IMAGE,
        [
            *pools_of_rank(2),
            chain(lambda: layers.Resizing(4, 4), lambda: layers.Conv2D(2, 3)),
            chain(lambda: layers.CenterCrop(4, 4)),
            chain(lambda: layers.Rescaling(0.5)),
        ],
    ),
    "recurrent layers": (
        SEQUENCE,
        [
            chain(lambda: layers.GRU(3)),
            chain(lambda: layers.SimpleRNN(3)),
            chain(
                lambda: layers.LSTM(3, return_sequences=True),
                lambda: layers.GRU(2, return_sequences=True),
            ),
            chain(lambda: layers.Bidirectional(layers.LSTM(3))),
            chain(lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(3)])),
        ],
    ),
    "convolutional recurrent layers": (
        FRAMES,
        [
            chain(lambda: layers.ConvLSTM2D(2, 2)),
            chain(lambda: layers.TimeDistributed(layers.Conv2D(2, 2))),
        ],
    ),
    "attention and norms": (
        SEQUENCE,
        [
            self_attention,
            lambda x: layers.GroupQueryAttention(3, 2, 1)(x, x),
            lambda x: layers.Attention()([layers.Dense(4)(x), x]),
            lambda x: layers.AdditiveAttention()([layers.Dense(4)(x), x]),
            chain(layers.LayerNormalization),
            chain(lambda: layers.GroupNormalization(2)),
            chain(layers.RMSNormalization),
            chain(layers.UnitNormalization),
            chain(lambda: layers.EinsumDense("abc,cd->abd", output_shape=(6, 4))),
            chain(layers.PReLU),
            chain(lambda: layers.Permute((2, 1)), lambda: layers.Reshape((12, 2))),
        ],
    ),
    "vectors and lookups": (
        VECTOR,
        [
            merged,
            masked_words,
            chain(lambda: layers.Normalization(mean=[0.1] * 5, variance=[0.5] * 5)),
            chain(
                lambda: layers.Discretization([-0.5, 0.0, 0.5]),
                lambda: layers.CategoryEncoding(5, output_mode="multi_hot"),
            ),
            chain(Tokens, lambda: layers.Hashing(5), lambda: layers.Embedding(5, 3)),
            chain(
                Tokens,
                lambda: layers.IntegerLookup(vocabulary=[0, 1, 2, 3]),
                lambda: layers.Embedding(6, 3),
            ),
            chain(lambda: layers.RepeatVector(3)),
            chain(lambda: layers.Dense(4, activity_regularizer="l2")),
            chain(lambda: layers.ActivityRegularization(l2=0.1)),
        ],
    ),
}


def build(shape, branches):
    keras.utils.set_random_seed(3)
    inputs = keras.Input(shape)
    flat = [layers.Flatten()(branch(inputs)) for branch in branches]
    joined = layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    return keras.Model(inputs, layers.Dense(3)(joined))


def data(shape):
    """Rows of very different size."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, *shape)) * rng.uniform(
        0.3, 1.5, (ROWS, *[1] * len(shape))
    )
    return x.astype("float32"), rng.normal(size=(ROWS, 3)).astype("float32")


def everything(strategy, make, x, y, **compile_options):
    """Predictions, evaluation, reported losses and weights of a model of `make()`."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
        options = {"loss": "mse", "metrics": ["mae"], "jit_compile": False}
        model.compile(keras.optimizers.SGD(0.05), **{**options, **compile_options})
    results = {
        "predict one row": model.predict(x[:1], verbose=0),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
    }
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**results, "fit": history.history, "weights": model.get_weights()}


def assert_alike(several, one):
    assert list(several) == list(one)
    for name in one:
        tf.nest.assert_same_structure(several[name], one[name])
        pairs = zip(
            tf.nest.flatten(several[name]), tf.nest.flatten(one[name]), strict=True
        )
        for ours, theirs in pairs:
            np.testing.assert_allclose(
                ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
            )


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_layers_do_not_notice_replicas_without_rows(name):
    shape, branches = {**FAST, **SLOW}[name]
    x, y = data(shape)
    one = everything(None, lambda: build(shape, branches), x, y)
    several = everything(make_strategy(REPLICAS), lambda: build(shape, branches), x, y)
    assert_alike(several, one)


class OwnStep(keras.Model):
    """A `train_step` of its own, which adds up losses: nothing scales them."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)
        self.rows_seen = keras.metrics.Sum(name="rows_seen")

    def call(self, x):
        return self.head(x)

    @property
    def metrics(self):
        return [self.rows_seen]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_sum(tf.reduce_sum(tf.square(self(x) - y)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.rows_seen.update_state(tf.ones(tf.shape(x)[0]))
        return self.get_metrics_result()


def plain_sgd():
    return keras.optimizers.SGD(0.01)


def accumulating_sgd():
    return keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)


def wrapped_sgd():
    is_several = tf.distribute.has_strategy()
    return tfdp.DistributedOptimizer(plain_sgd()) if is_several else plain_sgd()


@pytest.mark.parametrize(
    ("optimizer", "options", "shard"),
    [
        (plain_sgd, {}, "none"),
        pytest.param(plain_sgd, {}, "parameters", marks=pytest.mark.slow),
        pytest.param(accumulating_sgd, {}, "none", marks=pytest.mark.slow),
        pytest.param(wrapped_sgd, {}, "none", marks=pytest.mark.slow),
        pytest.param(plain_sgd, {"run_eagerly": True}, "none", marks=pytest.mark.slow),
    ],
)
def test_steps_of_ones_own_learn_nothing_from_borrowed_rows(optimizer, options, shard):
    x, y = data(VECTOR)

    def run(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            keras.utils.set_random_seed(3)
            model = OwnStep()
            model.build((None, *VECTOR))
            model.compile(optimizer(), jit_compile=False, **options)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return {"fit": history.history, "weights": model.get_weights()}

    one, several = run(None), run(make_strategy(REPLICAS, shard))
    assert one["fit"]["rows_seen"] == [ROWS, ROWS]
    assert_alike(several, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        {"jit_compile": True},
        {"steps_per_execution": 2},
        {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
    ],
    ids=["eager", "jit", "two steps", "weights"],
)
def test_ways_to_run_do_not_notice_replicas_without_rows(options):
    x, y = data(SEQUENCE)

    def make():
        return build(SEQUENCE, [chain(lambda: layers.LSTM(3)), MeanSquare()])

    one = everything(None, make, x, y, **options)
    several = everything(make_strategy(REPLICAS), make, x, y, **options)
    assert_alike(several, one)


def test_a_sum_within_a_sum_of_own_parts_does_not_end_it():
    """An optimizer that sums own parts assigns variables, which do so, too."""
    run, value = Step(2), tf.ones([2])
    run.traces[1].rows = Rows(present=False)
    with run.summing_own_parts(1):
        with run.summing_own_parts(1):
            pass
        assert run.parts_to_sum(1, value) is value
    np.testing.assert_array_equal(run.parts_to_sum(1, value), [0, 0])


def told_of_idle(replicas, use):
    strategy = make_strategy(replicas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeviceWarning)
        use(strategy)
    return [str(one.message) for one in caught if one.category is DeviceWarning]


def fit_in(strategy, x, batch_size):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, x[:, :1], batch_size=batch_size, verbose=0)
    model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)  # tells nothing
    model.predict(np.ones((1, 2)), verbose=0)


@pytest.mark.parametrize(
    "rows, replicas, sizes", [(5, 4, "4 or 8"), (2, 4, "4"), (4, 3, "3 or 6")]
)
def test_batches_too_small_for_all_replicas_are_told_once(rows, replicas, sizes):
    x = np.ones((2 * rows + 1, 2), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(rows)
    uses = [
        lambda strategy: fit_in(strategy, x, rows),
        lambda strategy: [
            list(strategy.experimental_distribute_dataset(batches)) for _ in range(2)
        ],
    ]
    for use in uses:
        [message] = told_of_idle(replicas, use)
        assert f"Batches of {rows} rows" in message
        assert f"Use {sizes} as the batch size" in message


@pytest.mark.parametrize("rows, replicas", [(8, 3), (5, 2), (1, 1)])
def test_a_short_last_batch_alone_is_not_told(rows, replicas):
    x = np.ones((2 * rows + 1, 2), "float32")
    assert told_of_idle(replicas, lambda strategy: fit_in(strategy, x, rows)) == []


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_idle_ranks(hosts, replicas):
    """As TensorFlow splits what a host takes: the first replicas get equally many."""
    for rows in range(1, 3 * hosts * replicas):
        counts = []
        for host in range(hosts):
            own = rows * (host + 1) // hosts - rows * host // hosts
            parts = tf.data.Dataset.range(own).batch(max(1, -(-own // replicas)))
            split = [len(part) for part in parts]
            counts += split + [0] * (replicas - len(split))
        idle = [rank for rank, count in enumerate(counts) if not count]
        assert idle_ranks(rows, hosts, replicas) == idle
        if rows % (hosts * replicas) == 0:
            assert not idle
