"""Programs of the kinds that tutorials publish, small; each gives what it reaches.

What is random about them comes with the batch, so that replicas and one device have the
same numbers.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdp

ROWS, BATCH = 25, 12  # 12, 12 and 1: replicas are left without a row
FEATURES, LATENT, CLASSES = 6, 3, 4


def arrays(*widths, seed=4):
    """For each width rows of very different size."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.2, 2.0, (ROWS, 1))
    return [(rng.normal(size=(ROWS, w)) * size).astype("float32") for w in widths]


def labels():
    return np.random.default_rng(5).integers(0, CLASSES, ROWS)


def batches(*parts):
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def dense(*units, inputs=None):
    """Dense layers; not built when `inputs` is None."""
    start = [] if inputs is None else [keras.Input((inputs,))]
    hidden = [layers.Dense(n, activation="tanh") for n in units[:-1]]
    return keras.Sequential([*start, *hidden, layers.Dense(units[-1])])


def weights_of(*networks):
    return [w.numpy() for network in networks for w in network.weights]


def adam(**options):
    return keras.optimizers.Adam(0.02, epsilon=1e-3, **options)


class GAN(keras.Model):
    """Two networks, two optimizers, no `call`."""

    def __init__(self, inputs):
        super().__init__()
        self.discriminator = dense(8, 1, inputs=inputs and FEATURES)
        self.generator = dense(8, FEATURES, inputs=inputs and LATENT)

    def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn

    def optimizers(self):
        return self.d_optimizer, self.g_optimizer

    def train_step(self, data):
        real, noise = data
        d_optimizer, g_optimizer = self.optimizers()
        rows = ops.shape(real)[0]
        mixed = ops.concatenate([self.generator(noise), real], axis=0)
        truth = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(truth, self.discriminator(mixed))
        variables = self.discriminator.trainable_weights
        d_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, variables), variables, strict=True)
        )
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), judged)
        variables = self.generator.trainable_weights
        g_optimizer.apply_gradients(
            zip(tape.gradient(g_loss, variables), variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


class DictionaryGAN(GAN):
    """As above, with its optimizers in a dictionary."""

    def compile(self, optimizers, loss_fn, **options):
        super().compile(None, None, loss_fn, **options)
        self.by_network = optimizers

    def optimizers(self):
        return self.by_network["discriminator"], self.by_network["generator"]


def gan(strategy):
    """Nothing is built before the first step, and compile is outside of the scope."""
    with strategy.scope():
        model = GAN(inputs=None)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    d_optimizer = adam()
    model.compile(d_optimizer, adam(beta_1=0.5), loss, jit_compile=False)
    model.fit(batches(*arrays(FEATURES, LATENT)), epochs=2, verbose=0)
    assert model.d_optimizer is d_optimizer
    assert int(d_optimizer.iterations) == 6
    return weights_of(model.discriminator, model.generator)


def gan_with_a_dictionary(strategy):
    with strategy.scope():
        model = DictionaryGAN(inputs=True)
        optimizers = {
            "discriminator": adam(global_clipnorm=0.1),
            "generator": keras.optimizers.LossScaleOptimizer(adam(), 8.0),
        }
        # Its `apply` divides by a scale that the step does not multiply by: the same
        # on one device.
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizers, loss, jit_compile=False)
    model.fit(batches(*arrays(FEATURES, LATENT)), epochs=2, verbose=0)
    return weights_of(model.discriminator, model.generator)


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = dense(8, 2 * LATENT, inputs=FEATURES)
        self.decoder = dense(8, FEATURES, inputs=LATENT)
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        x, epsilon = data
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
            decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * epsilon)
            error = ops.sum((x - decoded) ** 2, axis=1)
            kl = 1 + log_variance - mean**2 - ops.exp(log_variance)
            loss = ops.mean(error - 0.5 * ops.sum(kl, axis=1))
            share = tfdp.losses.local_mean(loss)
        gradients = tape.gradient(share, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.total.update_state(loss, sample_weight=ops.shape(x)[0])
        return {"loss": self.total.result()}


def vae(strategy):
    with strategy.scope():
        model = VAE()
        model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    model.fit(batches(*arrays(FEATURES, LATENT)), epochs=2, verbose=0)
    return weights_of(model.encoder, model.decoder)


class Diffusion(keras.Model):
    """Predicts noise; a moving average of its weights is kept by hand."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = dense(8, FEATURES, inputs=FEATURES + 1)
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.trainable = False

    def train_step(self, data):
        images, noises, times = data
        images = self.normalizer(images)
        noisy = ops.cos(times) * images + ops.sin(times) * noises
        with tf.GradientTape() as tape:
            predicted = self.network(ops.concatenate([noisy, times], axis=1))
            loss = self.loss(noises, predicted)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.network.trainable_weights, strict=True)
        )
        pairs = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in pairs:
            average.assign(0.9 * average + 0.1 * weight)
        return {"n_loss": loss}


def diffusion(strategy):
    images, noises = arrays(FEATURES, FEATURES)
    times = np.linspace(0.1, 1.4, ROWS, dtype="float32")[:, None]
    with strategy.scope():
        model = Diffusion()
        model.normalizer.adapt(images)
        model.compile(
            keras.optimizers.AdamW(0.02, 0.01, epsilon=1e-3),
            loss=keras.losses.MeanSquaredError(),
            jit_compile=False,
        )
    model.fit(batches(images, noises, times), epochs=2, verbose=0)
    return weights_of(model.network, model.ema_network)


class Contrastive(keras.Model):
    """Two views of each row, which a predictor is to find alike."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(8, 4, inputs=FEATURES)
        self.predictor = dense(4, 4, inputs=4)
        self.similarity = keras.losses.CosineSimilarity()

    def train_step(self, data):
        one, two = data
        with tf.GradientTape() as tape:
            first, second = self.encoder(one), self.encoder(two)
            loss = self.similarity(ops.stop_gradient(second), self.predictor(first))
            loss += self.similarity(ops.stop_gradient(first), self.predictor(second))
            loss *= 0.5
        variables = self.encoder.trainable_weights + self.predictor.trainable_weights
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def contrastive(strategy):
    with strategy.scope():
        model = Contrastive()
        model.compile("sgd", jit_compile=False)
        model.optimizer.learning_rate = 0.05
    one, two = arrays(FEATURES, FEATURES)
    # Rows far from zero: the cosine of a short vector turns on its last bits.
    model.fit(batches(one + 1, two + 1), epochs=2, verbose=0)
    assert float(model.optimizer.learning_rate) == np.float32(0.05)
    return weights_of(model.encoder, model.predictor)


class Distiller(keras.Model):
    """A student that learns from labels and from a frozen teacher."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.student_loss = keras.losses.SparseCategoricalCrossentropy(True)
        self.teacher_loss = keras.losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        told = ops.softmax(self.teacher(x, training=False) / 3)
        taught = self.teacher_loss(told, ops.softmax(y_pred / 3)) * 9
        return 0.4 * self.student_loss(y, y_pred) + 0.6 * taught


def distillation(strategy):
    teacher = dense(8, CLASSES, inputs=FEATURES)  # made, and trained, elsewhere
    teacher.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    x, y = arrays(FEATURES)[0], labels()
    teacher.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    with strategy.scope():
        model = Distiller(dense(5, CLASSES, inputs=FEATURES), teacher)
        model.compile(adam(), metrics=["accuracy"], jit_compile=False)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return weights_of(model.student)


def text_generation(strategy):
    """Next characters by an LSTM, which are then fed back row by row."""
    tokens = np.random.default_rng(6).integers(0, 7, (ROWS, 6))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(7, 4),
                layers.LSTM(5),
                layers.Dense(7),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-3), loss)
    x, y = tokens[:, :5], tokens[:, 5]
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    seed = tokens[:3, :5]  # as many rows as replicas at most
    for _ in range(3):
        following = model.predict(seed, verbose=0)
        seed = np.concatenate([seed[:, 1:], following.argmax(1)[:, None]], axis=1)
    return [*weights_of(model), following]


def custom_loop(strategy):
    """Everything by hand: TensorFlow's tutorial of distributed training."""
    with strategy.scope():
        model = dense(8, CLASSES, inputs=FEATURES)
        optimizer = adam(clipvalue=0.02)
        loss_object = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            per_row = loss_object(y, predictions)
            loss = tf.nn.compute_average_loss(per_row, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        accuracy.update_state(y, predictions)
        return loss

    @tf.function
    def distributed_train_step(inputs):
        per_replica_losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(
            tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None
        )

    dataset = batches(arrays(FEATURES)[0], labels())
    losses = [
        float(distributed_train_step(batch))
        for _ in range(2)
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    assert int(optimizer.iterations) == 6
    return [*weights_of(model), np.array([*losses, float(accuracy.result())])]


def transfer_learning(strategy):
    """A frozen base, then all of it, compiled anew with a smaller rate."""
    x, y = arrays(FEATURES)[0], labels()
    with strategy.scope():
        base = dense(8, 5, inputs=FEATURES)
        base.trainable = False
        inputs = keras.Input((FEATURES,))
        head = layers.Dense(CLASSES)
        model = keras.Model(inputs, head(base(inputs, training=False)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.compile("adam", loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    frozen = weights_of(base)
    model.fit(x, y, **fit)
    for before, after in zip(frozen, weights_of(base), strict=True):
        np.testing.assert_array_equal(before, after)
    base.trainable = True
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    history = model.fit(x, y, validation_split=0.2, epochs=2, **fit).history
    return [*weights_of(model), np.array([history[key] for key in sorted(history)])]


PROGRAMS = {
    "gan": gan,
    "gan-with-a-dictionary": gan_with_a_dictionary,
    "vae": vae,
    "diffusion": diffusion,
    "contrastive": contrastive,
    "distillation": distillation,
    "text-generation": text_generation,
    "custom-loop": custom_loop,
    "transfer-learning": transfer_learning,
}


def run(name, strategy):
    """What the program `name` comes to under `strategy`."""
    keras.utils.set_random_seed(11)
    return PROGRAMS[name](strategy)


def built_while_traced():
    """For several hosts: each would draw other weights, made while it traces a step."""
    strategy = tf.distribute.get_strategy()
    cluster = getattr(strategy, "cluster", None)
    keras.utils.set_random_seed(11 + (cluster.rank if cluster else 0))
    model = GAN(inputs=None)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(adam(), adam(beta_1=0.5), loss, jit_compile=False)
    model.fit(batches(*arrays(FEATURES, LATENT)), epochs=2, verbose=0)
    weights = weights_of(model.discriminator, model.generator)
    return {f"weight{i}": weight for i, weight in enumerate(weights)}
