"""Models as people write them: each row of an output depends on its own row only.

`MODELS` has, by name, a function that returns a model and a batch for it. The analysis
has to follow all of them (`tests/devices/test_ordinary_models.py`).
"""

import keras
import numpy as np
import tensorflow as tf

layers, ops = keras.layers, keras.ops

ROWS, LENGTH, WIDTH, HEADS, WORDS = 6, 8, 8, 2, 20
draw = np.random.default_rng(4)
VECTORS = draw.normal(size=(ROWS, WIDTH)).astype("float32")
SEQUENCES = draw.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32")
TOKENS = draw.integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
IMAGES = draw.normal(size=(ROWS, 8, 8, 3)).astype("float32")
VIDEOS = draw.normal(size=(ROWS, 4, 8, 8, 2)).astype("float32")
MODELS = {}


def model_of(x):
    """Registers a function from an input to an output as a model of such batches."""

    def register(function):
        def make():
            entry = keras.Input(x.shape[1:], dtype=x.dtype.name)
            return keras.Model(entry, function(entry)), x

        MODELS[function.__name__] = make
        return function

    return register


def called_on(x):
    """Registers a class of models with a `call` of its own."""

    def register(cls):
        MODELS[cls.__name__] = lambda: (cls(), x)
        return cls

    return register


def chain(name, x, *made):
    MODELS[name] = lambda: (
        keras.Sequential(
            [keras.Input(x.shape[1:], dtype=x.dtype.name), *(m() for m in made)]
        ),
        x,
    )


def block(x, **attention):
    """A block of a transformer."""
    options = {"dropout": attention.pop("dropout", 0.0)}
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, **options)(y, y, **attention)
    x = layers.Add()([x, layers.Dropout(0.1)(y)])
    y = layers.Dense(WIDTH, "gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, y])


def embedded(x, **options):
    positions = layers.Embedding(LENGTH, WIDTH)(ops.arange(LENGTH))
    return layers.Embedding(WORDS, WIDTH, **options)(x) + positions


@model_of(TOKENS)
def encoder(x):
    return layers.Dense(WORDS)(block(embedded(x)))


@model_of(TOKENS)
def decoder(x):
    return layers.Dense(WORDS)(block(embedded(x), use_causal_mask=True))


@model_of(TOKENS)
def decoder_with_dropout(x):
    return layers.Dense(WORDS)(block(embedded(x), use_causal_mask=True, dropout=0.1))


@model_of(TOKENS)
def decoder_with_padding(x):
    e = layers.Embedding(WORDS, WIDTH, mask_zero=True)(x)
    return layers.Dense(WORDS)(block(e, use_causal_mask=True, dropout=0.1))


@model_of(SEQUENCES)
def grouped_heads(x):
    y = layers.GroupQueryAttention(4, HEADS, 2)(x, x, use_causal_mask=True)
    return layers.Dense(3)(x + y)


@model_of(SEQUENCES)
def attention_layers(x):
    y = layers.Attention(use_scale=True)([x, x], use_causal_mask=True)
    return layers.AdditiveAttention(dropout=0.1)([x, y])


@called_on(SEQUENCES)
class Rotary(keras.Model):
    """Rotary positions and grouped heads, from their formulas."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = layers.Dense(16), layers.Dense(8), layers.Dense(8)
        self.out = layers.Dense(4)

    def rotated(self, x):
        length, size = ops.shape(x)[1], x.shape[-1]
        turns = 1.0 / (10000.0 ** (ops.arange(0, size, 2, dtype="float32") / size))
        angles = ops.einsum("i,j->ij", ops.arange(length, dtype="float32"), turns)
        sines, cosines = ops.sin(angles)[None, :, None], ops.cos(angles)[None, :, None]
        first, second = ops.split(x, 2, axis=-1)
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        return ops.concatenate(turned, axis=-1)

    def call(self, x):
        rows, length = ops.shape(x)[0], ops.shape(x)[1]
        q = self.rotated(ops.reshape(self.q(x), (rows, length, 4, 4)))
        k = self.rotated(ops.reshape(self.k(x), (rows, length, 2, 4)))
        v = ops.reshape(self.v(x), (rows, length, 2, 4))
        k, v = ops.repeat(k, 2, axis=2), ops.repeat(v, 2, axis=2)
        q, k, v = (ops.transpose(each, (0, 2, 1, 3)) for each in (q, k, v))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / 2.0
        mask = ops.tril(ops.ones((length, length), "bool"))
        scores = ops.where(mask, scores, -1e9)
        mixed = ops.matmul(ops.softmax(scores), v)
        mixed = ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (rows, length, 16))
        return self.out(mixed)


@called_on(SEQUENCES)
class RotaryByTensorFlow(keras.Model):
    """Pairs of neighbours turned, by TensorFlow's own names."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(4)

    def call(self, x):
        rows, length = tf.shape(x)[0], tf.shape(x)[1]
        pairs = tf.reshape(x, (rows, length, HEADS, WIDTH // HEADS // 2, 2))
        angles = tf.range(tf.cast(length, tf.float32))[:, None, None] * 0.1
        even, odd = tf.unstack(pairs, axis=-1)
        turned = tf.stack(
            [even * tf.cos(angles) - odd * tf.sin(angles), even * tf.sin(angles) + odd],
            axis=-1,
        )
        x = tf.reshape(turned, (rows, length, HEADS, -1))
        scores = tf.einsum("bqhd,bkhd->bhqk", x, x)
        bias = tf.linalg.band_part(tf.ones((length, length)), -1, 0)
        scores += (1.0 - bias) * -1e9
        x = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), x)
        x = tf.nn.dropout(tf.reshape(x, (rows, length, WIDTH)), 0.1)
        return self.out(x)


@called_on(SEQUENCES)
class HeadsInTheBatch(keras.Model):
    """Heads folded into the axis of the rows, and back."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = layers.Dense(3 * WIDTH), layers.Dense(4)

    def call(self, x):
        rows, length = tf.shape(x)[0], LENGTH
        q, k, v = tf.split(self.qkv(x), 3, axis=-1)
        fold = lambda t: tf.reshape(  # noqa: E731
            tf.transpose(tf.reshape(t, (rows, length, HEADS, -1)), (0, 2, 1, 3)),
            (rows * HEADS, length, WIDTH // HEADS),
        )
        scores = tf.matmul(fold(q), fold(k), transpose_b=True)
        mixed = tf.matmul(tf.nn.softmax(scores), fold(v))
        mixed = tf.reshape(mixed, (rows, HEADS, length, WIDTH // HEADS))
        mixed = tf.transpose(mixed, (0, 2, 1, 3))
        return self.out(tf.reshape(mixed, (rows, length, WIDTH)))


@called_on(IMAGES)
class Patches(keras.Model):
    """A vision transformer's patches, with a class token and positions."""

    def __init__(self):
        super().__init__()
        self.dense, self.attention = (
            layers.Dense(WIDTH),
            layers.MultiHeadAttention(2, 4),
        )
        self.head = layers.Dense(3)

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, WIDTH), name="token")
        self.positions = self.add_weight(shape=(1, 5, WIDTH), name="positions")
        super().build(shape)

    def call(self, x):
        rows = ops.shape(x)[0]
        patches = tf.image.extract_patches(
            x, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID"
        )
        patches = self.dense(ops.reshape(patches, (rows, -1, 48)))
        token = ops.broadcast_to(self.token, (rows, 1, WIDTH))
        x = ops.concatenate([token, patches], axis=1) + self.positions
        return self.head(self.attention(x, x)[:, 0])


@called_on(IMAGES)
class Windows(keras.Model):
    """Attention within shifted windows of an image."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = layers.MultiHeadAttention(1, 3), layers.Dense(3)

    def call(self, x):
        x = ops.roll(x, (-2, -2), (1, 2))
        x = ops.reshape(x, (-1, 2, 4, 2, 4, 3))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, 16, 3))
        x = self.attention(x, x)
        x = ops.reshape(x, (-1, 2, 2, 4, 4, 3))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, 8, 8, 3))
        return self.head(ops.mean(x, (1, 2)))


@model_of(IMAGES)
def residual_network(x):
    y = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.GroupNormalization(2)(y))
    y = layers.DepthwiseConv2D(3, padding="same")(y)
    y = layers.SeparableConv2D(3, 3, padding="same")(y)
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(layers.Add()([x, y])))


@model_of(IMAGES)
def u_net(x):
    down = layers.MaxPooling2D()(layers.Conv2D(4, 3, padding="same")(x))
    up = layers.UpSampling2D()(down)
    wide = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(down)
    y = layers.Concatenate()([up, wide, layers.ZeroPadding2D(1)(x)[:, 1:-1, 1:-1]])
    return layers.Conv2D(1, 1, activation="sigmoid")(layers.Cropping2D(1)(y))


@model_of(IMAGES)
def squeeze_and_excite(x):
    y = layers.Dense(3, "sigmoid")(layers.GlobalMaxPooling2D(keepdims=True)(x))
    y = layers.GroupNormalization(3)(layers.Multiply()([x, y]))
    return layers.Flatten()(layers.AveragePooling2D(2)(layers.PReLU()(y)))


@model_of(IMAGES)
def augmented(x):
    x = layers.RandomFlip()(layers.Rescaling(0.5)(x))
    x = layers.RandomContrast(0.1)(layers.RandomTranslation(0.1, 0.1)(x))
    x = layers.RandomZoom(0.1)(layers.RandomRotation(0.1)(x))
    return layers.Dense(2)(layers.Flatten()(layers.RandomBrightness(0.1)(x)))


@model_of(IMAGES)
def pixels_rearranged(x):
    y = layers.Lambda(lambda t: tf.nn.space_to_depth(t, 2))(x)
    y = layers.Conv2D(12, 3, padding="same", dilation_rate=2)(y)
    y = layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2))(y)
    return layers.Lambda(lambda t: tf.image.resize(t, (4, 4)))(y)


@model_of(VIDEOS)
def video(x):
    y = layers.TimeDistributed(layers.Conv2D(2, 3, padding="same"))(x)
    y = layers.MaxPooling3D((1, 2, 2))(layers.Conv3D(2, 3, padding="same")(y))
    return layers.Dense(2)(layers.GlobalAveragePooling3D()(y))


@model_of(VIDEOS)
def recurrent_convolution(x):
    return layers.ConvLSTM2D(2, 3)(x)


chain(
    "lstm",
    SEQUENCES,
    lambda: layers.LSTM(4, return_sequences=True),
    lambda: layers.GRU(3),
)
chain("bidirectional", SEQUENCES, lambda: layers.Bidirectional(layers.LSTM(4)))
chain("simple_recurrent", SEQUENCES, lambda: layers.SimpleRNN(4, dropout=0.1))
chain(
    "recurrent_with_mask",
    TOKENS,
    lambda: layers.Embedding(WORDS, WIDTH, mask_zero=True),
    lambda: layers.Bidirectional(layers.GRU(4, return_sequences=True)),
    lambda: layers.GlobalAveragePooling1D(),
)
chain(
    "stacked_cells",
    SEQUENCES,
    lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4), layers.GRUCell(3)])),
)
chain(
    "dilated_convolutions",
    SEQUENCES,
    lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
    lambda: layers.SpatialDropout1D(0.1),
    lambda: layers.MaxPooling1D(),
    lambda: layers.UpSampling1D(2),
    lambda: layers.Cropping1D(1),
    lambda: layers.GlobalMaxPooling1D(),
)
chain(
    "normalizations",
    SEQUENCES,
    lambda: layers.LayerNormalization(rms_scaling=False),
    lambda: layers.RMSNormalization(),
    lambda: layers.UnitNormalization(),
    lambda: layers.SpectralNormalization(layers.Dense(4)),
)
chain(
    "noise",
    VECTORS,
    lambda: layers.GaussianNoise(0.1),
    lambda: layers.GaussianDropout(0.1),
    lambda: layers.AlphaDropout(0.1),
    lambda: layers.ActivityRegularization(l2=0.01),
    lambda: layers.Dense(3, "softmax"),
)
chain(
    "activations",
    VECTORS,
    *(
        lambda name=name: layers.Dense(WIDTH, name)
        for name in "elu selu softplus softsign swish mish gelu hard_sigmoid hard_silu "
        "leaky_relu relu6 tanh exponential log_softmax celu squareplus tanh_shrink "
        "soft_shrink hard_shrink sparse_plus log_sigmoid".split()
    ),
)
chain(
    "shapes",
    SEQUENCES,
    lambda: layers.Permute((2, 1)),
    lambda: layers.Reshape((4, -1)),
    lambda: layers.Flatten(),
    lambda: layers.RepeatVector(2),
    lambda: layers.EinsumDense("abc,cd->abd", (None, 4)),
)
chain(
    "bag_of_words",
    TOKENS,
    lambda: layers.CategoryEncoding(WORDS, "count"),
    lambda: layers.Dense(3),
)


@model_of(TOKENS)
def mean_of_words(x):
    e = layers.Embedding(WORDS, WIDTH)(x)
    known = ops.cast(ops.not_equal(x, 1), "float32")[..., None]
    return ops.sum(e * known, 1) / ops.maximum(ops.sum(known, 1), 1.0)


@model_of(TOKENS)
def factorization_machine(x):
    e = layers.Embedding(WORDS, WIDTH)(x)
    pairs = 0.5 * ops.sum(ops.square(ops.sum(e, 1)) - ops.sum(ops.square(e), 1), 1)
    crossed = layers.Dense(WIDTH)(layers.Flatten()(e))
    return ops.expand_dims(pairs, 1) + layers.Dense(1)(
        layers.Dot(1)([crossed, crossed])
    )


@model_of(VECTORS)
def cross_network(x):
    y = x
    for _ in range(2):
        y = x * layers.Dense(WIDTH)(y) + y
    return layers.Concatenate()([y, layers.Maximum()([x, y]), layers.Average()([x, y])])


@model_of(VECTORS)
def mixture_of_experts(x):
    gates = layers.Dense(4, "softmax")(x)
    experts = ops.stack([layers.Dense(3)(x) for _ in range(4)], axis=1)
    best, which = ops.top_k(gates, 2)
    chosen = ops.take_along_axis(experts, ops.expand_dims(which, -1), axis=1)
    return ops.sum(chosen * ops.expand_dims(best, -1), 1)


@model_of(SEQUENCES)
def mixer(x):
    y = ops.swapaxes(layers.Dense(LENGTH)(ops.swapaxes(x, 1, 2)), 1, 2)
    y = layers.Dense(WIDTH, "gelu")(layers.LayerNormalization()(x + y))
    return ops.max(y, 1) + ops.std(y, 1) + ops.logsumexp(y, 1)


@model_of(SEQUENCES)
def last_step(x):
    return ops.concatenate([x[:, -1], x[:, ::2][:, 0], ops.flip(x, 1)[:, 0]], -1)


@model_of(SEQUENCES)
def spectra(x):
    real, imaginary = ops.fft(
        (ops.swapaxes(x, 1, 2), ops.zeros_like(ops.swapaxes(x, 1, 2)))
    )
    return ops.sqrt(real * real + imaginary * imaginary + 1e-6)


@model_of(SEQUENCES)
def covariances(x):
    whole = ops.matmul(ops.swapaxes(x, 1, 2), x) + ops.eye(WIDTH)
    return ops.cholesky(whole) + ops.inv(whole)


@called_on(VECTORS)
class Autoencoder(keras.Model):
    """A variational autoencoder's reconstruction."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = layers.Dense(6), layers.Dense(WIDTH, "sigmoid")
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, spread = ops.split(self.encode(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        return self.decode(mean + ops.exp(0.5 * spread) * noise)


@called_on(VECTORS)
class Fields(keras.Model):
    """Positions encoded by sines of rising frequencies."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x):
        waves = [f(2.0**i * x) for i in range(3) for f in (tf.sin, tf.cos)]
        points = tf.linspace(0.0, 1.0, 5)[None, :, None] * x[:, None]
        return self.dense(tf.concat([x, *waves], -1)) + self.dense(
            tf.concat([tf.reduce_sum(points, 1)] * 7, -1)
        )


@called_on(SEQUENCES)
class Capsules(keras.Model):
    """Routing by agreement, in a loop."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, WIDTH, 4), name="kernel")
        super().build(shape)

    def call(self, x):
        votes = tf.einsum("bid,kdc->bkic", x, self.kernel)
        scores = tf.zeros_like(votes[..., 0])
        for _ in range(2):
            weights = tf.nn.softmax(scores, axis=1)
            whole = tf.reduce_sum(weights[..., None] * votes, 2)
            length = tf.reduce_sum(whole**2, -1, keepdims=True)
            whole = whole * tf.sqrt(length + 1e-7) / (1 + length)
            scores += tf.reduce_sum(votes * whole[:, :, None], -1)
        return whole


@called_on(SEQUENCES)
class Graph(keras.Model):
    """Messages between the nodes of each row's graph."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(WIDTH)

    def call(self, x):
        near = tf.cast(tf.matmul(x, x, transpose_b=True) > 0, tf.float32)
        degree = tf.math.rsqrt(tf.reduce_sum(near, -1) + 1.0)
        near = degree[:, :, None] * near * degree[:, None]
        return tf.reduce_mean(tf.nn.relu(tf.matmul(near, self.dense(x))), 1)


@called_on(TOKENS)
class Codebook(keras.Model):
    """Nearest entries of a codebook, passed straight through."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(WORDS, WIDTH)

    def build(self, shape):
        self.book = self.add_weight(shape=(WIDTH, 5), name="book")
        super().build(shape)

    def call(self, x):
        e = self.embedding(x)
        flat = tf.reshape(e, (-1, WIDTH))
        far = (
            tf.reduce_sum(flat**2, 1, keepdims=True)
            + tf.reduce_sum(self.book**2, 0)
            - 2 * tf.matmul(flat, self.book)
        )
        chosen = tf.one_hot(tf.argmin(far, 1), 5)
        quantized = tf.reshape(
            tf.matmul(chosen, self.book, transpose_b=True), tf.shape(e)
        )
        return e + tf.stop_gradient(quantized - e)
