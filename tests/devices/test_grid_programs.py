"""Programs with weights in blocks: each trains as on one device, or is refused."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.grids import MLP_RULES, blocks_of, grid, mlp, rows_of
from tests.support.parity import largest_distance, rounding_bound
from tfdp.errors import CollectiveError, ConfigurationError, NotFiniteError

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

layers = keras.layers
RULES = {**MLP_RULES, "head/kernel": ("data", "model")}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy_of(replicas):
    return grid((2, 2), RULES) if replicas > 1 else tf.distribute.get_strategy()


def on_both(train):
    """`train(strategy)`, which returns a model, on one device and on a mesh."""
    one, other = train(strategy_of(1)), train(strategy_of(4))
    # As in test_grid.py.
    bound = rounding_bound(one, 8, 12, 8.0, 10.0)
    assert largest_distance(one.get_weights(), other.get_weights()) < bound
    return one, other


def compiled(strategy, build=mlp, optimizer=None, **options):
    with strategy.scope():
        model = build()
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9),
            LOSS,
            **{"jit_compile": False, **options},
        )
    return model


def fit(model, rows=45, **options):
    x, y = rows_of(rows)
    model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0, **options)
    return model


def constrained():
    """Each constraint sees the whole weight, which both axes cut."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    hidden = layers.Dense(
        16, name="up", kernel_constraint=keras.constraints.MaxNorm(0.5, axis=1)
    )(inputs)
    head = layers.Dense(
        6,
        name="head",
        kernel_constraint=keras.constraints.UnitNorm(),
        kernel_regularizer="l1l2",
    )
    return keras.Model(inputs, head(hidden))


TRAININGS = {
    "executions": {"steps_per_execution": 3},
    "constraints": {"build": constrained},
    "automatic XLA": {"jit_compile": "auto"},
    "accumulation": {
        "optimizer": lambda: tfdp.DistributedOptimizer(
            keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
            accumulate_steps=2,
        )
    },
}


@pytest.mark.parametrize("name", TRAININGS)
def test_fit(name):
    # A micro-batch weighs by its rows, so they are equal.
    rows = 48 if name == "accumulation" else 45
    on_both(lambda strategy: fit(compiled(strategy, **TRAININGS[name]), rows))


def test_evaluate_and_predict():
    x, y = rows_of(29, 5)
    one, other = on_both(lambda strategy: fit(compiled(strategy, metrics=["accuracy"])))
    for numbers in (
        lambda model: model.evaluate(x, y, batch_size=8, verbose=0),
        lambda model: model.predict(x, batch_size=8, verbose=0),
        lambda model: np.asarray(model(x)),
    ):
        # Weights that are 1e-6 apart, in sums of 16 terms of numbers below 30.
        np.testing.assert_allclose(numbers(other), numbers(one), rtol=0, atol=5e-4)


def test_remat():
    def train(strategy):
        with strategy.scope():
            model = mlp()
            for name in ("up", "down"):
                tfdp.remat(model.get_layer(name))
            model.compile(keras.optimizers.SGD(0.1, 0.9), LOSS, jit_compile=False)
        return fit(model)

    on_both(train)


def test_a_layer_is_frozen_after_it_was_built():
    def train(strategy):
        with strategy.scope():
            model = mlp()
            model.get_layer("up").trainable = False
            model.compile(keras.optimizers.SGD(0.1, 0.9), LOSS, jit_compile=False)
        before = model.get_layer("up").get_weights()
        fit(model)
        assert largest_distance(before, model.get_layer("up").get_weights()) == 0
        with strategy.scope():
            model.get_layer("up").trainable = True
            model.get_layer("down").trainable = False
            adam = keras.optimizers.Adam(0.01, epsilon=1e-3)
            model.compile(adam, LOSS, jit_compile=False)
        return fit(model)

    on_both(train)


def test_a_loop_with_a_tape():
    def train(strategy):
        model = compiled(strategy)
        optimizer = model.optimizer
        with strategy.scope():
            optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )

        run = tf.function(lambda batch: strategy.run(step, args=batch))
        rows = tf.data.Dataset.from_tensor_slices(rows_of(48)).batch(12)
        for batch in strategy.experimental_distribute_dataset(rows):
            run(batch)
        return model

    on_both(train)


class TwoOptimizers(keras.Model):
    """The second one updates all but the first layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.second = mlp(), keras.optimizers.SGD(0.1, 0.9, clipnorm=0.05)

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = list(zip(gradients, self.trainable_variables, strict=True))
        self.optimizer.apply_gradients(pairs[:2])
        self.second.apply_gradients(pairs[2:])
        return {"loss": loss}


def test_two_optimizers():
    def train(strategy):
        adam = lambda: keras.optimizers.Adam(  # noqa: E731
            0.01, epsilon=1e-3, global_clipnorm=0.1
        )
        return fit(compiled(strategy, TwoOptimizers, adam))

    on_both(train)


def test_a_cloned_model_is_in_blocks():
    def train(strategy):
        with strategy.scope():
            model = mlp()
            cloned = keras.models.clone_model(model)
            kinds = [type(weight.value) for weight in cloned.weights]
            assert kinds == [type(weight.value) for weight in model.weights]
            cloned.set_weights(model.get_weights())
            cloned.compile(keras.optimizers.SGD(0.1, 0.9), LOSS, jit_compile=False)
        fit(cloned)
        # They share no block.
        assert largest_distance(model.get_weights(), cloned.get_weights()) > 1e-2
        return cloned

    on_both(train)


@pytest.mark.parametrize("policy, bound", [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_mixed_precision(policy, bound):
    """Activations round at 5e-4 and 4e-3, alike; sums of them in another order do not.

    A weight's update is a share of that size; without a part it is off by 1e-1.
    """
    keras.config.set_dtype_policy(f"mixed_{policy}")
    one, other = (fit(compiled(strategy_of(n))) for n in (1, 4))
    assert largest_distance(one.get_weights(), other.get_weights()) < bound


class Burst(layers.Layer):
    """Gives the gradient of one feature, of one row, an infinity where it is `on`."""

    def build(self, shape):
        self.on = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="on"
        )

    def call(self, x):
        @tf.custom_gradient
        def through(x):
            on = tf.convert_to_tensor(self.on)

            def gradient(upstream):
                mask = tf.where(tf.range(16) == 15, np.inf, 0.0)
                return upstream + tf.where(on > 0, mask, tf.zeros([16]))

            return tf.identity(x), gradient

        return through(x)


def bursting():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    hidden = Burst(name="burst")(layers.Dense(16, name="up")(inputs))
    return keras.Model(inputs, layers.Dense(5, name="head")(hidden))


def test_an_infinity_in_one_block_skips_the_step_everywhere():
    def train(strategy):
        model = compiled(
            strategy,
            bursting,
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=2.0**10
            ),
        )
        x, y = rows_of(12)
        for is_on in (0.0, 1.0, 0.0):
            model.get_layer("burst").on.assign(is_on)
            before = model.get_weights()
            model.fit(x, y, batch_size=12, verbose=0)
            moved = largest_distance(before, model.get_weights())
            assert (moved == 0) == bool(is_on)
        assert model.optimizer.dynamic_scale.numpy() == 2.0**9
        assert model.optimizer.inner_optimizer.iterations.numpy() == 2
        return model

    on_both(train)


def test_nan_guard_names_the_weight_and_keeps_the_blocks():
    x, y = rows_of(45)
    x[13, 2] = np.nan
    guard = tfdp.callbacks.NaNGuard()
    model = compiled(strategy_of(4))
    options = {"batch_size": 12, "shuffle": False, "verbose": 0}
    with pytest.raises(NotFiniteError, match=r"step 2 .*replica 0.*up/kernel"):
        model.fit(x, y, callbacks=[guard], **options)
    first = compiled(strategy_of(1))
    first.fit(x[:12], y[:12], **options)
    bound = rounding_bound(first, 1, 12, 8.0, 1.0)
    assert largest_distance(first.get_weights(), model.get_weights()) < bound


def test_values_assigned_by_hand():
    strategy = strategy_of(4)
    with strategy.scope():
        kernel = mlp().get_layer("up").kernel
    value = np.arange(192.0, dtype="float32").reshape(12, 16)

    @tf.function
    def in_function(times):
        kernel.assign(value * times)

    @tf.function
    def in_replicas(times):
        strategy.run(in_function.python_function, args=(times,))

    for times, assign in enumerate(
        [kernel.assign, kernel.value.assign, in_replicas, in_function], start=2
    ):
        is_function = assign in (in_replicas, in_function)
        assign(tf.constant(float(times)) if is_function else value * times)
        np.testing.assert_array_equal(kernel.numpy(), value * times)
    kernel.assign_add(value)
    np.testing.assert_array_equal(kernel.numpy(), value * 6)


def test_what_cannot_be_is_refused_and_layout_is_named():
    with pytest.raises(CollectiveError, match=r"\(layout=\).*Use jit_compile=False"):
        fit(compiled(strategy_of(4), jit_compile=True))
    with pytest.raises(ConfigurationError, match="run_eagerly=False.*without layout="):
        fit(compiled(strategy_of(4), run_eagerly=True))
    noise = tfdp.callbacks.GradientNoiseScale()
    with pytest.raises(ConfigurationError, match=r"without layout="):
        fit(compiled(strategy_of(4)), callbacks=[noise])


def with_words(kind):
    keras.utils.set_random_seed(3)
    words = keras.Input((6,), dtype="int32")
    mean = layers.GlobalAveragePooling1D()(kind(32, 8, name="words")(words))
    return keras.Model(words, layers.Dense(5, name="head")(mean))


class DenseEmbedding(layers.Embedding):
    """Its gradient is dense: the rows of a repeated word are added first."""

    def call(self, words):
        return tf.matmul(tf.one_hot(words, 32), tf.convert_to_tensor(self.embeddings))


@pytest.mark.parametrize("axes", [("model", None), (None, "model"), ("model", "data")])
def test_an_embedding_in_blocks_has_a_dense_gradient(axes):
    drawn = np.random.default_rng(0)
    x, y = drawn.integers(0, 32, (45, 6)), drawn.integers(0, 5, 45)

    def train(strategy, kind):
        model = compiled(
            strategy,
            lambda: with_words(kind),
            lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
        )
        model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        return model

    one = train(strategy_of(1), DenseEmbedding)
    other = train(grid((2, 2), {"words/embeddings": axes}), layers.Embedding)
    bound = rounding_bound(one, 8, 12, 8.0, 10.0)
    assert largest_distance(one.get_weights(), other.get_weights()) < bound


def recurrent():
    keras.utils.set_random_seed(3)
    words = keras.Input((6,), dtype="int32")
    one_hot = layers.CategoryEncoding(9, output_mode="one_hot")(words)
    return keras.Model(
        words, layers.Dense(5, name="head")(layers.LSTM(8, name="lstm")(one_hot))
    )


def test_weights_that_a_loop_reads():
    x = np.random.default_rng(0).integers(0, 9, (45, 6))
    rules = {"lstm/.*/kernel": (None, "model"), ".*recurrent.*": ("data", "model")}

    def train(strategy):
        model = compiled(strategy, recurrent)
        model.fit(x, x[:, 0] % 5, batch_size=12, epochs=2, shuffle=False, verbose=0)
        return model

    one, other = train(strategy_of(1)), train(grid((2, 2), rules))
    assert largest_distance(one.get_weights(), other.get_weights()) < rounding_bound(
        one, 8, 12, 8.0, 10.0
    )


def test_two_axes_beside_the_batch():
    mesh = keras.distribution.DeviceMesh(
        (1, 2, 2), ["data", "rows", "model"], [f"cpu:{rank}" for rank in range(4)]
    )
    layout = keras.distribution.LayoutMap(mesh)
    layout["up/kernel"] = ("rows", "model")
    layout["down/kernel"] = ("model", None)
    layout["head/kernel"] = ("rows", None)
    model = fit(compiled(tfdp.DataParallelStrategy(layout=layout)))
    assert blocks_of(model.get_layer("up").kernel)[0].shape == (6, 8)
    assert blocks_of(model.get_layer("head").kernel)[0].shape == (6, 5)
    one = fit(compiled(strategy_of(1)))
    bound = rounding_bound(one, 8, 12, 8.0, 10.0)
    assert largest_distance(one.get_weights(), model.get_weights()) < bound


def of_images(normalization):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, use_bias=False, name="conv")(inputs)
    x = layers.Activation("tanh")(normalization(momentum=0.8, name="norm")(x))
    x = layers.Dense(8, "gelu", name="up")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(5, name="head")(x))


IMAGE_RULES = {
    "conv/kernel": (None, None, None, "model"),
    "norm/(gamma|beta)": ("model",),
    "up/kernel": (None, "model"),
    "head/kernel": ("model", None),
}
SYNCHRONIZED = {
    "tfdp": tfdp.layers.SyncBatchNormalization,
    "Keras": functools.partial(layers.BatchNormalization, synchronized=True),
}


def fit_images(strategy, normalization, rows):
    drawn = np.random.default_rng(2)
    x = drawn.normal(size=(rows, 6, 6, 2)) * drawn.uniform(0.2, 3.0, (rows, 1, 1, 1))
    y = drawn.integers(0, 5, rows)
    sgd = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    model = compiled(strategy, lambda: of_images(normalization), sgd)
    model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    return model


@functools.cache
def images_on_one_device(rows):
    return fit_images(strategy_of(1), layers.BatchNormalization, rows)


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=["2x2", "1x4", "4x1"])
@pytest.mark.parametrize("kind, rows", [("tfdp", 21), ("tfdp", 25), ("Keras", 21)])
def test_convolutions_with_batch_normalization(shape, kind, rows):
    """The last batch is 9 rows, or 1, for four replicas."""
    one = images_on_one_device(rows)
    model = fit_images(grid(shape, IMAGE_RULES), SYNCHRONIZED[kind], rows)
    # Gradients are below 2 before they pass the normalization, which divides by
    # deviations of 0.2 and more: 10. Up to six steps of 12 images of 16 places, times
    # 0.5 (momentum 0.9).
    bound = rounding_bound(one, 6, 12 * 16, 10.0, 0.5)
    assert bound < 1e-3
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound


def test_each_replicas_own_statistics_are_farther_than_that_bound():
    one = images_on_one_device(21)
    own = fit_images(grid((2, 2), IMAGE_RULES), layers.BatchNormalization, 21)
    assert largest_distance(one.get_weights(), own.get_weights()) > 1e-2
