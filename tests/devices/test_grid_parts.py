"""Layers that compute with parts of their weights are as exact as whole ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.grids import (
    HEADS,
    HIDDEN,
    VOCABULARY,
    WIDTH,
    WORDS,
    grid,
    trained,
)
from tests.support.parity import UNIT_ROUND_OFF, largest_distance, rounding_bound
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.traffic import TrafficMeter
from tfdp.grid.kinds import kinds_in
from tfdp.grid.updates import layout_of as block_layout

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

layers, ops = keras.layers, keras.ops


class DenseGradients(keras.Model):
    """Gradients of tables are added up first, as under `layout=` and on JAX."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        return {metric.name: metric.result() for metric in self.metrics}


def block(model=keras.Model, is_grouped=False):
    """A transformer's block over masked words; grouped: two heads for four queries."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WORDS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="words", mask_zero=True)(inputs)
    if is_grouped:
        attention = layers.GroupQueryAttention(2, 4, 2, name="attention")
    else:
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")
    x = layers.Add()([x, attention(x, x, use_causal_mask=True)])
    x = layers.LayerNormalization(name="norm")(x)
    hidden = layers.Dense(HIDDEN, "gelu", name="up")(x)
    x = layers.Add()([x, layers.Dense(WIDTH, name="down")(hidden)])
    return model(inputs, layers.Dense(VOCABULARY, name="head")(x))


BLOCK_RULES = {
    "words/embeddings": ("model", None),
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/(query|key|value)/bias": ("model",),
    "attention/attention_output/kernel": ("model", None, None),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "head/kernel": (None, "model"),
}
# The axis of data cuts them as well: gathered along it, then computed in parts.
BOTH = {**BLOCK_RULES, "up/kernel": ("data", "model"), "down/kernel": ("model", "data")}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "global": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "LAMB": lambda: tfdp.optimizers.LAMB(0.01),
}


def sentences(rows=27, seed=1):
    """Words, of which some are padding: losses are divided by the global count."""
    drawn = np.random.default_rng(seed)
    x = drawn.integers(1, VOCABULARY, (rows, WORDS)).astype("int32")
    x[:, 1:][drawn.random((rows, WORDS - 1)) < 0.3] = 0
    return x, drawn.integers(0, VOCABULARY, (rows, WORDS)).astype("int32")


def bound_of(model, name):
    """Two orders of summation differ so much in the weights, by `rounding_bound`.

    Six steps of 12 rows of 6 words. The gradient of a word's mean loss is below 2
    (activations below 2 after a normalization, weights below 1); SGD takes it times 1
    (momentum 0.9), Adam's step changes with it by at most its rate / epsilon, LAMB's by
    the norm of a weight (below 6) over that of its gradient (above 0.01), times 0.01.
    """
    rate = {"momentum": 1.0, "global": 10.0, "LAMB": 6.0}[name]
    return rounding_bound(model, 6, 72, 2.0, rate)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def on_one_device(request):
    model, losses = trained(
        None, lambda: block(DenseGradients), OPTIMIZERS[request.param], sentences()
    )
    x, y = sentences(7, seed=3)
    seen = model.predict(x, batch_size=5, verbose=0)
    return request.param, model, losses, seen, model.evaluate(x, y, 5, verbose=0)


@pytest.mark.parametrize(
    "shape, rules",
    [((2, 2), BLOCK_RULES), ((2, 2), BOTH), ((1, 4), BLOCK_RULES), ((4, 1), BOTH)],
    ids=["2x2", "both_axes", "1x4", "4x1"],
)
def test_a_transformer_is_that_of_one_device(on_one_device, shape, rules):
    name, one, losses, seen, evaluated = on_one_device
    if name != "global" and shape != (2, 2):
        pytest.skip("other meshes train with one optimizer")
    model, own_losses = trained(
        grid(shape, rules), block, OPTIMIZERS[name], sentences()
    )
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, name)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    x, y = sentences(7, seed=3)
    own_seen = model.predict(x, batch_size=5, verbose=0)
    assert own_seen.shape == seen.shape
    # Eight sums of at most 32 terms, each below 4, with weights that differ by so much.
    np.testing.assert_allclose(own_seen, seen, atol=64 * distance + 2**10 * 2**-24)
    own_evaluated = model.evaluate(x, y, 5, verbose=0)
    np.testing.assert_allclose(own_evaluated, evaluated, rtol=1e-5)


@pytest.fixture(scope="module")
def grouped_on_one_device():
    return trained(None, lambda: block(DenseGradients, True), ADAMW, sentences(25))


ADAMW = lambda: keras.optimizers.AdamW(  # noqa: E731
    0.01, epsilon=1e-3, weight_decay=0.01, global_clipnorm=0.1
)


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=["2x2", "1x4", "4x1"])
def test_grouped_heads_are_those_of_one_device(grouped_on_one_device, shape):
    """The two heads of keys and values cannot be cut into four: they stay whole, while
    queries are cut. The last batch is one row."""
    one, losses = grouped_on_one_device
    strategy = grid(shape, BLOCK_RULES)
    model, own_losses = trained(
        strategy, lambda: block(is_grouped=True), ADAMW, sentences(25)
    )
    key = next(w for w in model.weights if w.path == "attention/key/kernel")
    assert hasattr(key.value, "layout") == (shape == (2, 2))
    # Adam's steps, with a decay that is the same on both.
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, "global")
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)


def layer_alone(layer, rule, axes, inputs, shape=(2, 2)):
    """A layer's outputs and gradients on a mesh, of rows that replicas have 3, 1, 0
    and 2 of, and what it gives for all of them on one device."""
    x = np.asarray(inputs)
    one = make(layer)
    one.build(x.shape)
    weights = [np.asarray(w) for w in one.get_weights()]
    scale = np.random.default_rng(5).normal(size=one(x).shape).astype("float32")

    def step(made, rows, factor):
        rows = tf.convert_to_tensor(rows)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            outputs = made(rows)
            loss = tf.reduce_sum(outputs * factor)
        wanted = list(made.trainable_variables)
        if rows.dtype.is_floating:
            wanted = [rows, *wanted]
        return outputs, tape.gradient(loss, wanted)

    outputs, gradients = step(one, x, scale)
    strategy = grid(shape, {rule: axes})
    with strategy.scope():
        made = make(layer)
        made.build(x.shape)
        made.set_weights(weights)
    return strategy, made, step, (x, scale), (outputs, gradients)


def make(layer):
    kind, config = layer
    return kind.from_config({**config, "name": "layer"})


ALONE = {
    "column": ((layers.Dense, {"units": 8, "activation": "softmax"}), (None, "model")),
    "row": ((layers.Dense, {"units": 3, "activation": "tanh"}), ("model", None)),
    "column of three": ((layers.Dense, {"units": 8}), (None, "model")),
    "heads": (
        (
            layers.EinsumDense,
            {"equation": "abc,cde->abde", "output_shape": (None, 4, 3)}
            | {"bias_axes": "de"},
        ),
        (None, "model", None),
    ),
    "heads back": (
        (
            layers.EinsumDense,
            {"equation": "abcd,cde->abe", "output_shape": (None, 5)}
            | {"bias_axes": "e"},
        ),
        ("model", None, None),
    ),
}
SHAPES = {"column of three": (6, 5, 4), "heads": (6, 5, 4), "heads back": (6, 5, 4, 3)}


@pytest.mark.parametrize("name", ALONE)
def test_a_layer_alone_has_whole_outputs_and_gradients(name):
    layer, axes = ALONE[name]
    drawn = np.random.default_rng(4).normal(size=SHAPES.get(name, (6, 4)))
    strategy, made, step, (x, scale), (outputs, gradients) = layer_alone(
        layer, "layer/kernel", axes, drawn.astype("float32")
    )
    counts = [3, 1, 0, 2]
    starts = np.cumsum([0, *counts])

    def part_of(value):
        def part(context):
            rank = context.replica_id_in_sync_group
            return tf.constant(value[starts[rank] : starts[rank + 1]])

        return strategy.experimental_distribute_values_from_function(part)

    @tf.function
    def run(rows, factor):
        return strategy.run(lambda *given: step(made, *given), (rows, factor))

    found, (of_rows, *of_weights) = run(part_of(x), part_of(scale))
    found = np.concatenate(
        [one.numpy() for one in found.values][:2] + [found.values[3]]
    )
    # Sums of at most 20 terms below 8, twice.
    np.testing.assert_allclose(found, outputs, atol=2 * 20 * 8 * UNIT_ROUND_OFF)
    of_rows = np.concatenate([of_rows.values[r].numpy() for r in (0, 1, 3)])
    np.testing.assert_allclose(of_rows, gradients[0], atol=1e-5)
    kernel = of_weights[0]
    layout = made.kernel.value.layout
    for rank, part in enumerate(kernel.values):
        block = layout.begin(layout.groups.place_of(rank))
        cut = tuple(slice(a, a + n) for a, n in zip(block, part.shape, strict=True))
        # A sum over 6 rows (of 5), of terms below 20.
        np.testing.assert_allclose(part, gradients[1][cut], atol=1e-4)


def features_block():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WORDS, WIDTH))
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")
    x = layers.Add()([inputs, attention(inputs, inputs, use_causal_mask=True)])
    x = layers.LayerNormalization(name="norm")(x)
    hidden = layers.Dense(HIDDEN, "gelu", name="up")(x)
    x = layers.Add()([x, layers.Dense(WIDTH, name="down")(hidden)])
    return keras.Model(inputs, x)


def test_a_block_has_two_gathers_and_two_sums_in_each_direction(monkeypatch):
    swaps = []
    swap = InProcess.swap

    def counted(self, sent, likes, rank, whole=()):
        swaps.append(rank)
        return swap(self, sent, likes, rank, whole)

    rules = {k: v for k, v in BLOCK_RULES.items() if k[0] not in "wh"}  # words, head
    with grid((1, 2), rules).scope():
        model = features_block()
        model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(2).normal(size=(6, WORDS, WIDTH)).astype("float32")
    monkeypatch.setattr(InProcess, "swap", counted)
    model.train_on_batch(x, x)
    # The first weights get a gradient, and the model's inputs none: the gather of the
    # first layer has no backward exchange.
    assert swaps.count(0) == swaps.count(1) == 4 + 3


def test_bytes_that_move_are_those_of_the_formula():
    strategy = grid((1, 2), {"layer/kernel": (None, "model")})
    with strategy.scope():
        layer = layers.Dense(8, name="layer")
        layer.build((None, 4))
    rows = tf.constant(np.ones((6, 4), "float32"))
    meter = TrafficMeter()
    strategy.extended.reducer.transport.traffic.meters.add(meter)

    def value(context):
        return rows[: 4 if context.replica_id_in_sync_group else 2]

    @tf.function
    def run(given):
        return strategy.run(layer, (given,))

    run(strategy.experimental_distribute_values_from_function(value))
    # Each sends its 2 and 4 rows of 4 inputs, and the other's with 4 of 8 outputs.
    assert meter.sent_bytes == 4 * (2 * 4 + 4 * 4) + 4 * (4 * 4 + 2 * 4)


@pytest.mark.parametrize("kind", ["heads", "groups", "cross"])
@pytest.mark.parametrize("rules", ["with biases", "kernels only"])
def test_attentions_compute_by_heads(kind, rules):
    """Self-attention with a mask and dropout at 0, grouped queries, and two inputs."""

    def build(model=keras.Model):
        keras.utils.set_random_seed(0)
        words = keras.Input((WORDS,), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH, name="words", mask_zero=True)(words)
        if kind == "groups":
            made = layers.GroupQueryAttention(2, 4, 2, name="attention")
        else:
            made = layers.MultiHeadAttention(4, 2, name="attention")
        other = layers.Dense(WIDTH, name="other")(x) if kind == "cross" else x
        x = layers.Add()([x, made(x, other, use_causal_mask=kind != "cross")])
        return model(words, layers.Dense(VOCABULARY, name="head")(x))

    cut = {
        key: axes for key, axes in BLOCK_RULES.items() if key.startswith("attention")
    }
    if rules == "kernels only":
        cut = {key: axes for key, axes in cut.items() if key.endswith("kernel")}
    one, losses = trained(None, lambda: build(DenseGradients), data=sentences())
    model, own_losses = trained(grid((2, 2), cut), build, data=sentences())
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, "momentum")
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)


SHAPES_OF_MASKS = {
    "of rows": lambda x: ops.cast(x[:, None, :] > 0, "bool"),
    "of rows and places": lambda x: (x[:, None, :] > 3) | (x[:, :, None] > 9),
    "for all rows": lambda x: ops.tril(ops.ones((1, WORDS, WORDS))) > 0,
    "for each head": lambda x: ops.cast(x[:, None, None, :] > 0, "bool"),
}


@pytest.mark.parametrize("name", SHAPES_OF_MASKS)
def test_masks_that_an_attention_is_given(name):
    def build(model=keras.Model):
        keras.utils.set_random_seed(0)
        words = keras.Input((WORDS,), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH, name="words")(words)
        mask = layers.Lambda(SHAPES_OF_MASKS[name])(words)
        made = layers.MultiHeadAttention(4, 2, name="attention")
        x = layers.Add()([x, made(x, x, attention_mask=mask)])
        return model(words, layers.Dense(VOCABULARY, name="head")(x))

    cut = {
        key: axes for key, axes in BLOCK_RULES.items() if key.startswith("attention")
    }
    one, losses = trained(None, lambda: build(DenseGradients), data=sentences(16))
    model, own_losses = trained(grid((2, 2), cut), build, data=sentences(16))
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, "momentum")
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)


def test_a_step_of_ones_own_with_replicas_without_rows():
    """Three rows for four replicas; the step computes its loss itself."""
    rules = {key: axes for key, axes in BLOCK_RULES.items() if "bias" not in key}
    data = sentences(15)
    one, losses = trained(None, lambda: block(DenseGradients), data=data)
    model, own_losses = trained(
        grid((2, 2), rules), lambda: block(DenseGradients), data=data
    )
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, "momentum")
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)


class Normalized(layers.Dense):
    """A layer with the `call` of Keras and a kernel of its own."""

    @property
    def kernel(self):
        kernel = super().kernel
        return kernel / ops.sqrt(1e-3 + ops.sum(ops.square(kernel)))


class AcrossHeads(layers.MultiHeadAttention):
    """An attention whose heads see each other."""

    def _masked_softmax(self, scores, mask=None):
        weights = super()._masked_softmax(scores, mask)
        return weights / (1e-3 + ops.sum(weights, axis=1, keepdims=True))


def adapted():
    layer = layers.Dense(8, name="own")
    call = layer.call
    layer.call = lambda inputs, training=None: call(ops.tanh(inputs))
    return layer


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Normalized(8, name="own"), "Normalized has a kernel of its own"),
        (adapted, "Dense has a call of its own"),
    ],
    ids=["kernel", "call"],
)
def test_a_layer_with_code_of_its_own_gathers(make, words):
    rules = {".*own/kernel": (None, "model")}
    with grid((2, 2), rules).scope():
        model = keras.Sequential([keras.Input((12,)), make()])
    [found] = kinds_in(model.layers, block_layout).values()
    assert found.why == words


def test_an_attention_with_code_of_its_own_does_not_compute_by_heads():
    rules = {
        "own/(query|key|value)/kernel": (None, "model", None),
        "own/attention_output/kernel": ("model", None, None),
    }
    with grid((2, 2), rules).scope():
        words = keras.Input((6, 12))
        model = keras.Model(words, AcrossHeads(4, 3, name="own")(words, words))
    found = kinds_in(model._flatten_layers(), block_layout)
    assert {one.name for one in found.values()} == {"column", "row"}
