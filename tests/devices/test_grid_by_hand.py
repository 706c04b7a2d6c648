"""Numbers of a mesh that one checks by hand: each fault gives another number.

Rows are multiples of ones by `SCALES`, of mean 1, and differ on each replica. Weights
are ones, or an identity, and the loss is a mean of outputs: so gradients are 1, or 1/4.
"""

import collections
import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.grids import blocks_of, grid, layout_of
from tests.support.parity import copies, unequal_copies
from tfdp.exchange.traffic import TrafficMeter

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

layers = keras.layers
MESHES = [(2, 2), (1, 4), (4, 1)]
on_each_mesh = pytest.mark.parametrize("shape", MESHES, ids=["2x2", "1x4", "4x1"])
# One for each replica, and a fifth that leaves them uneven. Sums of the first four, and
# their shares of a quarter, are exact in float32.
SCALES = np.array([0.5, 1.5, 0.25, 1.75, 1.0], "float32")
# Sums of at most 40 terms below 8: two orders differ by at most twice 40 * 2^-24 * 8.
NEAR = 2 * 40 * 8 * 2.0**-24  # 4e-5. The known faults are off by more than 1e-2.

Dense = functools.partial(layers.Dense, kernel_initializer="ones", use_bias=False)


def compiled(shape, rules, build, optimizer=None, loss="mae", **options):
    with grid(shape, rules).scope():
        model = build()
        made = optimizer() if optimizer else keras.optimizers.SGD(1.0)
        metrics = [kind() for kind in options.pop("metrics", [])]
        model.compile(made, loss, metrics=metrics, jit_compile=False, **options)
        made.build(model.trainable_variables)
    # Rules that met no weight would leave nothing to test.
    assert bool(paths_in_parts(model)) == (shape[1] > 1 and bool(rules))
    return model


def paths_in_parts(model):
    return [v.path for v in model.weights if hasattr(v.value, "layout")]


def chain(*made, features=4):
    """A model of layers one after the other; their paths begin with their names."""
    inputs = outputs = keras.Input((features,))
    for layer in made:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def rows_of(features=4, scales=SCALES):
    """Rows, and labels of 0, of any number of outputs."""
    x = np.outer(scales, np.ones(features)).astype("float32")
    return x, np.zeros((len(x), 1), "float32")


def updated(model, x, y):
    """The loss of a step, and by path how much was taken from each weight."""
    before = {v.path: v.numpy() for v in model.trainable_variables}
    loss = model.train_on_batch(x, y)
    return loss, {v.path: before[v.path] - v.numpy() for v in model.trainable_variables}


def check_updates(found, expected):
    for path, value in found.items():
        wanted = expected.get(path, 1.0) if isinstance(expected, dict) else expected
        np.testing.assert_allclose(value, wanted, rtol=0, atol=NEAR, err_msg=path)


# Two layers, of which the first is a column and the second a row.


def two_layers():
    """Its outputs are the sums of inputs, plus 1."""
    return chain(
        Dense(4, kernel_initializer="identity", name="before"),
        Dense(4, kernel_initializer="identity", use_bias=True, name="up"),
        Dense(1, use_bias=True, bias_initializer="ones", name="down"),
    )


TWO_LAYERS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
BIASES = {"own part": {"up/bias": ("model",)}, "whole": {}}


@pytest.mark.parametrize("bias", BIASES)
@on_each_mesh
def test_rows_have_sums_of_all_parts_and_gradients_of_ones(shape, bias):
    """Without a sum of the inputs' gradients they are 1, 0, 0, 0 on the first member;
    with a second sum of the outputs' gradients, 4 on a mesh of 1 x 4."""
    strategy = grid(shape, {**TWO_LAYERS, **BIASES[bias]})
    with strategy.scope():
        model = two_layers()
    x, _ = rows_of()
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(x[context.replica_id_in_sync_group :][:1])
    )

    def step(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            outputs = model(rows)
        return outputs, tape.gradient(outputs, rows)

    run = tf.function(lambda rows: strategy.run(step, (rows,)))
    outputs, gradients = run(given)
    for rank in range(4):
        # The bias counts once: after the sum.
        assert outputs.values[rank].numpy().item() == 4 * SCALES[rank] + 1
        np.testing.assert_array_equal(gradients.values[rank], np.ones((1, 4)))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("rows", [1, 4, 5])
@on_each_mesh
def test_each_weight_has_the_mean_of_rows_as_its_gradient(shape, rows, bias):
    """A mean over the world gives half of it on 2 x 2 to what a mesh cuts; a bias of
    which members use their parts, and weights that they use whole, have a sum each."""
    scales = SCALES if rows > 1 else SCALES[4:]
    model = compiled(shape, {**TWO_LAYERS, **BIASES[bias]}, two_layers)
    loss, found = updated(model, *rows_of(scales=scales[:rows]))
    np.testing.assert_allclose(loss, 4 + 1, rtol=0, atol=NEAR)
    assert len(found) == 5
    check_updates(found, 1.0)


@on_each_mesh
def test_scales_of_a_normalization_have_whole_gradients(shape):
    """Each member of a group would have the gradient of its own features only."""

    def build():
        norm = layers.LayerNormalization(epsilon=0.0, name="norm")
        return chain(norm, Dense(4, name="up"), features=2)

    model = compiled(shape, TWO_LAYERS, build)
    model.get_layer("up").kernel.assign([[2.0] * 4, [1.0] * 4])
    # Normalized rows are 1, -1: outputs 2 - 1, and gradients 2 and 1 times 1, -1.
    x = np.outer(SCALES, [1.0, -1.0]).astype("float32")
    loss, found = updated(model, x, rows_of()[1])
    np.testing.assert_allclose(loss, 1.0, rtol=0, atol=NEAR)
    check_updates(
        found,
        {
            "norm/gamma": [2.0, -1.0],
            "norm/beta": [2.0, 1.0],
            "up/kernel": [[0.25] * 4, [-0.25] * 4],
        },
    )


# Norms, ratios and penalties of whole weights.


def beside():
    """A weight in parts, and one that is whole: each has a gradient of 1/8 times x."""
    inputs = keras.Input((4,))
    outputs = [Dense(4, name=name)(inputs) for name in ("up", "other")]
    return keras.Model(inputs, layers.Concatenate()(outputs))


@on_each_mesh
def test_the_global_norm_counts_each_part_and_each_copy_once(shape):
    """Two gradients of norm 1: 1.41421. NeMo-RL#3788 counted the whole one T times."""
    optimizer = lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0)  # noqa: E731
    model = compiled(shape, TWO_LAYERS, beside, optimizer)
    x, y = rows_of(scales=SCALES[:4])
    _, found = updated(model, 2 * x, y)
    check_updates(found, 0.25 / math.sqrt(2))
    # The gradients are exact, so this holds the bits of the factor on each replica.
    held = [block for v in model.trainable_variables for block in copies(v)]
    assert len({*np.concatenate([block.ravel() for block in held]).tolist()}) == 1


@on_each_mesh
def test_the_norm_of_one_weight_is_that_of_the_whole(shape):
    """A gradient of 16 ones: 1/4 each. Its half has the norm 2.82843: 0.35355."""
    optimizer = lambda: keras.optimizers.SGD(1.0, clipnorm=1.0)  # noqa: E731
    model = compiled(shape, TWO_LAYERS, beside, optimizer)
    x, y = rows_of()
    check_updates(updated(model, 8 * x, y)[1], 0.25)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: tfdp.optimizers.LARS(1.0, momentum=0.0, trust_coefficient=1.0),
        lambda: tfdp.optimizers.LAMB(1.0),
    ],
    ids=["LARS", "LAMB"],
)
@on_each_mesh
def test_a_trust_ratio_is_that_of_whole_norms(shape, optimizer):
    """The square root of 20 over 2; by halves 1 and 3, where parts have own ratios."""
    build = lambda: chain(Dense(4, name="up"), features=1)  # noqa: E731
    model = compiled(shape, TWO_LAYERS, build, optimizer)
    model.get_layer("up").kernel.assign([[1.0, 1.0, 3.0, 3.0]])
    x, y = rows_of(features=1)
    check_updates(updated(model, 4 * x, y)[1], math.sqrt(5))


# Rows of a Hadamard matrix are orthogonal; those of its halves are not.
HADAMARD = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
PENALTIES = {
    "squares": (keras.regularizers.L2(0.01), np.ones((4, 4)), 4.0, 0.16),
    "angles": (
        keras.regularizers.OrthogonalRegularizer(0.01, mode="rows"),
        *(HADAMARD, 1.0, 0.0),
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
@on_each_mesh
def test_a_penalty_is_that_of_the_whole_and_counts_once(shape, name):
    """Squares of a half: 0.08; on each replica: 0.64. Angles of a half: above 1e-3."""
    regularizer, kernel, data_loss, penalty = PENALTIES[name]

    def build():
        return chain(Dense(4, name="up", kernel_regularizer=regularizer))

    model = compiled(shape, TWO_LAYERS, build)
    model.get_layer("up").kernel.assign(kernel)
    x, y = rows_of()
    for loss in (model.evaluate(x, y, verbose=0), model.train_on_batch(x, y)):
        np.testing.assert_allclose(loss, data_loss + penalty, rtol=0, atol=NEAR)
    if name == "squares":
        # 1 - (1/4 + 2 * 0.01)
        left = model.get_layer("up").kernel.numpy()
        np.testing.assert_allclose(left, 0.73, rtol=0, atol=NEAR)


# Rows, tokens and micro-batches.


@on_each_mesh
def test_tokens_weigh_alike_on_replicas_that_have_few(shape):
    """One of 4, and three of 1, 2 and 3: 2.5. The mean of means is 3; and two rows have
    none at all."""

    def build():
        inputs = keras.Input((3, 2))
        return keras.Model(inputs, Dense(4, name="up")(layers.Masking(-1.0)(inputs)))

    x = np.array([[4, -1, -1], [1, 2, 3], [-1, -1, -1], [-1, -1, -1]], "float32")
    model = compiled(shape, TWO_LAYERS, build)
    # Two features each.
    x, y = np.repeat(x[..., None], 2, axis=-1), np.zeros((4, 3, 1), "float32")
    loss, found = updated(model, x, y)
    np.testing.assert_allclose(loss, 2 * 2.5, rtol=0, atol=NEAR)
    check_updates(found, 2.5 / 4)


ACCUMULATIONS = {
    "Keras": lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=4),
    "tfdp": lambda: tfdp.DistributedOptimizer(
        keras.optimizers.SGD(1.0), accumulate_steps=4
    ),
}


@pytest.mark.parametrize("optimizer", ACCUMULATIONS)
@on_each_mesh
def test_an_update_has_the_mean_of_its_micro_batches(shape, optimizer):
    """Gradients 1, 2, 3 and 4: 2.5. Automodel#3530 took the last one only; the sum is
    10. A bias has 1 each time."""
    model = compiled(shape, TWO_LAYERS, two_layers, ACCUMULATIONS[optimizer])
    before = {v.path: v.numpy() for v in model.trainable_variables}
    x, y = rows_of(scales=np.outer([1, 2, 3, 4], SCALES[:4]).ravel())
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    after = {v.path: before[v.path] - v.numpy() for v in model.trainable_variables}
    biases = {"up/bias": 1.0, "down/bias": 1.0}
    check_updates(after, dict.fromkeys(after, 2.5) | biases)


@pytest.mark.parametrize("optimizer", ACCUMULATIONS)
def test_whole_weights_are_summed_once_in_an_update(optimizer):
    """Not once in each of its four micro-batches: three replicas send 64 numbers of 4
    bytes to a place each, and get them back."""
    build = lambda: chain(Dense(4, name="other"), features=16)  # noqa: E731
    model = compiled((2, 2), {}, build, ACCUMULATIONS[optimizer])
    meter = TrafficMeter()
    strategy = model.distribute_strategy
    strategy.extended.reducer.transport.traffic.meters.add(meter)
    x, y = rows_of(16, scales=np.tile(SCALES[:4], 4))
    model.fit(x, y, batch_size=4, verbose=0)
    assert meter.steps == 4
    assert meter.sent_bytes == 2 * 3 * 64 * 4


class NumberOfRows(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, sample_weight)

    def result(self):
        return self.count


class SumOfLabels(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, sample_weight)


@on_each_mesh
def test_metrics_count_each_row_once(shape):
    """Labels are powers of 2: a sum says which rows were there, and how often."""
    metrics = [lambda: NumberOfRows("rows"), lambda: SumOfLabels("sum")]
    model = compiled(shape, TWO_LAYERS, two_layers, metrics=metrics)
    steps = collections.Counter()
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.update([batch])
    )
    for rows, batch, expected in ((16, 4, 4), (10, 10, 1), (10, 4, 3)):
        x, _ = rows_of(scales=np.ones(rows))
        y = 2.0 ** np.arange(rows)[:, None]
        options = {"batch_size": batch, "verbose": 0}
        steps.clear()
        history = model.fit(x, y, callbacks=[count], **options).history
        evaluated = model.evaluate(x, y, return_dict=True, **options)
        assert len(steps) == sum(steps.values()) == expected
        assert history["rows"][0] == evaluated["rows"] == rows
        assert history["sum"][0] == evaluated["sum"] == 2.0**rows - 1


@pytest.mark.parametrize("is_synchronized", [True, False])
@on_each_mesh
def test_statistics_of_nine_rows_count_each_once(shape, is_synchronized):
    """0 to 8 have the mean 4 and the variance 60 / 9. Replicas alone have 3, 2, 2 and 2
    rows, of variances 2/3 and 1/4, whose mean by rows is 3.5 / 9."""
    if is_synchronized:
        kind = tfdp.layers.SyncBatchNormalization
    else:
        kind = layers.BatchNormalization

    def build():
        return chain(kind(momentum=0.0, name="norm"), Dense(1, name="down"))

    rules = {"norm/(gamma|beta)": ("model",), **TWO_LAYERS}
    model = compiled(shape, rules, build)
    x = np.outer(np.arange(9.0), [1, 10, -1, 2]).astype("float32")
    model.train_on_batch(x, np.zeros((9, 1), "float32"))
    norm, times = model.get_layer("norm"), np.array([1, 10, -1, 2])
    variance = (60 if is_synchronized else 3.5) / 9
    # Sums of 9 terms, relative to the largest.
    close = {"rtol": 2 * 9 * 9 * 2.0**-24, "atol": 0}
    np.testing.assert_allclose(norm.moving_mean.numpy(), 4.0 * times, **close)
    np.testing.assert_allclose(
        norm.moving_variance.numpy(), variance * times**2, **close
    )
    assert not unequal_copies(model.variables)


# A vocabulary in parts.


def logits_of(vocabulary, tied):
    """Its logits are weights of the layer that rules cut."""
    inputs = keras.Input((1,))
    if tied:
        table = layers.ReversibleEmbedding(
            vocabulary, 1, embeddings_initializer="zeros", name="words"
        )
        table.build((None, 1))
        return keras.Model(inputs, table(inputs, reverse=True))
    head = layers.Dense(vocabulary, kernel_initializer="zeros", name="head")
    return keras.Model(inputs, head(inputs))


VOCABULARY = {
    "head/kernel": (None, "model"),
    "head/bias": ("model",),
    "words/embeddings": ("model", None),
}
CROSS_ENTROPY = functools.partial(
    keras.losses.SparseCategoricalCrossentropy, from_logits=True
)


@pytest.mark.parametrize("is_tied", [False, True])
@on_each_mesh
def test_uniform_logits_of_ten_words_cost_the_logarithm_of_ten(shape, is_tied):
    """2.302585; with a padding to 12, which 4 divides, 2.484907."""
    # 10 is cut into 2, and not into 4.
    with grid(shape, VOCABULARY).scope():
        model = logits_of(10, is_tied)
        model.compile("sgd", CROSS_ENTROPY(), jit_compile=False)
    assert bool(paths_in_parts(model)) == (shape == (2, 2))
    loss = model.train_on_batch(np.ones((5, 1)), np.arange(5) * 2)
    np.testing.assert_allclose(loss, math.log(10), rtol=0, atol=NEAR)


@on_each_mesh
def test_labels_of_any_part_and_large_logits(shape):
    """Logits 10000, 10001, 10002 and 10003, labels on each part, and one ignored."""
    model = compiled(
        shape,
        VOCABULARY,
        lambda: logits_of(4, False),
        loss=CROSS_ENTROPY(ignore_class=-1),
    )
    model.get_layer("head").bias.assign(10000.0 + np.arange(4))
    labels = np.array([3, 0, -1, 2, 0])
    loss, found = updated(model, np.zeros((5, 1), "float32"), labels)
    softmax = np.exp(np.arange(4.0)) / np.exp(np.arange(4.0)).sum()
    counted = labels[labels >= 0]
    expected = -np.log(softmax)[counted].mean()
    np.testing.assert_allclose(loss, expected, rtol=0, atol=NEAR)
    # Weights near 10000 keep 2^-11 of an update.
    wanted = softmax - np.bincount(counted, minlength=4) / len(counted)
    np.testing.assert_allclose(found["head/bias"], wanted, rtol=0, atol=2.0**-10)


# Copies, draws and memory.


@on_each_mesh
def test_copies_of_whole_weights_stay_the_same_for_100_steps(shape):
    def build():
        keras.utils.set_random_seed(3)
        return chain(
            layers.Dense(8, "gelu", name="up"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(4, name="down"),
        )

    adam = lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1)  # noqa: E731
    model = compiled(shape, TWO_LAYERS, build, adam)
    variables = [*model.variables, *model.optimizer.variables]
    assert not unequal_copies(variables)
    x = np.random.default_rng(0).normal(size=(500, 4)).astype("float32")
    first = model.get_weights()
    model.fit(x, x, batch_size=5, verbose=0)
    assert model.optimizer.iterations.numpy() == 100
    for before, after in zip(first, model.get_weights(), strict=True):
        assert np.abs(after - before).max() > 0
    assert not unequal_copies(variables)


def masks_of(shape, rules):
    """The features that each of four rows keeps in a step, as a row of bits.

    Rows are 1, 2, 4 and 8: the gradient of a weight behind the dropout is a sum of
    those that keep its feature, times 2 (the scale of what is kept) / 4 (rows).
    """

    def build():
        keras.utils.set_random_seed(3)
        drop = layers.Dropout(0.5, seed=7)
        return chain(Dense(32, name="up"), drop, Dense(1, name="down"), features=1)

    model = compiled(shape, rules, build)
    _, found = updated(model, *rows_of(1, scales=np.array([1.0, 2, 4, 8])))
    sums = 2 * found["down/kernel"][:, 0]
    np.testing.assert_array_equal(sums, np.round(sums))
    return [tuple(sums.astype(int) >> row & 1) for row in range(4)]


@on_each_mesh
def test_each_row_has_a_dropout_mask_of_its_own(shape):
    """Two of 32 random bits are the same once in 4e9 pairs."""
    for rules in (TWO_LAYERS, {"up/kernel": (None, "model")}):
        assert len({*masks_of(shape, rules)}) == 4


def test_masks_of_own_rows_do_not_depend_on_the_mesh():
    """No exchange cancels behind `up`: each replica drops features of its own rows."""
    rules = {"up/kernel": (None, "model")}
    first, *others = (masks_of(shape, rules) for shape in MESHES)
    assert others == [first, first]


@on_each_mesh
def test_a_device_stores_its_parts_and_whole_weights_and_no_more(shape):
    build = lambda: chain(  # noqa: E731
        layers.Dense(64, name="up"), layers.Dense(1, name="down"), features=64
    )
    model = compiled(shape, TWO_LAYERS, build, keras.optimizers.Adam)
    model.train_on_batch(*rows_of(64))
    # Adam has two numbers of each weight. 64 x 64 and 64 are in parts, 64 and 1 whole.
    wanted = 4 * 3 * ((64 * 64 + 64) // shape[1] + 64 + 1)
    variables = [*model.variables, *model.optimizer.variables]
    for rank in range(4):
        held = [blocks_of(v)[rank] for v in variables if len(v.shape)]
        held = [block.nbytes for block in held if block.dtype == np.float32]
        assert sum(held) == wanted


def test_a_rule_with_an_axis_that_the_mesh_has_not_is_refused():
    with pytest.raises(ValueError, match="Invalid axis names.*expert"):
        layout_of((2, 2), {"up/kernel": (None, "expert")})
