"""The graph of the forward and backward pass: traced for one replica, called by all.

For two, which are compared, where a person's code runs in it.

What replicas share gives what graphs of their own give: the reference is the same
training without it. What they cannot share is noticed.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp.step import call, shared_functions, shared_pass, shared_update

pytestmark = pytest.mark.timeout(250)

REPLICAS = 3
ROWS, FEATURES, CLASSES = 21, 6, 3


class Counted(keras.layers.Layer):
    """Counts how often it is traced in a training step."""

    traces = 0

    def call(self, inputs, training=False):
        if training:
            type(self).traces += 1
        return self.change(inputs) if training else inputs

    def change(self, inputs):
        return 2.0 * inputs


class OfReplica(Counted):
    """Python decides by the rank, and alike on the first two replicas."""

    def change(self, inputs):
        context = tf.distribute.get_replica_context()
        rank = int(tf.get_static_value(context.replica_id_in_sync_group))
        return inputs * 0.0 if rank == 2 else inputs


class OfTrace(Counted):
    """Python does something else in each trace, and asks nobody."""

    def change(self, inputs):
        return inputs * float(self.traces)


class Caught(Counted):
    """Asks for the rank, and takes an error for "no replica"."""

    def change(self, inputs):
        try:
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        except Exception:
            rank = 0
        return inputs * tf.cast(1 + rank, inputs.dtype)


class OfTensor(Counted):
    """The rank is in the graph."""

    def change(self, inputs):
        context = tf.distribute.get_replica_context()
        return inputs * tf.cast(1 + context.replica_id_in_sync_group, inputs.dtype)


class Noisy(Counted):
    """Draws from a generator that TensorFlow keeps in the operation."""

    def change(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


class Exchanging(Counted):
    """Sums over the replicas within the pass."""

    def change(self, inputs):
        context = tf.distribute.get_replica_context()
        rows = tf.distribute.ReduceOp.SUM
        total = context.all_reduce(rows, tf.reduce_sum(tf.stop_gradient(inputs)))
        return inputs + 0.01 * total


class Branching(Counted):
    """A conditional, and a state of its own."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def change(self, inputs):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
        return tf.cond(
            tf.reduce_sum(inputs) > 0, lambda: inputs - self.mean, lambda: 2.0 * inputs
        )


class Functional(Counted):
    """A `tf.function` of its own, which uses a weight, and is called twice."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    @tf.function
    def scaled(self, inputs):
        return self.scale * tf.nn.tanh(inputs)

    def change(self, inputs):
        return self.scaled(self.scaled(inputs))


class Late(Counted):
    """Makes a variable when it is called, which all replicas do together."""

    kept: list = []

    def change(self, inputs):
        if not self.kept:
            self.kept.append(tf.Variable([1.0, 2.0], trainable=False))
        return inputs * tf.reduce_sum(self.kept[0])


class Counting(keras.optimizers.SGD):
    """A `tf.function` of its own, which counts in a variable."""

    def build(self, variables):
        super().build(variables)
        self.calls = self.add_variable((), name="calls", initializer="zeros")

    @tf.function
    def counted(self, gradient):
        self.calls.assign_add(1.0)
        return gradient / (self.calls + 1.0)

    def update_step(self, gradient, variable, learning_rate):
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, self.counted(gradient) * rate)


class Table(keras.optimizers.schedules.LearningRateSchedule):
    """Rates by a table, which lies on the host and belongs to no replica."""

    def __init__(self):
        keys, rates = tf.constant([0, 3], tf.int64), tf.constant([0.02, 0.01])
        pairs = tf.lookup.KeyValueTensorInitializer(keys, rates)
        self.table = tf.lookup.StaticHashTable(pairs, 0.005)

    def __call__(self, step):
        return self.table.lookup(tf.cast(step, tf.int64))


def layers_of(*own):
    return [
        keras.Input((FEATURES,)),
        keras.layers.Dense(8, "relu", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        *own,
        keras.layers.Dense(CLASSES),
    ]


def plain():
    return keras.Sequential(layers_of())


def with_dropout():
    layer = keras.layers.Dropout(0.3, seed=4)
    return keras.Sequential(layers_of(layer, keras.layers.GaussianNoise(0.1)))


def convolution():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Reshape((FEATURES, 1)),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def with_branches():
    return keras.Sequential(layers_of(Branching()))


def with_functions():
    return keras.Sequential(layers_of(Functional()))


def recurrent():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Reshape((3, FEATURES // 3)),
            keras.layers.GRU(5),
            keras.layers.Dense(CLASSES),
        ]
    )


def two_outputs():
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    outputs = {name: keras.layers.Dense(CLASSES, name=name)(hidden) for name in "ab"}
    return keras.Model(inputs, outputs)


MODELS = {
    "plain": plain,
    "dropout": with_dropout,
    "convolution": convolution,
    "branches": with_branches,
    "functions": with_functions,
    "recurrent": recurrent,
    "two-outputs": two_outputs,
}

# Those with code of a person: traced for two replicas.
OWN_CODE = ("branches", "functions", "rates-by-table")

CASES = {
    **{name: (name, {}) for name in MODELS},
    "weights": ("plain", {"sample_weight": True}),
    "clipped-ema": (
        "plain",
        {"optimizer": {"global_clipnorm": 0.1, "use_ema": True}},
    ),
    "accumulated": (
        "plain",
        {"optimizer": {"gradient_accumulation_steps": 2}},
    ),
    "three-steps": ("plain", {"compile": {"steps_per_execution": 3}}),
    "stage-1": ("plain", {"shard": "optimizer"}),
    "mixed-float16": ("dropout", {"policy": "mixed_float16"}),
    "float16-accumulated": (
        "plain",
        {"policy": "mixed_float16", "optimizer": {"gradient_accumulation_steps": 2}},
    ),
    "rates-by-table": ("plain", {"rate": Table}),
    "two-rows": ("dropout", {"rows": 11}),  # the last batch: two rows for three
    "whole-batches": ("dropout", {"rows": 18}),
}


@pytest.fixture(autouse=True)
def of_small_models(monkeypatch):
    monkeypatch.setattr(shared_pass, "LEAST_VARIABLES", 1)
    monkeypatch.setattr(shared_update, "LEAST_VARIABLES", 1)
    Counted.traces = 0
    for kind in Counted.__subclasses__():
        kind.traces = 0


@pytest.fixture
def shared(monkeypatch):
    """Whether two replicas were found alike, one answer for each pass compared."""
    return answers_of("are_alike", monkeypatch)


@pytest.fixture
def shown(monkeypatch):
    """Whether one trace said all of a pass, one answer for each."""
    return answers_of("is_shown_by_one", monkeypatch)


def answers_of(name, monkeypatch, believed=True):
    found = []
    plain_answer = getattr(shared_functions, name)

    def answer_of(traced, *others):
        answer = plain_answer(traced, *others)
        # Not the update; nor the means of what layers store, which are tfdp's.
        if traced.own and len(traced.own) > 1:
            found.append(answer)
        return answer if believed else False

    monkeypatch.setattr(shared_functions, name, answer_of)
    return found


def train(make_model, options, replicas=REPLICAS):
    """All that the model holds, and what it reported."""
    keras.utils.set_random_seed(5)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(options.get("policy", "float32"))
    try:
        strategy = make_strategy(replicas, options.get("shard", "none"))
        with strategy.scope():
            model = make_model()
            rate = options.get("rate", lambda: 0.01)()
            kind = options.get("kind", keras.optimizers.Adam)
            optimizer = kind(rate, **options.get("optimizer", {}))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            metrics = ["accuracy"]
            has_two = make_model is two_outputs
            if has_two:
                metrics = {name: ["accuracy"] for name in "ab"}
                loss = dict.fromkeys("ab", loss)
            compiled = options.get("compile", {})
            model.compile(optimizer, loss, metrics=metrics, **compiled)
    finally:
        keras.config.set_dtype_policy(before)
    random = np.random.default_rng(3)
    rows = options.get("rows", ROWS)
    inputs = random.normal(size=(rows, FEATURES)).astype(np.float32)
    targets = random.integers(0, CLASSES, rows)
    if has_two:
        targets = dict.fromkeys("ab", targets)
    weights = random.uniform(size=rows) if options.get("sample_weight") else None
    history = model.fit(
        inputs,
        targets,
        sample_weight=weights,
        batch_size=9,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    values = [variable.numpy() for variable in model.weights]
    return values, history.history


def without_sharing(monkeypatch):
    monkeypatch.setattr(call, "can_share_pass", lambda *given: False)


@pytest.mark.worth_seconds(22)
@pytest.mark.parametrize("name", CASES)
def test_a_shared_pass_is_each_replicas_own(name, shared, shown, monkeypatch):
    model, options = CASES[name]
    values, history = train(MODELS[model], options)
    assert shown
    assert all(shown)
    assert len(shared) == (len(shown) if name in OWN_CODE else 0)
    assert all(shared)
    without_sharing(monkeypatch)
    own_values, own_history = train(MODELS[model], options)
    for here, there in zip(values, own_values, strict=True):
        np.testing.assert_array_equal(here, there)
    assert history == own_history


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("name", CASES)
def test_two_traces_agree_with_what_one_shows(name, shared, monkeypatch):
    shown = answers_of("is_shown_by_one", monkeypatch, believed=False)
    model, options = CASES[name]
    train(MODELS[model], options)
    assert shown
    assert all(shown)
    assert shared == shown


def test_own_layers_are_traced_for_two_replicas():
    train(lambda: keras.Sequential(layers_of(Counted())), {"rows": 18}, replicas=4)
    assert Counted.traces == 2


def test_layers_of_keras_are_traced_for_one_replica(monkeypatch):
    counted = []
    own = shared_functions.trace_alone

    def trace_alone(*given):
        counted.append(given)
        return own(*given)

    monkeypatch.setattr(shared_functions, "trace_alone", trace_alone)
    train(plain, {"rows": 18}, replicas=4)
    # The pass, the shares of what batch normalization stores, their means, the update.
    assert len(counted) == 4


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("own", [{}, {"kind": Counting}], ids=["adam", "counting"])
def test_what_is_made_late_or_counted_is_each_replicas(own, monkeypatch):
    def trained():
        Late.kept.clear()
        made = train(lambda: keras.Sequential(layers_of(Late())), own)
        copies = [copy.numpy().tolist() for copy in Late.kept[0].values]
        assert copies == [[1.0, 2.0]] * REPLICAS
        return made

    values, history = trained()
    without_sharing(monkeypatch)
    monkeypatch.setattr(shared_update, "LEAST_VARIABLES", 1000)
    own_values, own_history = trained()
    for here, there in zip(values, own_values, strict=True):
        np.testing.assert_array_equal(here, there)
    assert history == own_history


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("kind", [OfReplica, OfTensor, Exchanging, Caught])
def test_what_replicas_do_apart_each_does(kind, monkeypatch):
    values, history = train(lambda: keras.Sequential(layers_of(kind())), {"rows": 18})
    # The first replica once in vain.
    assert kind.traces == REPLICAS + 1
    without_sharing(monkeypatch)
    own, own_history = train(lambda: keras.Sequential(layers_of(kind())), {"rows": 18})
    for here, there in zip(values, own, strict=True):
        np.testing.assert_array_equal(here, there)
    assert history == own_history


class Kept(Counted):
    """Leaves a tensor behind."""

    def change(self, inputs):
        self.mean = tf.reduce_mean(inputs)
        return inputs


def own_metric(y, p):
    return tf.reduce_mean(p, axis=-1)


@pytest.mark.parametrize("asks", ["a metric", "an optimizer", "the model", "nobody"])
def test_what_a_layer_leaves_may_be_asked_for_behind_the_pass(asks, shown):
    """A tensor of a function that replicas share is out of reach."""
    layer = Kept()

    class OfLayer(keras.metrics.Mean):
        def update_state(self, y, p, sample_weight=None):
            return super().update_state(layer.mean)

    class ByLayer(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient * layer.mean, variable, learning_rate)

    with make_strategy(REPLICAS).scope():
        model = keras.Sequential(layers_of(layer))
        metrics = [OfLayer("asked") if asks == "a metric" else own_metric]
        metrics = None if asks == "the model" else metrics
        optimizer = ByLayer(0.1) if asks == "an optimizer" else "sgd"
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=metrics)
        if asks == "the model":
            mean = keras.metrics.Mean("asked")

            def compute_metrics(x, y, y_pred, sample_weight=None):
                mean.update_state(layer.mean)
                return {"asked": mean.result()}

            model.compute_metrics = compute_metrics
    inputs = np.ones((18, FEATURES), np.float32)
    model.fit(inputs, np.zeros(18), batch_size=9, verbose=0)
    # Functions that work on what they are given are in nobody's way.
    assert bool(shown) == (asks == "nobody")


def test_what_each_trace_does_otherwise_each_replica_does(monkeypatch):
    # One trace for all would be wrong, and nothing in it says so.
    values, history = train(
        lambda: keras.Sequential(layers_of(OfTrace())), {"rows": 18}
    )
    assert OfTrace.traces == REPLICAS
    OfTrace.traces = 0
    without_sharing(monkeypatch)
    own, own_history = train(
        lambda: keras.Sequential(layers_of(OfTrace())), {"rows": 18}
    )
    for here, there in zip(values, own, strict=True):
        np.testing.assert_array_equal(here, there)
    assert history == own_history


def test_random_operations_of_tensorflow_are_each_replicas_own():
    train(lambda: keras.Sequential(layers_of(Noisy())), {"rows": 18})
    assert Noisy.traces == REPLICAS + 1


def test_what_differs_in_the_graph_is_each_replicas_own(monkeypatch):
    for name in ("are_alike", "is_shown_by_one"):
        monkeypatch.setattr(shared_functions, name, lambda *given: False)
    values, _ = train(with_dropout, {"rows": 18})
    without_sharing(monkeypatch)
    own, _ = train(with_dropout, {"rows": 18})
    for here, there in zip(values, own, strict=True):
        np.testing.assert_array_equal(here, there)


def test_masks_of_predictions_reach_the_metrics(shown, monkeypatch):
    def masked():
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Reshape((FEATURES, 1)),
                keras.layers.Masking(0.0),
                keras.layers.LSTM(CLASSES, return_sequences=True),
            ]
        )

    def fit():
        keras.utils.set_random_seed(5)
        strategy = make_strategy(REPLICAS)
        with strategy.scope():
            model = masked()
            # A sum: a mean over what is not masked is an exchange within the pass.
            loss = keras.losses.MeanSquaredError(reduction="sum")
            model.compile("sgd", loss, metrics=["mse"])
        random = np.random.default_rng(3)
        inputs = random.integers(0, 2, (18, FEATURES)).astype(np.float32)
        targets = random.normal(size=(18, FEATURES, CLASSES)).astype(np.float32)
        return model.fit(inputs, targets, batch_size=9, verbose=0).history

    history = fit()
    assert shown == [True]
    without_sharing(monkeypatch)
    assert fit() == history


class Adding(keras.layers.Layer):
    """Gives `add_loss` a mean over its rows."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(tf.reduce_sum(tf.square(inputs), axis=-1)))
        return inputs


def test_a_pass_in_vain_leaves_nothing(monkeypatch):
    # The first loss is brought to its share. The second asks the others for the sum of
    # their weights: an exchange. What is noted by then must not meet the layer's loss.
    def fit():
        keras.utils.set_random_seed(5)
        with make_strategy(REPLICAS).scope():
            inputs = keras.Input((FEATURES,))
            hidden = keras.layers.Dense(8, "tanh")(Adding()(inputs))
            outputs = {n: keras.layers.Dense(CLASSES, name=n)(hidden) for n in "ab"}
            model = keras.Model(inputs, outputs)
            asking = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
            model.compile("sgd", {"a": "mse", "b": asking})
        random = np.random.default_rng(3)
        inputs = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
        targets = random.normal(size=(ROWS, CLASSES)).astype(np.float32)
        weights = random.uniform(size=ROWS)
        targets = dict.fromkeys("ab", targets)
        given = {"sample_weight": weights, "batch_size": 9, "verbose": 0}
        return model.fit(inputs, targets, **given).history

    history = fit()
    without_sharing(monkeypatch)
    assert fit() == history
