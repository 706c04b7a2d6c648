"""`callbacks.NaNGuard`: a bad batch changes nothing, and its cause is named.

The reference of "skip" is the same training without the bad batch, on the same
replicas: everything must be equal to the last bit, since the same operations run on the
same numbers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, make_strategy
from tfdp.callbacks import NaNGuard, ReplicaCheck
from tfdp.errors import ConfigurationError, NotFiniteError, NotFiniteWarning
from tfdp.step.finite_trace import NotFinite
from tfdp.step.observers import observers_of

BATCH = 8
# Batches of 8, of 4 + 4 rows on two replicas; the last one has 3 + 2.
ROWS = 6 * BATCH + 5
BAD_BATCH = 2
# On two replicas the second row of the second one, in the third batch.
BAD_ROW = BAD_BATCH * BATCH + 5
SKIPS = pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning")


def dense_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(33, activation="tanh", name="first"),
            keras.layers.BatchNormalization(name="statistics"),
            keras.layers.Dense(5, dtype="float32", name="last"),
        ]
    )


def embedding_model():
    keras.utils.set_random_seed(3)
    x = keras.Input((12,))
    rows = keras.layers.Embedding(9, 4)(keras.ops.abs(x[:, 4:]) % 9)
    # The NaN is in column 3; it would be no index of a row.
    return keras.Model(
        x, keras.layers.Dense(5)(keras.layers.Flatten()(rows) * x[:, 3:4])
    )


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, **options)


def compiled(strategy, optimizer=None, build=dense_model, loss=None, **options):
    with strategy.scope():
        model = build()
        model.compile(
            (optimizer or adam())(),
            loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **{"jit_compile": False, **options},
        )
    return model


def good_data():
    return classification_data(ROWS)


def bad_data(value=np.nan):
    x, y = good_data()
    x[BAD_ROW, 3] = value
    return x, y


def without_bad_batch(data=None):
    rows = np.arange(ROWS) // BATCH != BAD_BATCH
    return tuple(part[rows] for part in data or good_data())


def fit(model, data, *callbacks, epochs=1):
    return model.fit(
        *data,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history


def everything(model):
    return [
        (v.name, v.numpy())
        for owner in (model, model.optimizer)
        for v in owner.variables
        if "seed_generator" not in v.path
    ]


def check_equal(a, b):
    # Keras numbers the names of what a process makes later: not all names are alike.
    for (name, value), (_, other) in zip(everything(a), everything(b), strict=True):
        np.testing.assert_array_equal(value, other, err_msg=name)


def distributed(**options):
    return lambda: tfdp.DistributedOptimizer(keras.optimizers.Adam(0.01), **options)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**10)


# Strategy, optimizer, what compile is told.
SKIPPED = {
    "plain": (lambda: make_strategy(2), adam(use_ema=True, clipnorm=1.0), {}),
    "one": (lambda: make_strategy(1), None, {}),
    "collectives": (lambda: make_strategy(2, engine="tensorflow"), None, {}),
    "simulated-hosts": (lambda: make_strategy(4, hierarchy=(2, 2)), None, {}),
    "optimizer": (lambda: make_strategy(2, "optimizer"), None, {}),
    "gradients": (lambda: make_strategy(2, "gradients"), None, {}),
    "parameters": (lambda: make_strategy(3, "parameters"), None, {}),
    "accumulation": (
        lambda: make_strategy(2),
        adam(gradient_accumulation_steps=2),
        {},
    ),
    "accumulated-shards": (
        lambda: make_strategy(2, "gradients"),
        adam(gradient_accumulation_steps=2),
        {},
    ),
    "distributed": (lambda: make_strategy(2), distributed(), {}),
    "weighted": (lambda: make_strategy(2), distributed(accumulate_steps=2), {}),
    "loss-scale": (lambda: make_strategy(2), scaled, {}),
    "distributed-scale": (
        lambda: make_strategy(2),
        distributed(dynamic_loss_scale=True, initial_scale=2.0**9),
        {},
    ),
    "executions": (lambda: make_strategy(2), None, {"steps_per_execution": 3}),
    "jit": (lambda: make_strategy(2), None, {"jit_compile": True}),
    "slices": (lambda: make_strategy(2), None, {"build": embedding_model}),
}


@SKIPS
@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("row", SKIPPED)
def test_a_skipped_batch_leaves_nothing_behind(row):
    make, optimizer, options = SKIPPED[row]
    model, guard = compiled(make(), optimizer, **options), NaNGuard("skip")
    check = ReplicaCheck(100)
    epochs = 2 if row == "plain" else 1
    history = fit(model, bad_data(), guard, check, epochs=epochs)
    assert history["skipped_steps"] == [1] * epochs
    assert guard.skipped_steps == epochs
    assert check.checks == (row != "one")  # which has nobody to compare with
    expected = compiled(make(), optimizer, **options)
    # TensorFlow rounds sums otherwise that it adds up within a conditional.
    guards = [NaNGuard("skip")] if row == "weighted" else []
    expected_history = fit(expected, without_bad_batch(), *guards, epochs=epochs)
    check_equal(model, expected)
    for name in ("loss", "accuracy"):
        assert history[name] == expected_history[name]


@pytest.mark.slow
def test_healthy_training_is_what_it_is_without():
    models = []
    for callbacks in ([], [NaNGuard()]):
        models.append(compiled(make_strategy(2)))
        fit(models[-1], good_data())
        fit(models[-1], good_data(), *callbacks)
        fit(models[-1], good_data())
        assert observers_of(models[-1], object) == []
    check_equal(*models)


@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.worth_seconds(4)
def test_raising_leaves_the_weights_from_before(steps_per_execution):
    options = {"steps_per_execution": steps_per_execution}
    model, guard = compiled(make_strategy(2), **options), NaNGuard()
    with pytest.raises(NotFiniteError, match="in step 3 of this fit") as caught:
        fit(model, bad_data(np.inf), guard)
    first = caught.value.findings[0]
    assert first == NotFinite(1, "input", "x", 0, 1, 48, 1)
    assert "replica 1 (CPU:1): first the input x" in str(caught.value)
    expected = compiled(make_strategy(2))
    fit(expected, [part[: BAD_BATCH * BATCH] for part in good_data()])
    check_equal(model, expected)
    # And nothing is left of the guard.
    assert observers_of(model, object) == []
    fit(model, bad_data())
    assert np.isnan(model.get_weights()[0]).any()


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("comes_first", [False, True])
def test_an_interrupted_guard_leaves_nothing_out(comes_first):
    model, callbacks = compiled(make_strategy(2)), [NaNGuard("skip"), Interrupts()]
    with pytest.raises(KeyboardInterrupt):
        fit(model, good_data(), *callbacks[:: -1 if comes_first else 1])
    fit(model, bad_data())
    assert np.isnan(model.get_weights()[0]).any()


@SKIPS
@pytest.mark.worth_seconds(5)
def test_rolling_back_goes_on_from_the_last_copy():
    x, y = bad_data()
    # Copies after steps 0, 3 (bad: none) and 6; steps 4 and 5 are lost in step 6.
    x[5 * BATCH] = np.nan
    model = compiled(make_strategy(2, "optimizer"))
    guard = NaNGuard("rollback", keep_every_steps=2)
    fit(model, (x, y), guard)
    # The copy after step 2 is what step 3 goes back to; after step 4 one is taken.
    assert (guard.rollbacks, guard.skipped_steps) == (2, 2)
    kept = [0, 1, 3, 6]
    rows = np.isin(np.arange(ROWS) // BATCH, kept)
    expected = compiled(make_strategy(2, "optimizer"))
    fit(expected, [part[rows] for part in good_data()])
    check_equal(model, expected)


@SKIPS
@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
@pytest.mark.slow
def test_too_many_in_a_row_raise(on_nan):
    x, y = good_data()
    x[2 * BATCH :] = np.nan
    guard = NaNGuard(on_nan, most_in_a_row=2)
    with pytest.raises(NotFiniteError, match="the input x"):
        fit(compiled(make_strategy(2)), (x, y), guard)
    assert guard.skipped_steps == 3


@pytest.mark.slow
def test_a_loss_scaler_may_find_infinities():
    def make():
        inner = keras.optimizers.Adam(0.01)
        # The first gradients leave float32's range.
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127)

    model, guard = compiled(make_strategy(2), make), NaNGuard()
    fit(model, good_data(), guard)
    assert guard.skipped_steps == 0
    assert float(model.optimizer.dynamic_scale.numpy()) < 2.0**127


class Logarithm(keras.layers.Layer):
    def call(self, x):
        return keras.ops.log(keras.ops.abs(x))


class Within(keras.layers.Layer):
    """A layer within a layer: the inner one is named."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = Logarithm(name="inner")

    def call(self, x):
        return 2 * self.inner(x)


def logarithm_model():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((12,)), Within(name="outer"), keras.layers.Dense(5)]
    return keras.Sequential(layers)


def root_model():
    # A row of zeros gives 0: with a target of 0 the root has no slope there.
    return keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(1, use_bias=False, name="last")]
    )


def root_loss(y, y_pred):
    return keras.ops.sqrt(keras.ops.square(y_pred[:, 0] - keras.ops.cast(y, "float32")))


def label_loss(y, y_pred):
    # Labels of 99 are nothing that this loss knows.
    y = keras.ops.cast(y, "float32")
    return keras.ops.where(y > 50, np.inf, 0.0) + keras.ops.mean(y_pred**2, axis=-1)


def poisoned(kind):
    """Compile options, data, and the kinds that are found, the first with its name."""
    x, y = good_data()
    if kind == "layer":
        x[BAD_ROW] = 0.0
        return {"build": logarithm_model}, (x, y), ("layer", "inner")
    if kind == "gradient":
        x[BAD_ROW], y[BAD_ROW] = 0.0, 0
        options = {"build": root_model, "loss": root_loss}
        return options, (x, y), ("gradient", "last/kernel")
    if kind == "loss":
        y[BAD_ROW] = 99
        return {"loss": label_loss}, (x, y), ("loss", "the loss")
    return {}, bad_data(), ("input", "x")


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("kind", ["layer", "gradient", "loss", "input"])
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_the_first_cause_is_named(kind, shard):
    options, data, (found, name) = poisoned(kind)
    model = compiled(make_strategy(2, shard), **options)
    with pytest.raises(NotFiniteError) as caught:
        fit(model, data, NaNGuard())
    own = [f for f in caught.value.findings if f.rank == 1]
    assert own[0].kind == found and own[0].name.endswith(name)
    # What is stored in shards has a gradient that is summed already.
    others = [f for f in caught.value.findings if f.rank == 0]
    assert shard == "parameters" or others == []
    assert name in str(caught.value)


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_named():
    model = compiled(make_strategy(2))

    class Pokes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                bias = model.get_layer("last").bias.value.values[1]
                bias.assign([0, 0, np.inf, 0, 0])

    with pytest.raises(NotFiniteError, match="step 4") as caught:
        fit(model, good_data(), Pokes(), NaNGuard())
    (finding,) = caught.value.findings
    assert (finding.rank, finding.kind, finding.infinities) == (1, "weight", 1)
    assert finding.name.endswith("last/bias")


@pytest.mark.slow
def test_a_weight_that_no_loss_depends_on_is_noticed_when_the_epoch_ends():
    model = compiled(make_strategy(2), build=embedding_model)

    class Pokes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                model.weights[0].assign(np.full((9, 4), np.nan))

    with pytest.raises(NotFiniteError, match="after step 7 of this fit"):
        fit(model, good_data(), Pokes(), NaNGuard())


@pytest.mark.slow
@pytest.mark.parametrize("across, replicas", [("replicas", 2), ("hosts", 4)])
def test_replicas_that_train_apart_leave_out_their_own(across, replicas):
    def make():
        hierarchy = (2, 2) if across == "hosts" else "auto"
        return make_strategy(replicas, hierarchy=hierarchy)

    sync = tfdp.sync.LocalSGD(every=3, across=across)
    model, guard = compiled(make(), distributed(sync=sync)), NaNGuard("skip")
    with pytest.warns(NotFiniteWarning, match="the input x"):
        fit(model, bad_data(), guard, ReplicaCheck(1))
    # Who has left out nothing is not looked at, and the batch is computed again.
    assert {finding.kind for finding in guard.findings} >= {"input", "loss"}
    assert "unknown" not in {finding.kind for finding in guard.findings}
    assert guard.skipped_steps == 1
    assert all(np.isfinite(w).all() for w in model.get_weights())


@SKIPS
@pytest.mark.slow
def test_a_train_step_of_its_own_is_watched():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense_model()

        def call(self, x, training=False):
            return self.inner(x, training=training)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    models = []
    for data, callbacks in ((bad_data(), [NaNGuard("skip")]), (None, [])):
        models.append(compiled(make_strategy(2), build=Own))
        fit(models[-1], data or without_bad_batch(), *callbacks)
    check_equal(*models)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"on_nan": "ignore"}, "on_nan"),
        ({"most_in_a_row": 3}, "most_in_a_row=3 has no effect"),
        ({"on_nan": "skip", "keep_every_steps": 3}, "keep_every_steps=3 has no effect"),
        ({"on_nan": "skip", "most_in_a_row": 0}, "at least 1"),
        ({"on_nan": "rollback", "keep_every_steps": True}, "at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        NaNGuard(**arguments)


SYNC = tfdp.sync.LocalSGD(every=2, across="replicas")


@pytest.mark.parametrize(
    "make, guard, words",
    [
        (lambda: compiled(tf.distribute.get_strategy()), NaNGuard, "DefaultDist"),
        (lambda: compiled(make_strategy(2), run_eagerly=True), NaNGuard, "run_eagerly"),
        (
            lambda: compiled(make_strategy(2), distributed(sync=SYNC)),
            lambda: NaNGuard("rollback"),
            "one moment of all replicas",
        ),
        (
            lambda: compiled(
                make_strategy(2), distributed(sync=SYNC, accumulate_steps=2)
            ),
            lambda: NaNGuard("skip"),
            "equal numbers of updates",
        ),
    ],
)
def test_what_cannot_act_is_refused(make, guard, words):
    with pytest.raises(ConfigurationError, match=words):
        fit(make(), good_data(), guard())


def test_a_sync_that_has_no_effect_on_one_host_is_not_counted():
    sync = tfdp.sync.LocalSGD(every=2)
    model = compiled(tfdp.auto_strategy(), distributed(sync=sync))
    assert not model.optimizer.built
    guard = NaNGuard("rollback")
    guard.set_model(model)
    guard.on_train_begin()
