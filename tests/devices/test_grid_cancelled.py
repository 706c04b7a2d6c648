"""Exchanges cancel where all between treats the features entry by entry, only there."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.grids import HIDDEN, grid, rows_of, trained
from tests.support.lint_programs import strategy_of
from tests.support.parity import largest_distance, rounding_bound
from tfdp.grid.cancelled import rows_behind
from tfdp.grid.kinds import layers_in_parts
from tfdp.grid.updates import StepInParts, layout_of

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

layers, ops = keras.layers, keras.ops
RULES = {
    ".*(up|gate)/kernel": (None, "model"),
    ".*gate/bias": ("model",),
    ".*down/kernel": ("model", None),
}


class Call(layers.Layer):
    """A layer of a program: what it does is known by its ops only."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, *inputs):
        return self.function(*inputs)


def between(*steps, activation=None, outputs=False, loss=None):
    """A model with `steps` between a column and a row."""

    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((12,))
        up = layers.Dense(HIDDEN, activation, name="up", activity_regularizer=loss)
        hidden = made = up(inputs)
        for step in steps:
            hidden = step(hidden, inputs)
        down = layers.Dense(5, name="down")(hidden)
        if outputs:
            down = layers.Add()([down, layers.Dense(5, name="other")(made)])
        return keras.Model(inputs, down)

    return build


def then(layer):
    return lambda hidden, inputs: layer()(hidden)


def calls(function):
    return lambda hidden, inputs: Call(function)(hidden)


def gated(hidden, inputs):
    gate = layers.Dense(HIDDEN, "silu", name="gate")(inputs)
    return layers.Multiply()([hidden, gate])


def of_own_rows(hidden, inputs):
    by_row = Call(lambda h, x: h * ops.mean(x, axis=1, keepdims=True))
    return by_row(hidden, inputs)


def of_whole_features(hidden, inputs):
    return layers.Add()([hidden, layers.Dense(HIDDEN, name="other")(inputs)])


class OfState(layers.Layer):
    """Multiplies by a number that it has stored of a replica's own rows."""

    def build(self, shape):
        self.state = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, hidden, inputs):
        self.state.assign(ops.mean(ops.abs(inputs)))
        return hidden * self.state


class OneDraw(layers.Layer):
    """Multiplies all entries by one random number."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)

    def call(self, hidden):
        return hidden * keras.random.uniform((), seed=self.seed)


@tf.custom_gradient
def clipped_by_row(hidden):
    """The rows themselves; their gradients are clipped by their norms."""
    return tf.identity(hidden), lambda up: tf.clip_by_norm(up, 0.02, axes=[-1])


def gated_by_one_row(hidden, inputs):
    gate = layers.Dense(HIDDEN, "sigmoid", name="gate")
    row = np.ones((1, 12), "float32")
    return Call(lambda h: h * gate(row))(hidden)


def gated_by_other_rows(hidden, inputs):
    gate = layers.Dense(HIDDEN, "sigmoid", name="gate")
    return layers.Multiply()([hidden, gate(Call(lambda x: x[::-1])(inputs))])


CANCELS = {
    "nothing": between(),
    "gelu": between(activation="gelu"),
    "silu": between(activation="silu"),
    "leaky": between(then(lambda: layers.LeakyReLU(0.1))),
    "dropout": between(then(lambda: layers.Dropout(0.5)), activation="relu"),
    "gated": between(gated),
    "a number": between(calls(lambda h: ops.maximum(h * 2.0, 0.1))),
    "chosen by entry": between(calls(lambda h: ops.where(h > 0, h, 0.1 * h))),
}
KEEPS = {
    "softmax": between(activation="softmax"),
    "softmax layer": between(then(layers.Softmax)),
    "layer normalization": between(then(layers.LayerNormalization)),
    "cumsum": between(calls(lambda h: ops.cumsum(h, axis=-1))),
    "sort": between(calls(lambda h: ops.sort(h, axis=-1))),
    "argmax": between(
        calls(lambda h: h + ops.cast(ops.argmax(h, -1), "float32")[:, None])
    ),
    "maximum": between(calls(lambda h: h - ops.max(h, axis=-1, keepdims=True))),
    "flipped": between(calls(lambda h: ops.flip(h, axis=-1))),
    "rolled": between(calls(lambda h: ops.roll(h, 1, axis=-1))),
    "reshaped": between(
        calls(lambda h: ops.reshape(ops.reshape(h, (-1, 4, 4)), (-1, 16)))
    ),
    "halves": between(calls(lambda h: ops.concatenate([h[:, 8:], h[:, :8]], axis=-1))),
    "a weight per feature": between(then(layers.PReLU)),
    "a constant per feature": between(
        calls(lambda h: h * ops.arange(16, dtype="float32"))
    ),
    "mean of the batch": between(
        calls(lambda h: h - ops.mean(h, axis=0, keepdims=True))
    ),
    "number of rows": between(
        calls(lambda h: h / ops.cast(ops.shape(h)[0], "float32"))
    ),
    "noise of one entry": between(
        calls(lambda h: h * ops.mean(ops.zeros_like(h) + 1.0))
    ),
    "a number per row": between(of_own_rows),
    "other features": between(of_whole_features),
    "read by another layer": between(outputs=True),
    "a penalty": between(loss="l2"),
    "number of features": between(calls(lambda h: h * h.shape[-1] ** -0.5)),
    "a gradient by rows": between(calls(clipped_by_row)),
    "one draw": between(then(OneDraw)),
    "one draw for each row": between(
        then(lambda: layers.Dropout(0.5, noise_shape=(None, 1)))
    ),
    "one draw for each feature": between(
        then(lambda: layers.Dropout(0.5, noise_shape=(1, None)))
    ),
    "a state": between(lambda hidden, inputs: OfState()(hidden, inputs)),
    "one row of another column": between(gated_by_one_row),
    "other rows of another column": between(gated_by_other_rows),
}


def behind_in(build, may_draw=True):
    """The names of layers, by the column that keeps its parts for them."""
    strategy = grid((2, 2), RULES)
    with strategy.scope():
        model = build()
    found = layers_in_parts(model._flatten_layers(), layout_of)
    assert {one.layer.name for one in found} >= {"up", "down"}
    spec = tf.TensorSpec((None, 12), tf.float32)
    behind = rows_behind(model, found, spec, True, may_draw)
    names = {id(one.layer): one.layer.name for one in found}
    return {names[key]: [row.name for row in rows] for key, rows in behind.items()}


@pytest.mark.parametrize("name", CANCELS)
def test_what_treats_entries_one_by_one_cancels(name):
    columns = ["up", "gate"] if name == "gated" else ["up"]
    assert behind_in(CANCELS[name]) == dict.fromkeys(columns, ["down"])


@pytest.mark.parametrize("name", KEEPS)
def test_what_looks_at_several_entries_does_not(name):
    assert behind_in(KEEPS[name]) == {}


def test_a_draw_that_all_replicas_share_does_not():
    """All parts of the features would get the same mask."""
    assert behind_in(CANCELS["dropout"], may_draw=False) == {}


def test_a_layer_that_is_called_twice_does_not():
    def build():
        inputs = keras.Input((12,))
        up, down = layers.Dense(HIDDEN, name="up"), layers.Dense(12, name="down")
        return keras.Model(inputs, down(up(down(up(inputs)))))

    assert behind_in(build) == {}


def test_one_of_two_rows_that_cannot_keeps_the_column_and_the_other():
    def build():
        inputs = keras.Input((12,))
        hidden = layers.Dense(HIDDEN, name="up")(inputs)
        gate = layers.Dense(HIDDEN, name="gate")(inputs)
        down = layers.Dense(5, name="down")(layers.Multiply()([hidden, gate]))
        return keras.Model(inputs, [down, layers.Softmax()(gate)])

    assert behind_in(build) == {}


class Block(layers.Layer):
    """A column and a row, which the first call builds."""

    def __init__(self, keeps=False):
        super().__init__(name="block")
        self.up = layers.Dense(HIDDEN, "gelu", name="up")
        self.down = layers.Dense(5, name="down")
        self.keeps = keeps

    def call(self, inputs):
        hidden = self.up(inputs)
        if self.keeps:
            self.hidden = hidden
        return self.down(hidden)


class WithOwnLoss(keras.Model):
    """A model whose loss computes features once more."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        loss = super().compute_loss(x, y, y_pred, *args, **kwargs)
        return loss + 0.1 * ops.mean(ops.square(self.get_layer("block").up(x)))


def of_block(keeps=False, kind=keras.Model):
    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((12,))
        return kind(inputs, Block(keeps)(inputs))

    return build


@pytest.mark.parametrize(
    "build, expected",
    [
        (of_block(), {"up": ["down"]}),
        (of_block(keeps=True), {}),
        (of_block(kind=WithOwnLoss), {}),
    ],
    ids=["built by its first call", "kept", "own loss"],
)
def test_what_a_loss_could_read_does_not(build, expected):
    assert behind_in(build) == expected


def test_layers_that_a_first_call_builds_compute_in_parts():
    strategy = grid((2, 2), RULES)
    with strategy.scope():
        model = of_block()()
        model.compile("sgd", LOSS, jit_compile=False)
    plans = []
    begin = strategy.extended.shards.begin

    def noting(call):
        begin(call)
        plans.append(call.step.of(StepInParts))

    strategy.extended.shards.begin = noting
    model.train_on_batch(*rows_of(16))
    assert {one.layer.name for one in plans[0].found} == {"up", "down"}


def squares_of_features(model):
    """A loss that calls a layer of the model again."""
    up = model.get_layer("block").up
    x, _ = rows_of(16)
    of_rows = keras.losses.sparse_categorical_crossentropy
    return lambda y, outputs: (
        of_rows(y, outputs, from_logits=True) + ops.mean(ops.square(up(x)))
    )


def test_a_column_that_a_loss_calls_again_is_complete():
    """The region of the model's own call has ended: whole features come out."""
    found = []
    for rules in (None, RULES):
        strategy = strategy_of(1) if rules is None else grid((2, 2), rules)
        with strategy.scope():
            model = of_block()()
            model.compile("sgd", squares_of_features(model), jit_compile=False)
        model.train_on_batch(*rows_of(16))
        found.append(model.get_weights())
    # One step of 16 rows with gradients below 8, times 0.01.
    assert largest_distance(*found) < rounding_bound(model, 1, 16, 8.0, 0.01)


def trained_apart(change=lambda model: None):
    """The weights after steps on arrays of one size, with and without parts.

    A number of a replica's own rows is not one device's: both have four replicas.
    """
    rules = {rule: axes for rule, axes in RULES.items() if "gate" not in rule}
    rules[".*up/kernel"] = (None, "model")
    x, y = rows_of(16)
    found = []
    for cut in ({}, rules):
        with grid((2, 2), cut).scope():
            model = KEEPS["number of rows"]() if change is None else CANCELS["gelu"]()
            model.compile("sgd", LOSS, jit_compile=False)
        model.train_on_batch(x, y)
        if change is not None:
            change(model)
            model.compile("sgd", LOSS, jit_compile=False)
        model.train_on_batch(x, y)
        found.append(model)
    return found


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_a_static_number_of_rows_is_no_constant():
    """A group has more rows than a replica: a proof for 4 rows would be wrong."""
    whole, cut = trained_apart(None)
    # Two steps of 16 rows with gradients below 8, times 0.01.
    bound = rounding_bound(whole, 2, 16, 8.0, 0.01)
    assert largest_distance(whole.get_weights(), cut.get_weights()) < bound


def test_a_model_is_proved_again_when_it_is_compiled_again():
    def change(model):
        model.get_layer("up").activation = keras.activations.softmax

    whole, cut = trained_apart(change)
    bound = rounding_bound(whole, 2, 16, 8.0, 0.01)
    assert largest_distance(whole.get_weights(), cut.get_weights()) < bound


@pytest.mark.parametrize("name", ["gelu", "gated", "softmax"])
def test_weights_are_those_of_one_device(name):
    build = {**CANCELS, **KEEPS}[name]
    data = rows_of(26)
    one, losses = trained(None, build, data=data)
    rules = {rule: axes for rule, axes in RULES.items() if rule != ".*gate/bias"}
    strategy = grid((2, 2), RULES if name == "gated" else rules)
    model, own_losses = trained(strategy, build, data=data)
    # Six steps of 12 rows with gradients below 8, times 1 (momentum 0.9).
    bound = rounding_bound(one, 6, 12, 8.0, 1.0)
    assert largest_distance(one.get_weights(), model.get_weights()) < bound
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
