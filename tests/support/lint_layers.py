"""Programs of the table in `lint_programs`: layers, stock models, `add_loss`."""

import keras
import tensorflow as tf

from tests.support.lint_programs import (
    BATCH,
    CLASSES,
    FEATURES,
    WIDTH,
    add,
    cross_entropy,
    fitted,
    rows_and_labels,
    scope_of,
    summed,
    words_and_items,
)
from tfdp.losses import all_rows, local_sum, own_rows

ops = keras.ops
layers = keras.layers


class Applied(layers.Layer):
    """A layer whose `call` is a function of the layer and its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(self, x)

    def compute_output_shape(self, shape):
        return shape


def with_layer(function, loss=cross_entropy, **options):
    """A model with the layer between two dense ones."""

    def build():
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(WIDTH, "tanh"),
                Applied(function),
                layers.Dense(CLASSES),
            ]
        )

    return lambda strategy: fitted(strategy, build, loss and loss(), **options)


# Layers that return rows.


def centred(gather):
    return lambda layer, x: x - ops.mean(gather(x), axis=0, keepdims=True)


def standardised(layer, x):
    mean, variance = tf.nn.moments(x, axes=[0])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def standardised_by_sums(layer, x):
    """Moments of all rows, from sums over the replicas."""
    count = summed(tf.cast(tf.shape(x)[0], x.dtype))
    mean = summed(tf.reduce_sum(x, axis=0)) / count
    variance = summed(tf.reduce_sum(tf.square(x - mean), axis=0)) / count
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def deviation_channel(layer, x):
    """ProGAN: the deviation over the batch, joined to each row."""
    found = ops.mean(ops.std(x, axis=0))
    return ops.concatenate([x[:, 1:], found * ops.ones_like(x[:, :1])], axis=-1)


def attending_rows(layer, x):
    """Attention of each row to the rows of the batch."""
    scores = ops.softmax(ops.matmul(x, ops.transpose(x)), axis=-1)
    return ops.matmul(scores, x)


def scanned(layer, x):
    """A running mean along the batch."""
    return tf.scan(lambda old, row: 0.5 * old + 0.5 * row, x)


def scaled_if_large(layer, x):
    largest = tf.reduce_max(tf.abs(x[:, :2]))
    return tf.cond(largest > 0.5, lambda: x / largest, lambda: x * 1.0)


def sorted_by_first(layer, x):
    return ops.take(x, ops.argsort(x[:, 0]), axis=0)


def neighbours(layer, x):
    """The next row, by its index."""
    count = tf.shape(x)[0]
    return x + 0.5 * tf.gather(x, (tf.range(count) + 1) % count)


ROWS_SEE_ROWS = {
    "centred": centred(lambda x: x),
    "standardised": standardised,
    "over the largest": lambda layer, x: x / ops.max(ops.abs(x)),
    "softmax over rows": lambda layer, x: x * ops.softmax(x, axis=0),
    "cumulated rows": lambda layer, x: ops.cumsum(x, axis=0) / 5,
    "sorted rows": lambda layer, x: ops.sort(x, axis=0),
    "reversed rows": lambda layer, x: x + 0.5 * ops.flip(x, axis=0),
    "rolled rows": lambda layer, x: x - 0.5 * ops.roll(x, 1, axis=0),
    "rows in order": sorted_by_first,
    "next row": neighbours,
    "deviation channel": deviation_channel,
    "attention over rows": attending_rows,
    "scan over rows": scanned,
    "cond on the batch": scaled_if_large,
}
for _name, _function in ROWS_SEE_ROWS.items():
    add(f"layer: {_name}", "warn", with_layer(_function), "all_rows|all_sum")


def tokens(function):
    """The features as four tokens of two numbers."""

    def call(layer, x):
        three = ops.reshape(x, (-1, 4, 2))
        return ops.reshape(function(three), (-1, WIDTH))

    return call


def attending_tokens(x):
    scores = tf.matmul(x, x, transpose_b=True)
    return tf.einsum("bts,bsd->btd", tf.nn.softmax(scores), x)


def steps_of_a_row(x):
    """A recurrence over the tokens, in a `tf.while_loop`."""

    def step(place, state):
        return place + 1, tf.tanh(state + tf.gather(x, place, axis=1))

    start = tf.zeros_like(x[:, 0])
    _, state = tf.while_loop(lambda place, _: place < 4, step, (0, start))
    return x + state[:, None]


def group_normalised(x):
    mean, variance = tf.nn.moments(x, axes=[1, 2], keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-3)


def by_gradient_free_branch(layer, x):
    """A branch on what is no row: the layer's own switch."""
    return tf.cond(tf.constant(True), lambda: 2.0 * x, lambda: x)


def unstacked(layer, x):
    columns = tf.unstack(x, axis=1)
    return tf.stack(columns[::-1], axis=1) + tf.add_n(columns)[:, None]


ROWS_ALONE = {
    "centred, fixed": centred(all_rows),
    "standardised, fixed": standardised_by_sums,
    "softmax over rows, fixed": lambda layer, x: (
        x * own_rows(ops.softmax(all_rows(x), axis=0), x)
    ),
    "reversed rows, fixed": lambda layer, x: (
        x + 0.5 * own_rows(ops.flip(all_rows(x), axis=0), x)
    ),
    "normalised in the row": lambda layer, x: (
        (x - ops.mean(x, -1, keepdims=True)) / (ops.std(x, -1, keepdims=True) + 0.1)
    ),
    "along the columns": lambda layer, x: (
        ops.cumsum(ops.flip(ops.sort(x, axis=-1), axis=-1), axis=1)
        * ops.softmax(ops.roll(x, 1, axis=-1))
    ),
    "largest of the row": lambda layer, x: (
        x * ops.cast(x >= ops.top_k(x, 3)[0][:, -1:], x.dtype)
    ),
    "attention over tokens": tokens(attending_tokens),
    "while loop over tokens": tokens(steps_of_a_row),
    "group norm by hand": tokens(group_normalised),
    "tokens reversed": tokens(lambda x: ops.flip(ops.cumsum(x, axis=1), axis=1)),
    "table by gather": lambda layer, x: (
        x + tf.gather(tf.eye(WIDTH), tf.argmax(x, axis=-1))
    ),
    "diagonal of products": lambda layer, x: (
        x * tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True))[:, None]
    ),
    "columns with columns": lambda layer, x: (
        x + 0.1 * ops.reshape(ops.einsum("bi,bj->bij", x, x), (-1, WIDTH, WIDTH))[:, 0]
    ),
    "map over rows": lambda layer, x: tf.map_fn(lambda r: tf.nn.softmax(r) * r, x),
    "cond on a constant": by_gradient_free_branch,
    "unstacked columns": unstacked,
}
for _name, _function in ROWS_ALONE.items():
    _replicas = (2, 3) if _name in ("standardised, fixed", "map over rows") else (2,)
    add(f"layer: {_name}", "exact", with_layer(_function), replicas=_replicas)


def normalising(layer):
    def build():
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(8), layer(), layers.Dense(CLASSES)]
        )

    return lambda strategy: fitted(strategy, build, cross_entropy())


add("BatchNormalization", "silent", normalising(layers.BatchNormalization))
add("LayerNormalization", "exact", normalising(layers.LayerNormalization))


class Centre(layers.Layer):
    """Stores the mean of rows, of which it has an average, around reading it."""

    def __init__(self, is_read_before=False, gather=lambda x: x):
        super().__init__()
        self.is_read_before, self.gather = is_read_before, gather

    def build(self, shape):
        self.centre = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, x):
        mean = ops.mean(self.gather(x), axis=0)
        before = 1.0 * self.centre  # read here
        self.centre.assign(0.9 * self.centre + 0.1 * ops.stop_gradient(mean))
        return x - (before if self.is_read_before else self.centre)


add("centre, then read", "warn", normalising(Centre), "all_rows|all_sum")
add("centre of all, then read", "exact", normalising(lambda: Centre(False, all_rows)))
add("read, then centre", "exact", normalising(lambda: Centre(True)), replicas=(2, 3))


# Models of stock layers, of which none lets a row see another.


def lookup():
    words = layers.IntegerLookup(vocabulary=list(range(1, 20)))
    return [words, layers.Embedding(20, WIDTH), layers.GlobalAveragePooling1D()]


def attention():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(20, WIDTH, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True) + x
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def images():
    return keras.Sequential(
        [
            layers.Reshape((3, 2, 1)),
            layers.ZeroPadding2D(1),
            layers.Conv2D(4, 2, activation="relu"),
            layers.DepthwiseConv2D(2, padding="same"),
            layers.GroupNormalization(2),
            layers.Conv2DTranspose(4, 2, padding="same"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def crossed():
    """Columns with columns, as in recommenders, in the functional API."""
    inputs = keras.Input((FEATURES,))
    first, second = (layers.Dense(WIDTH, "tanh")(inputs) for _ in range(2))
    both = layers.Dot(axes=1, normalize=True)([first, second])
    joined = layers.Concatenate()([first * second, both, layers.Softmax()(first)])
    return keras.Model(inputs, layers.Dense(CLASSES)(joined))


def binned():
    return keras.Sequential(
        [
            layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0]),
            layers.Embedding(4, 3),
            layers.TimeDistributed(layers.Dense(2, "relu")),
            layers.Conv1D(4, 3, padding="causal"),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def words_and_classes():
    words, items = words_and_items()
    return words, items % CLASSES


STOCK = {
    "attention": (attention, words_and_classes),
    "masked GRU": (
        lambda: keras.Sequential(
            [
                layers.Embedding(20, 4, mask_zero=True),
                layers.GRU(4),
                layers.Dense(CLASSES),
            ]
        ),
        words_and_classes,
    ),
    "images": (images, rows_and_labels),
    "crossed columns": (crossed, rows_and_labels),
    "bins": (binned, rows_and_labels),
    "lookup": (
        lambda: keras.Sequential([*lookup(), layers.Dense(CLASSES)]),
        words_and_classes,
    ),
}


def stock_model(build, data):
    return lambda strategy: fitted(strategy, build, cross_entropy(), data())


for _name, (_build, _data) in STOCK.items():
    add(f"model: {_name}", "exact", stock_model(_build, _data))


def two_heads(strategy):
    """Two outputs with losses, weights and metrics of their own."""

    def build():
        inputs = keras.Input((FEATURES,))
        x = layers.Dense(WIDTH, "tanh")(inputs)
        outputs = {"class": layers.Dense(CLASSES)(x), "sum": layers.Dense(1)(x)}
        return keras.Model(inputs, outputs)

    x, y = rows_and_labels()
    targets = {"class": y, "sum": x.sum(axis=1, keepdims=True)}
    keras.utils.set_random_seed(3)
    with scope_of(strategy):
        model = build()
        losses = {"class": cross_entropy(), "sum": "mse"}
        model.compile(
            keras.optimizers.SGD(0.05),
            losses,
            loss_weights={"class": 1.0, "sum": 0.3},
            metrics={"class": ["accuracy"], "sum": ["mae"]},
            jit_compile=False,
        )
    kept = model.fit(x, targets, BATCH, shuffle=False, verbose=0).history
    return model.get_weights(), [kept[name] for name in sorted(kept)]


add("model: two heads", "exact", two_heads, replicas=(2, 3))


# What layers give to `add_loss`.


def balance(gather):
    """The product of two means: the experts' shares of the rows, and their gates."""

    def route(layer, x):
        gates = ops.softmax(x[:, :4])
        chosen = ops.one_hot(ops.argmax(gates, -1), 4)
        shares = ops.mean(gather(chosen), axis=0)
        layer.add_loss(0.3 * 4 * ops.sum(shares * ops.mean(gather(gates), axis=0)))
        return x

    return route


def variation(layer, x):
    """Shazeer's balance: the coefficient of variation of the experts' load."""
    load = ops.sum(ops.softmax(x[:, :4]), axis=0)
    layer.add_loss(ops.var(load) / ops.square(ops.mean(load)))
    return x


def sum_over_experts(layer, x):
    """A mean over all rows for each expert, added up in a Python loop."""
    gates = ops.softmax(all_rows(x)[:, :4])
    layer.add_loss(0.2 * sum(ops.square(ops.mean(gates[:, k])) for k in range(4)))
    return x


def divergence(reduce):
    """A variational autoencoder's: the first half are means, the second log-variances.

    Without noise, which would be drawn anew by each replica.
    """

    def call(layer, x):
        mean, log_variance = ops.split(x, 2, axis=-1)
        each = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        layer.add_loss(reduce(-0.05 * each))
        return x

    return call


class Scaled(layers.Layer):
    """Scales the columns by weights, and punishes these."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        self.add_loss(0.05 * ops.sum(ops.square(self.scale)))
        return x * self.scale


ADDED = {
    "expert balance": ("warn", balance(lambda x: x), "all_rows"),
    "expert balance, fixed": ("exact", balance(all_rows), None),
    "load variation": ("warn", variation, "all_rows"),
    "sum over experts": ("exact", sum_over_experts, None),
    "divergence, summed": ("warn", divergence(ops.sum), "local_sum"),
    "divergence, fixed": ("exact", divergence(lambda e: local_sum(ops.sum(e))), None),
    "divergence, mean": (
        "exact",
        divergence(lambda each: ops.mean(ops.sum(each, axis=-1))),
        None,
    ),
    "divergence of rows": ("exact", divergence(lambda each: ops.sum(each, -1)), None),
}
for _name, (_kind, _function, _fix) in ADDED.items():
    add(f"add_loss: {_name}", _kind, with_layer(_function, rate=0.03), _fix)


def regularised(strategy):
    """Keras' own penalties: on a kernel, and on what a layer returns."""

    def build():
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(WIDTH, "tanh", kernel_regularizer="l2"),
                layers.Dense(
                    CLASSES, activity_regularizer=keras.regularizers.L1L2(0.01, 0.01)
                ),
            ]
        )

    return fitted(strategy, build, cross_entropy())


add("add_loss: penalty on weights", "exact", normalising(Scaled))
add("Keras regularizers", "exact", regularised, replicas=(2, 3))
