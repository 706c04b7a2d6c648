"""Random layers draw apart on every replica, and again the same from one seed."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model, make_strategy

LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5, seed=7),
    "gaussian_noise": lambda: keras.layers.GaussianNoise(0.5, seed=7),
    "gaussian_dropout": lambda: keras.layers.GaussianDropout(0.5, seed=7),
    "alpha_dropout": lambda: keras.layers.AlphaDropout(0.5, seed=7),
    "spatial_dropout": lambda: keras.layers.SpatialDropout1D(0.5, seed=7),
    "random_flip": lambda: keras.layers.RandomFlip("horizontal", seed=7),
    "random_translation": lambda: keras.layers.RandomTranslation(0.4, 0.4, seed=7),
}
SHAPES = {
    "random_flip": (16, 8, 8, 1),
    "random_translation": (16, 8, 8, 1),
    "spatial_dropout": (16, 3, 16),
}


def drawn_by(strategy, name, calls=3):
    """What each replica makes of the same input, call by call."""
    shape = SHAPES.get(name, (16, 32))
    inputs = np.arange(np.prod(shape), dtype="float32").reshape(shape) % 13 + 1
    with strategy.scope():
        layer = LAYERS[name]()
        layer.build(shape)

    @tf.function
    def step():
        return strategy.run(lambda: layer(tf.constant(inputs), training=True))

    return [
        [part.numpy() for part in strategy.experimental_local_results(step())]
        for _ in range(calls)
    ]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("replicas", [2, 4])
def test_every_replica_and_every_step_draws_its_own(replicas, name):
    steps = drawn_by(make_strategy(replicas), name)
    for a, b in itertools.combinations([part for parts in steps for part in parts], 2):
        assert not np.array_equal(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_draws_repeat_from_one_seed_and_replica_0_draws_as_one_device(name):
    first, again = (drawn_by(make_strategy(2), name) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    alone = drawn_by(tf.distribute.get_strategy(), name)
    np.testing.assert_array_equal([parts[0] for parts in first], [p[0] for p in alone])


@pytest.mark.parametrize("name", LAYERS)
def test_identical_draws_when_asked(name):
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], draws_per_replica=False)
    for a, b in drawn_by(strategy, name):
        np.testing.assert_array_equal(a, b)


def with_dropout():
    hidden, logits = dense_model().layers
    dropout = keras.layers.Dropout(0.4, seed=7)
    return keras.Sequential([keras.Input((12,)), hidden, dropout, logits])


def compiled(strategy):
    with strategy.scope():
        model = with_dropout()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, 0.9), loss, jit_compile=False)
    return model


def tensorflow_draws(strategy, in_graph, place):
    """What each replica draws by tf.random: plainly, in a branch, in a function."""
    tf.random.set_seed(3)
    one = tf.Variable(1)

    def draw():
        return tf.random.normal([])

    def replica_step():
        if place == "branch":
            return tf.cond(one > 0, draw, lambda: 0.0)
        return tf.function(draw)() if place == "function" else draw()

    run = tf.function(strategy.run) if in_graph else strategy.run
    return [
        [float(part) for part in strategy.experimental_local_results(run(replica_step))]
        for _ in range(2)
    ]


@pytest.mark.parametrize("place", ["step", "branch", "function"])
@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
def test_tensorflow_draws_apart_too(in_graph, place):
    """In a graph replica 0 begins with what one device draws."""
    steps = tensorflow_draws(make_strategy(3), in_graph, place)
    assert len({draw for step in steps for draw in step}) == 6
    if in_graph:
        alone = tensorflow_draws(tf.distribute.get_strategy(), in_graph, place)
        assert steps[0][0] == alone[0][0]
    assert tensorflow_draws(make_strategy(3), in_graph, place) == steps


def test_a_function_that_is_given_draws_on_as_on_one_device():
    def draws(strategy):
        """Two draws, by replica."""
        tf.random.set_seed(3)
        function = tf.function(lambda: tf.random.normal([]))
        steps = [strategy.run(function) for _ in range(2)]
        parts = map(strategy.experimental_local_results, steps)
        return [tuple(map(float, drawn)) for drawn in zip(*parts, strict=True)]

    [alone] = draws(tf.distribute.get_strategy())
    first, second = draws(make_strategy(2))
    assert first == alone
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
def test_the_seed_of_tensorflow_stays(in_graph):
    strategy = make_strategy(2)

    def seed_after():
        strategy.run(lambda: tf.random.normal([]))
        if in_graph:
            return tf.compat.v1.get_default_graph().seed
        return tf.function(lambda: tf.compat.v1.get_default_graph().seed)()

    tf.random.set_seed(5)
    assert (tf.function(seed_after) if in_graph else seed_after)() == 5


def test_training_resumed_from_a_file_repeats(tmp_path):
    """Keras' files do not hold the states: a resumed run starts from the seed again."""
    x, y = classification_data(32)
    fit = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "verbose": 0}
    half = compiled(make_strategy(2))
    half.fit(**fit, epochs=2)
    half.save(tmp_path / "half.keras")

    def resumed():
        keras.utils.clear_session()
        with make_strategy(2).scope():
            model = keras.models.load_model(tmp_path / "half.keras")
        model.fit(**fit, epochs=2)
        return model.get_weights()

    for a, b in zip(resumed(), resumed(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_stored_seed_states_stay_equal():
    model = compiled(make_strategy(4))
    x, y = classification_data(32)
    model.fit(x, y, batch_size=16, verbose=0)
    (state,) = [v for v in model.variables if "seed_generator_state" in v.path]
    copies = [copy.numpy().tolist() for copy in state.value.values]
    assert copies == [copies[0]] * 4
    assert copies[0] != [7, 0]
