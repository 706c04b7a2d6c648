"""`tfdp.remat(model, "segments")`: runs of layers of a functional model as blocks."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tests.support.slow_rows import made
from tfdp.errors import ConfigurationError
from tfdp.layers.segments import cuts_of

ROWS = 24


def residual_network():
    """Two branches, a skip over them, statistics, noise, and two outputs."""
    layers = keras.layers
    image = keras.Input((8, 8, 3), name="image")
    number = keras.Input((2,), name="number")
    x = layers.Conv2D(6, 3, padding="same")(image)
    for turn in range(3):
        left = layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same")(x))
        right = layers.Dropout(0.2, seed=turn)(layers.Conv2D(6, 1)(x))
        x = layers.ReLU()(x + left * keras.ops.sigmoid(right))
    pooled = layers.GlobalAveragePooling2D()(layers.ZeroPadding2D()(x))
    joined = layers.Concatenate()([pooled, layers.Dense(3, "tanh")(number)])
    shared = layers.Dense(9, "gelu")
    joined = shared(shared(joined))
    outputs = {"a": layers.Dense(4)(joined), "b": layers.Dense(1)(pooled)}
    return keras.Model({"image": image, "number": number}, outputs)


def encoder():
    """Masks from words to the loss, through a recurrent layer and attention."""
    layers = keras.layers
    words = keras.Input((9,), dtype="int32")
    x = embedded = layers.Embedding(11, 6, mask_zero=True)(words)
    for _ in range(2):
        x = layers.Dense(6, "relu")(x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1, seed=3)(embedded))
        x = x + layers.MultiHeadAttention(2, 3)(x, x)
    x = layers.LSTM(5)(x)
    return keras.Model(words, layers.Dense(4)(x))


def nested():
    backbone = keras.Sequential(
        [keras.Input((8, 8, 3)), *(keras.layers.Conv2D(5, 3) for _ in range(3))]
    )
    image = keras.Input((8, 8, 3))
    flat = keras.layers.Flatten()(backbone(image))
    return keras.Model(image, keras.layers.Dense(4)(flat))


def data_of(model):
    random = np.random.default_rng(5)
    images = random.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    classes = random.integers(0, 4, ROWS)
    if isinstance(model.output, dict):
        numbers = random.normal(size=(ROWS, 2)).astype("float32")
        targets = {"a": classes, "b": random.normal(size=(ROWS, 1)).astype("float32")}
        return {"image": images, "number": numbers}, targets
    if len(model.input_shape) == 2:
        return random.integers(0, 11, (ROWS, 9)), classes
    return images, classes


def trained(build, change, replicas=1, shard="none", **options):
    with make_strategy(replicas, shard).scope():
        keras.utils.set_random_seed(3)
        model = build()
        change(model)
        sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss = {"a": sparse, "b": "mse"} if isinstance(model.output, dict) else sparse
        model.compile(
            keras.optimizers.SGD(0.05), loss, **{"jit_compile": False, **options}
        )
    x, y = data_of(model)
    # Rows left over: the last batch is a third as large.
    model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    return model, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize(
    "build, replicas, shard, options",
    [
        (residual_network, 2, "none", {}),
        (encoder, 2, "gradients", {}),
        (nested, 3, "none", {}),
        *made(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (residual_network, 1, "none", {"run_eagerly": True}),
                (residual_network, 2, "parameters", {}),
                (encoder, 1, "none", {}),
                (nested, 2, "none", {"jit_compile": True}),
            )
        ),
    ],
)
def test_trains_as_without(build, replicas, shard, options):
    once = trained(build, lambda model: None, replicas, shard, **options)
    twice = trained(
        build, lambda model: tfdp.remat(model, "segments"), replicas, shard, **options
    )
    for one, other in zip(once[0].weights, twice[0].weights, strict=True):
        # Six updates of 0.05, gradients below 10 after some 600 terms, which the graph
        # optimizer may add in another order: 6 * 0.05 * 10 * 600 u = 1e-4. Another
        # mask of a dropout, or moving statistics twice, are 1e-2 off.
        np.testing.assert_allclose(
            one.numpy(), other.numpy(), rtol=0, atol=1e-4, err_msg=one.path
        )
    for one, other in zip(
        *(keras.tree.flatten(found[1:]) for found in (once, twice)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_weights_that_operations_are_given_have_their_gradients():
    """A table that the output shares, and complex numbers on the way."""
    found = []
    words = np.random.default_rng(2).integers(0, 11, (4, 6))
    for policy in (None, "segments", "each"):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((6,), dtype="int32")
        table = keras.layers.Embedding(11, 8)
        x = table(inputs)
        for _ in range(4):
            x = keras.layers.Dense(8, "tanh")(x)
        turned = keras.ops.cast(x, "complex64") * (0.5 + 1j)
        x = x + keras.ops.real(turned * turned)
        logits = keras.ops.einsum("bsd,vd->bsv", x, table.embeddings)
        model = keras.Model(inputs, logits)
        if policy is not None:
            tfdp.remat(model, policy)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(words, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        found.append([tf.convert_to_tensor(gradient) for gradient in gradients])
    for one, *others in zip(*found, strict=True):
        # The same operations; a use that is left out is 1e-1 of a gradient.
        for other in others:
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["each", "segments"])
def test_frozen_weights_have_no_gradients(policy):
    model = keras.Sequential(
        [keras.Input((6,)), *(keras.layers.Dense(6, "tanh") for _ in range(6))]
    )
    for layer in model.layers[:3]:
        layer.trainable = False
    tfdp.remat(model, policy)

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    graph = gradients.get_concrete_function(tf.TensorSpec((4, 6))).graph
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    # A gradient of a weight is a product with the layer's input, transposed.
    of_weights = [op for op in products if op.get_attr("transpose_a")]
    assert len(of_weights) == 3


@pytest.mark.parametrize("policy", ["each", "segments"])
@pytest.mark.parametrize("replicas, shard", [(2, "none"), (2, "parameters")])
def test_weights_of_other_layers_have_their_gradients(policy, replicas, shard):
    def build():
        inputs = keras.Input((8, 8, 3))
        first = keras.layers.Dense(3, name="first")
        x = keras.layers.Flatten()(first(inputs))
        for _ in range(3):
            x = keras.layers.Dense(3, "tanh")(x)
        x = keras.layers.Lambda(lambda t: keras.ops.matmul(t, first.kernel))(x)
        return keras.Model(inputs, keras.layers.Dense(4)(x))

    once = trained(build, lambda model: None, replicas, shard)
    twice = trained(build, lambda model: tfdp.remat(model, policy), replicas, shard)
    for one, other in zip(once[0].weights, twice[0].weights, strict=True):
        # As above; without one of its two uses `first` is 1e-2 off.
        np.testing.assert_allclose(
            one.numpy(), other.numpy(), rtol=0, atol=1e-4, err_msg=one.path
        )


def test_only_what_later_segments_read_is_kept():
    """Of 30 layers no more than a third are kept for the backward pass."""
    kept = {}
    for policy in ("each", "segments"):
        layers = [keras.layers.Dense(16, "tanh") for _ in range(30)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        tfdp.remat(model, policy)

        @tf.function
        def gradients(x, model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x))
            return tape.gradient(loss, model.trainable_variables)

        graph = gradients.get_concrete_function(tf.TensorSpec((4, 16))).graph
        first = [op for op in graph.get_operations() if op.type == "Tanh"][:30]
        outputs = {id(op.outputs[0]) for op in first}
        # Who reads them, but for the layer behind: what waits for the backward pass.
        late = [
            op
            for op in graph.get_operations()
            if op.type == "Identity"
            and op.control_inputs
            and any(_made_by(tensor) in outputs for tensor in op.inputs)
        ]
        kept[policy] = len({id(op.inputs[0]) for op in late})
    assert kept["each"] >= 29 and kept["segments"] <= 10


def _made_by(tensor):
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return id(tensor)


def held(costs, kept, cuts):
    """The definition, once more."""
    bounds = [0, *(cut + 1 for cut in cuts)]
    runs = [costs[a:b] for a, b in itertools.pairwise(bounds)]
    most = max((sum(run) for run in runs if len(run) > 1), default=0)
    return most + sum(kept[cut] for cut in cuts)


def test_cuts_are_near_the_best():
    random = np.random.default_rng(2)
    for _ in range(40):
        number = int(random.integers(1, 9))
        costs = random.integers(1, 30, number).tolist()
        kept = [*random.integers(0, 20, number - 1).tolist(), 0]
        found = cuts_of(costs, kept)
        assert found[-1] == number - 1 and found == sorted(set(found))
        every = [
            [*chosen, number - 1]
            for size in range(number)
            for chosen in itertools.combinations(range(number - 1), size)
        ]
        best = min(held(costs, kept, cuts) for cuts in every)
        # The limits that are tried are a fifth apart.
        assert held(costs, kept, found) <= 1.25 * best


def test_a_model_is_saved_cloned_and_cut_again(tmp_path):
    model = tfdp.remat(residual_network(), "segments")
    tfdp.remat(model, "segments")
    x, _ = data_of(model)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    for other in (again, clone):
        for name, value in other.predict(x, verbose=0).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)
    assert model.layers[2].output is not None


class Own(keras.Model):
    def call(self, x):
        return x


def test_a_model_without_layers_has_nothing_to_cut():
    inputs = keras.Input((3,))
    model = tfdp.remat(keras.Model(inputs, inputs), "segments")
    assert model(np.ones((2, 3))).shape == (2, 3)


@pytest.mark.parametrize(
    "make",
    [Own, lambda: keras.Sequential([keras.layers.Dense(1)]), keras.layers.ReLU],
)
def test_what_has_no_graph_is_refused(make):
    with pytest.raises(ConfigurationError, match="policy='segments' cuts the graph"):
        tfdp.remat(make(), "segments")
