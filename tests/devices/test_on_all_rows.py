"""`tfdp.losses.on_all_rows`: gradients, numbers and metrics are one device's.

A loss that was gathered wrongly looks right: its value is equal to ten digits, and its
gradient a fraction of one device's. So the tests compare gradients: the velocities of
the first step of SGD with momentum are the gradients, unrounded by weights.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.in_batch_losses import LOSSES, OF_ROWS, VIEW, views
from tests.support.parity import UNIT_ROUND_OFF, make_strategy
from tfdp.errors import ConfigurationError

ops = keras.ops

#: Rows of a batch: even on 2 to 4 replicas, uneven, and on one replica only.
ROWS = (12, 9, 1)
# Two orders of the sums of a gradient differ by 2 n u A (docs/notes/exactness.md), with
# n at most 12 rows of 8 entries, and A, the sum of absolute addends, at most 40 times
# the largest gradient.
BOUND = 2 * 12 * 8 * 40 * UNIT_ROUND_OFF
# Along the gradient itself roundings average out.
RATIO_BOUND = 1e-6


@functools.cache
def strategy_of(replicas):
    return make_strategy(replicas)


def scope_of(replicas):
    strategy = strategy_of(replicas) if replicas else None
    return strategy.scope() if strategy else contextlib.nullcontext()


def batch_of(rows, seed=5):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 6)) * draw.uniform(0.3, 2.0, size=(rows, 1))
    y = draw.integers(0, 3, rows)
    return x.astype("float32"), y, draw.uniform(0.1, 2.0, rows).astype("float32")


def network():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                10, "tanh", kernel_regularizer=keras.regularizers.L2(0.01)
            ),
            keras.layers.Dense(2 * VIEW),
        ]
    )


def momentum(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def stepped(replicas, make, *batches, marked=True):
    """A model after a step on each batch, and the reported numbers."""
    with scope_of(replicas):
        keras.utils.set_random_seed(3)
        model = make()
    if marked:
        tfdp.losses.on_all_rows(model)
    for x, y, weights in batches:
        logs = model.train_on_batch(x, y, weights, return_dict=True)
    return model, logs


def gradients_of(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    found = [np.ravel(np.asarray(v)) for v in optimizer.momentums]
    return -np.concatenate(found) / 0.1


def assert_same_gradients(found, expected, bound=BOUND, ratio_bound=RATIO_BOUND):
    assert np.max(np.abs(expected)) > 1e-3
    ratio = np.dot(found, expected) / np.dot(expected, expected)
    assert abs(ratio - 1) <= ratio_bound
    assert np.max(np.abs(found - expected)) <= bound * np.max(np.abs(expected))


class Of(keras.losses.Loss):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.call = function


def with_loss(name, **options):
    def make():
        model = network()
        model.compile(momentum(**options), LOSSES[name], jit_compile=False)
        return model

    return make


@functools.cache
def alone(name, rows, is_weighted):
    x, y, weights = batch_of(rows)
    batch = x, y, weights if is_weighted else None
    model, logs = stepped(None, with_loss(name), batch, marked=False)
    return gradients_of(model), logs


@pytest.mark.worth_seconds(120)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_one_devices(name, replicas, rows):
    x, y, _ = batch_of(rows)
    model, logs = stepped(replicas, with_loss(name), (x, y, None))
    expected, expected_logs = alone(name, rows, False)
    assert_same_gradients(gradients_of(model), expected)
    np.testing.assert_allclose(logs["loss"], expected_logs["loss"], rtol=1e-5)


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", OF_ROWS)
def test_sample_weights_weight_rows_of_all(name, replicas, rows):
    model, _ = stepped(replicas, with_loss(name), batch_of(rows))
    assert_same_gradients(gradients_of(model), alone(name, rows, True)[0])


def test_without_the_line_gradients_are_others():
    # Else the tests above show nothing.
    x, y, _ = batch_of(12)
    with pytest.warns(tfdp.errors.LocalMeanWarning, match="on_all_rows"):
        model, _ = stepped(2, with_loss("InfoNCE"), (x, y, None), marked=False)
    expected, _ = alone("InfoNCE", 12, False)
    assert np.max(np.abs(gradients_of(model) - expected)) > 0.05


class Learned(keras.Model):
    """A temperature and prototypes that the loss reads; a loss of its own."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.temperature = self.add_weight(shape=(), initializer="ones")
        self.prototypes = self.add_weight(shape=(3, VIEW), initializer="glorot_normal")

    def call(self, x):
        return self.network(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        a, b = views(y_pred)
        scores = self.temperature * ops.matmul(a, ops.transpose(b))
        log = ops.log_softmax(scores, axis=0) + ops.log_softmax(scores, axis=1)
        near = ops.softmax(ops.matmul(a, ops.transpose(self.prototypes)), axis=0)
        loss = ops.sum(ops.square(ops.mean(near * ops.std(x, axis=0)[:1], axis=1)))
        return loss - ops.mean(ops.diagonal(log)) + sum(self.network.losses)


def learned():
    model = Learned()
    model.build((None, 6))
    model.compile(momentum(), jit_compile=False)
    return model


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_weights_that_a_loss_reads_have_whole_gradients(replicas, rows):
    x, y, _ = batch_of(rows)
    expected, expected_logs = stepped(None, learned, (x, y, None), marked=False)
    model, logs = stepped(replicas, learned, (x, y, None))
    assert_same_gradients(gradients_of(model), gradients_of(expected))
    np.testing.assert_allclose(logs["loss"], expected_logs["loss"], rtol=1e-5)


def of_words(**options):
    def beside_all(y, p):
        """A number per word, beside the mean of the batch's words in its place."""
        squares = ops.square(p - 0.5 * ops.mean(p, axis=0, keepdims=True))
        return ops.mean(squares, axis=-1) * (1 + ops.cast(y, p.dtype))

    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(9, 6, mask_zero=True),
            keras.layers.Dense(4),
        ]
    )
    loss = Of(beside_all, **options)
    model.compile(momentum(), loss, jit_compile=False)
    return model


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
)
@pytest.mark.parametrize("replicas,rows", [(2, 12), (3, 9), (3, 1)])
def test_masks_travel_with_their_rows(replicas, rows, reduction):
    draw = np.random.default_rng(0)
    words = draw.integers(0, 9, (rows, 5))
    words[:, 0] = 1
    batch = words, draw.integers(0, 2, (rows, 5)), draw.random((rows, 5))
    make = functools.partial(of_words, reduction=reduction)
    expected, _ = stepped(None, make, batch, marked=False)
    model, _ = stepped(replicas, make, batch)
    assert_same_gradients(gradients_of(model), gradients_of(expected))


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("name", ["InfoNCE", "Dice", "VICReg"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_an_update_has_the_mean_of_its_batches(name, replicas):
    batches = [(*batch_of(12, seed)[:2], None) for seed in range(4)]
    make = with_loss(name, gradient_accumulation_steps=4)
    expected, _ = stepped(None, make, *batches, marked=False)
    model, _ = stepped(replicas, make, *batches)
    assert_same_gradients(gradients_of(model), gradients_of(expected))


@pytest.mark.parametrize("name", ["InfoNCE", "Barlow Twins"])
def test_scaled_float16_losses(name):
    def make():
        policy = keras.dtype_policies.DTypePolicy("mixed_float16")
        layers = [keras.layers.Dense(10, "tanh", dtype=policy)]
        layers += [keras.layers.Dense(2 * VIEW, dtype=policy)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=256)
        loss = Of(LOSSES[name], dtype="float32")
        model.compile(optimizer, loss, jit_compile=False)
        return model

    x, y, _ = batch_of(12)
    expected, _ = stepped(None, make, (x, y, None), marked=False)
    model, _ = stepped(2, make, (x, y, None))
    # A gradient of 12 rows is a sum in float16, of addends that are rounded twice.
    unit = float(np.finfo(np.float16).eps) / 2
    bound = 2 * 12 * unit
    assert_same_gradients(gradients_of(model), gradients_of(expected), bound, 2 * unit)


def top_candidate(y, p):
    """Which rows' own candidate is the best of the batch."""
    queries, candidates = views(p)
    best = ops.argmax(ops.matmul(queries, ops.transpose(candidates)), axis=1)
    return ops.cast(ops.equal(best, ops.arange(ops.shape(p)[0])), "float32")


def f1_of_batch(y, p):
    return 1 - LOSSES["F1"](y, p)


class Calibration(keras.metrics.Metric):
    """State that is no sum over rows: the error of the batch that was last."""

    def __init__(self):
        super().__init__(name="calibration")
        self.error = self.add_variable((), "zeros", name="error")

    def update_state(self, y, p, sample_weight=None):
        self.error.assign(ops.sqrt(ops.mean(ops.square(ops.mean(p, axis=0)))))

    def result(self):
        return self.error


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_metrics_of_any_kind_are_of_the_whole_batch(replicas):
    def make():
        model = network()
        metrics = [top_candidate, f1_of_batch, Calibration()]
        weighted = [keras.metrics.MeanMetricWrapper(top_candidate, name="weighted")]
        model.compile(
            keras.optimizers.SGD(0.1),
            LOSSES["InfoNCE"],
            metrics=metrics,
            weighted_metrics=weighted,
            jit_compile=False,
        )
        return model

    x, y, weights = batch_of(26)
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(12)
    found = []
    for count in (None, replicas):
        with scope_of(count):
            keras.utils.set_random_seed(3)
            model = make()
        if count:
            tfdp.losses.on_all_rows(model)
        history = model.fit(data, epochs=2, verbose=0).history
        logs = {name: values[-1] for name, values in history.items()}
        found.append((logs, model.evaluate(data, verbose=0, return_dict=True)))
    for expected, result in zip(*found, strict=True):
        assert result.keys() == expected.keys()
        for name, number in expected.items():
            np.testing.assert_allclose(result[name], number, rtol=2e-5, err_msg=name)


def test_outputs_and_their_losses_are_reported_for_the_whole_batch():
    def make():
        inner = keras.layers.Dense(6, "tanh")(inputs := keras.Input((6,)))
        outputs = {n: keras.layers.Dense(2 * VIEW)(inner) for n in ("a", "b")}
        model = keras.Model(inputs, outputs)
        losses = {"a": LOSSES["InfoNCE"], "b": LOSSES["Dice"]}
        weights = {"a": 0.3, "b": 2.0}
        model.compile(momentum(), losses, loss_weights=weights, jit_compile=False)
        return model

    x, y, _ = batch_of(26)
    rows = tf.data.Dataset.from_tensor_slices((x, {"a": y, "b": y})).batch(12)
    logs = []
    for count in (None, 3):
        with scope_of(count):
            keras.utils.set_random_seed(3)
            model = make()
        if count:
            tfdp.losses.on_all_rows(model)
        logs.append(model.fit(rows, epochs=2, verbose=0).history)
    for name, numbers in logs[0].items():
        np.testing.assert_allclose(logs[1][name], numbers, rtol=2e-5, err_msg=name)


def test_draws_of_a_loss_are_one_devices():
    class Drawing(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(7)

        def call(self, y, p):
            noise = keras.random.normal(ops.shape(p), seed=self.seeds)
            return LOSSES["InfoNCE"](y, p + noise)

    def make():
        model = network()
        model.compile(momentum(), Drawing(), jit_compile=False)
        return model

    batches = [(*batch_of(9, seed)[:2], None) for seed in range(3)]
    expected, _ = stepped(None, make, *batches, marked=False)
    model, _ = stepped(2, make, *batches)
    found, wanted = gradients_of(model), gradients_of(expected)
    assert np.max(np.abs(found - wanted)) <= 10 * BOUND * np.max(np.abs(wanted))


def test_functions_of_tfdp_change_nothing_there():
    def loss(y, p):
        y, p = tfdp.losses.all_rows(y), tfdp.losses.all_rows(p)
        total = tfdp.losses.local_mean(LOSSES["VICReg"](y, p))
        own = tfdp.losses.own_rows(LOSSES["InfoNCE"](y, p), p)
        return total + tfdp.losses.local_sum(ops.mean(tfdp.losses.all_sum(own)))

    def make():
        model = network()
        model.compile(momentum(), loss, jit_compile=False)
        return model

    x, y, _ = batch_of(9)
    expected, _ = stepped(None, make, (x, y, None), marked=False)
    model, _ = stepped(3, make, (x, y, None))
    assert_same_gradients(gradients_of(model), gradients_of(expected))


class Adding(keras.layers.Layer):
    """Adds a mean over rows, values of rows and a sum over rows to the loss."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        self.add_loss(ops.mean(ops.square(x), axis=1))
        self.add_loss(tfdp.losses.local_sum(ops.sum(ops.square(x))))
        return x


@pytest.mark.parametrize("replicas,rows", [(2, 12), (3, 9), (3, 1)])
def test_what_layers_add_counts_once(replicas, rows):
    def make():
        layers = [keras.layers.Dense(2 * VIEW), Adding()]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(momentum(), LOSSES["Dice"], jit_compile=False)
        return model

    x, y, _ = batch_of(rows)
    expected, expected_logs = stepped(None, make, (x, y, None), marked=False)
    model, logs = stepped(replicas, make, (x, y, None))
    assert_same_gradients(gradients_of(model), gradients_of(expected))
    np.testing.assert_allclose(logs["loss"], expected_logs["loss"], rtol=1e-5)


# What cannot be exact is refused.


class Kept(Learned):
    """Reads rows that `call` has kept, and that nobody gathers."""

    def call(self, x):
        self.kept = self.network(x)
        return self.kept

    def read(self):
        return ops.mean(self.kept)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred)) + self.read()


class KeptInFunction(Kept):
    def read(self):
        return tf.function(lambda: ops.mean(self.kept))()


class KeptInLoop(Kept):
    def read(self):
        kept = self.kept
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, v: (i + 1, v + ops.mean(kept)), (0, 0.0)
        )[1]


class KeptInBranch(Kept):
    def read(self):
        kept = self.kept
        return tf.cond(self.temperature > 0, lambda: ops.mean(kept), lambda: 0.0)


class KeptInPython(Kept):
    def read(self):
        return tf.ensure_shape(tf.py_function(ops.mean, [self.kept], "float32"), ())


def compiled(kind):
    def make():
        model = kind()
        model.build((None, 6))
        model.compile(momentum(), jit_compile=False)
        return model

    return make


@pytest.mark.parametrize(
    "kind", [Kept, KeptInFunction, KeptInLoop, KeptInBranch, KeptInPython]
)
def test_rows_of_one_replica_in_a_loss_are_refused(kind):
    x, y, _ = batch_of(12)
    with pytest.raises(ConfigurationError, match="from elsewhere than its arguments"):
        stepped(2, compiled(kind), (x, y, None))


class InFunction(Learned):
    def compute_loss(self, *args, **kwargs):
        return tf.function(super().compute_loss, autograph=False)(*args, **kwargs)


class InBranch(Learned):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        own = super().compute_loss
        return tf.cond(self.temperature > 0, lambda: own(x, y, y_pred), lambda: 0.0)


@pytest.mark.parametrize("kind", [InFunction, InBranch])
def test_a_loss_of_all_rows_may_be_computed_in_functions_and_branches(kind):
    x, y, _ = batch_of(9)
    expected, _ = stepped(None, compiled(kind), (x, y, None), marked=False)
    model, _ = stepped(2, compiled(kind), (x, y, None))
    assert_same_gradients(gradients_of(model), gradients_of(expected))


class ByHand(Learned):
    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_mean(ops.mean(ops.square(self(x))))
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class FromFunction(Learned):
    def train_step(self, data):
        x, y = data[0], data[1]
        function = tf.function(lambda p: self.compute_loss(x=x, y=y, y_pred=p))
        with tf.GradientTape() as tape:
            loss = function(self(x))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Scalars(Learned):
    def call(self, x):
        return {"rows": self.network(x), "mean": ops.mean(x)}


class Twice(Learned):
    def call(self, x):
        return ops.concatenate([self.network(x), self.network(-x)], axis=0)


def of_each(y, p):
    return ops.sum(ops.square(p), axis=1)


def unreduced():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    loss = Of(of_each, reduction="none")
    model.compile(momentum(), loss, jit_compile=False)
    return model


def jitted():
    model = network()
    model.compile(momentum(), LOSSES["Dice"], jit_compile=True)
    return model


@pytest.mark.parametrize(
    "make,match",
    [
        (compiled(ByHand), "does not call"),
        (compiled(FromFunction), "tf.function"),
        (compiled(Scalars), "one entry along the first axis"),
        (compiled(Twice), "one entry along the first axis"),
        (unreduced, "one number"),
        (jitted, "jit_compile"),
    ],
    ids=["train_step", "function", "number", "views", "none", "jit"],
)
def test_what_cannot_be_exact_is_refused(make, match):
    x, y, _ = batch_of(12)
    with pytest.raises(ConfigurationError, match=match):
        stepped(2, make, (x, y, None))


def test_views_in_one_axis_are_refused_where_rows_are_dynamic():
    x, y, _ = batch_of(20)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    with scope_of(2):
        model = compiled(Twice)()
    tfdp.losses.on_all_rows(model)
    with pytest.raises(
        (ConfigurationError, tf.errors.InvalidArgumentError), match="one entry"
    ):
        model.fit(data, verbose=0)


def test_a_mark_on_an_inner_model_is_refused():
    def make():
        inner = network()
        model = keras.Sequential([keras.Input((6,)), inner])
        model.compile(momentum(), LOSSES["Dice"], jit_compile=False)
        tfdp.losses.on_all_rows(inner)
        return model

    x, y, _ = batch_of(12)
    with pytest.raises(ConfigurationError, match="contains it"):
        stepped(2, make, (x, y, None), marked=False)


def test_only_models_are_marked():
    with pytest.raises(ConfigurationError, match="takes the Keras model"):
        tfdp.losses.on_all_rows(keras.layers.Dense(1))


def test_what_a_model_returns_for_all_replicas_stays_as_it_is():
    class Prototypes(Learned):
        def call(self, x):
            return {"rows": self.network(x), "prototypes": 1.0 * self.prototypes}

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            p, q = y_pred["rows"][:, :VIEW], y_pred["prototypes"]
            near = ops.softmax(ops.matmul(p, ops.transpose(q)), axis=0)
            return ops.sum(ops.square(ops.mean(near * p[:, :1], axis=0)))

    def make():
        model = compiled(Prototypes)()
        model.temperature.trainable = False
        model.compile(momentum(), jit_compile=False)
        return model

    x, y, _ = batch_of(9)
    expected, _ = stepped(None, make, (x, y, None), marked=False)
    model, _ = stepped(3, make, (x, y, None))
    found, wanted = gradients_of(model), gradients_of(expected)
    assert np.max(np.abs(found - wanted)) <= BOUND * np.max(np.abs(wanted))


# What a hostile reader found.


class Penalized(Learned):
    """A gradient of a gradient over `compute_loss`: other rows' terms meet again."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        a, b = views(y_pred)
        scores = self.temperature * ops.matmul(a, ops.transpose(b))
        return ops.mean(ops.logsumexp(scores, axis=1) + ops.square(ops.mean(a)))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = self.compute_loss(x=x, y=y, y_pred=self(x))
            penalty = ops.sum(ops.square(inner.gradient(loss, x)))
            total = loss + tfdp.losses.local_sum(10.0 * penalty)
        variables = self.trainable_variables
        self.optimizer.apply(outer.gradient(total, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("replicas,rows", [(2, 12), (3, 9), (3, 1)])
def test_gradients_of_gradients(replicas, rows):
    def make():
        model = Penalized()
        model.build((None, 6))
        model.prototypes.trainable = False
        model.compile(momentum(), jit_compile=False)
        return model

    x, y, _ = batch_of(rows)
    expected, _ = stepped(None, make, (x, y, None), marked=False)
    model, _ = stepped(replicas, make, (x, y, None))
    # The penalty adds sums over the widths of both layers.
    assert_same_gradients(gradients_of(model), gradients_of(expected), 4 * BOUND)


class Counting(Learned):
    """Counts rows in a variable, by a replica's number, and with targets of ones."""

    def __init__(self):
        super().__init__()
        self.rows_seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="sum"
        )

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            y = ops.ones((ops.shape(x)[0], 1))
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        count = ops.cast(ops.shape(y)[0], "float32")
        self.rows_seen.assign_add(count)
        context = tf.distribute.get_replica_context()
        first = 0 if context is None else context.replica_id_in_sync_group
        labels = ops.arange(ops.shape(y)[0]) + first * ops.shape(y)[0]
        scores = ops.matmul(y_pred * y, ops.transpose(y_pred))
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, scores, from_logits=True
            )
        )


@pytest.mark.parametrize("replicas,rows", [(2, 12), (3, 9), (3, 1)])
def test_counters_replica_numbers_and_constant_targets(replicas, rows):
    def make():
        model = Counting()
        model.build((None, 6))
        model.temperature.trainable = model.prototypes.trainable = False
        model.compile(momentum(), jit_compile=False)
        return model

    x, y, _ = batch_of(rows)
    expected, _ = stepped(None, make, (x, y, None), marked=False)
    model, _ = stepped(replicas, make, (x, y, None))
    found, wanted = gradients_of(model), gradients_of(expected)
    assert np.max(np.abs(found - wanted)) <= BOUND * max(1e-3, np.max(np.abs(wanted)))
    assert float(model.rows_seen) == float(expected.rows_seen) == rows


class ByMetric(Learned):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        self.seen.update_state(ops.mean(y_pred))
        return ops.mean(ops.square(y_pred)) / (1 + ops.square(self.seen.result()))


class MetricOfKept(Kept):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"kept": self.seen_mean(ops.mean(self.kept))}

    def seen_mean(self, number):
        self.seen.update_state(number)
        return self.seen.result()

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")


class OneRow(Learned):
    def call(self, x):
        return ops.mean(self.network(x), axis=0, keepdims=True)


class Dict(Learned):
    def compute_loss(self, *args, **kwargs):
        return {"loss": super().compute_loss(*args, **kwargs)}


@pytest.mark.parametrize(
    "kind,match",
    [
        (ByMetric, "state of a metric"),
        (MetricOfKept, "reads those of one replica"),
        (OneRow, "one entry along the first axis"),
        (Dict, "one number"),
    ],
)
def test_numbers_of_one_replica_are_refused(kind, match):
    x, y, _ = batch_of(2)
    with pytest.raises(ConfigurationError, match=match):
        stepped(2, compiled(kind), (x, y, None))


class Reversed(Learned):
    def call(self, x):
        return self.network(x)[::-1]


class ScaledByHand(Learned):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
            loss /= tf.distribute.get_strategy().num_replicas_in_sync
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    "kind,match",
    [(Reversed, "rows are joined"), (ScaledByHand, "Leave out the division")],
)
def test_what_the_line_cannot_mend_is_told(kind, match):
    x, y, _ = batch_of(12)
    with pytest.warns(tfdp.errors.LocalMeanWarning, match=match):
        stepped(2, compiled(kind), (x, y, None))


def test_a_metric_that_starts_at_another_number_is_told():
    class Smallest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="smallest")
            self.value = self.add_variable((), keras.initializers.Constant(9.0))

        def reset_state(self):
            self.value.assign(9.0)

        def update_state(self, y, p, sample_weight=None):
            self.value.assign(ops.minimum(self.value, ops.min(p)))

        def result(self):
            return self.value

    def make():
        model = network()
        model.compile(momentum(), LOSSES["Dice"], metrics=[Smallest()])
        return model

    x, y, _ = batch_of(12)
    with pytest.warns(tfdp.errors.LocalStateWarning, match="from its old value"):
        stepped(2, make, (x, y, None))


class Pairs(keras.layers.Layer):
    """A contrastive loss of its input, maybe scaled to the replica's share."""

    def __init__(self, scale=None):
        super().__init__(name="pairs")
        self.scale = scale or (lambda loss: loss)

    def call(self, x):
        self.add_loss(self.scale(LOSSES["InfoNCE"](None, x)))
        return x


class Regularized(keras.layers.Dense):
    def __init__(self):
        super().__init__(2 * VIEW, name="pairs")
        self.activity_regularizer = lambda outputs: LOSSES["InfoNCE"](None, outputs)


def with_layer(make_layer, **compiled_with):
    def make():
        model = network()
        model.add(make_layer())
        model.compile(momentum(), jit_compile=False, **compiled_with)
        return model

    return make


class Adds(Learned):
    """Gives `add_loss` a loss in its own call."""

    compute_loss = keras.Model.compute_loss

    def call(self, x):
        x = self.network(x)
        self.add_loss(LOSSES["InfoNCE"](None, x))
        return x


class InStep(Learned):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x))
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def loss_of(self, x, y, p):
        return LOSSES["InfoNCE"](y, p)


class Computes(InStep):
    def loss_of(self, x, y, p):
        return self.compute_loss(x=x, y=y, y_pred=p)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return LOSSES["InfoNCE"](y, y_pred)


class Sums(InStep):
    def loss_of(self, x, y, p):
        return ops.sum(ops.square(p))


LAYER = r"\. Put the layer 'pairs', whose loss it is, into tfdp.layers.AllRows"
ANY_LAYER = (
    r"\. Put what does it, a layer or a part of call\(\), into tfdp.layers.AllRows"
)


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "make,marked,words",
    [
        (with_layer(Pairs), False, LAYER),
        (with_layer(lambda: Pairs(tfdp.losses.local_mean)), False, LAYER),
        (with_layer(Regularized), False, LAYER),
        (with_layer(Pairs, loss="mse"), True, LAYER),
        (compiled(Adds), False, ANY_LAYER),
        (compiled(Reversed), True, ANY_LAYER),
        (compiled(InStep), False, r"\. In the step, compute it from tfdp.losses.all_r"),
        (compiled(Computes), False, r"\. Call tfdp.losses.on_all_rows\(model\)"),
        (compiled(Sums), False, "Mend it so: return tfdp.losses.local_sum"),
    ],
    ids=lambda value: "" if callable(value) else None,
)
def test_the_line_that_fits_is_named_first(make, marked, words):
    x, _, _ = batch_of(12)
    y = np.zeros((12, 2 * VIEW), "float32")
    kinds = tfdp.errors.LocalMeanWarning, tfdp.errors.LocalStateWarning
    with pytest.warns(kinds, match=words) as told:
        stepped(2, make, (x, y, None), marked=marked)
    fits = "on_all_rows" in words
    named = ["on_all_rows" in str(one.message) for one in told if one.category in kinds]
    assert named == [fits]


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_model_whose_layers_have_the_losses_is_refused(replicas):
    with scope_of(replicas):
        model = with_layer(Pairs)()
    with pytest.raises(ConfigurationError, match=r"none. Put a layer .*AllRows\(lay"):
        tfdp.losses.on_all_rows(model)


def test_a_model_that_is_compiled_later_is_refused_in_fit():
    def make():
        model = network()
        model.add(Pairs())
        tfdp.losses.on_all_rows(model)
        model.compile("sgd", jit_compile=False)
        return model

    x, y, _ = batch_of(12)
    with pytest.raises(ConfigurationError, match="Put a layer that gives add_loss"):
        stepped(2, make, (x, y, None))
