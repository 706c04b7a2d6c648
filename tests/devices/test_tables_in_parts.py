"""Tables in parts (`shard="parameters"`) train as on one device, and only rows travel.

One device is plain Keras on the whole batch. Words repeat within rows and between them,
so optimizers that square each occurrence of a word tell a sum of them apart.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import largest_distance, make_strategy, rounding_bound
from tfdp.exchange.traffic import TrafficMeter

layers, ops = keras.layers, keras.ops
VOCABULARY, WIDTH, WORDS = 21, 4, 3

pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.DeviceWarning")


def classifier(**of_table):
    keras.utils.set_random_seed(3)
    words = keras.Input((WORDS,), dtype="int32")
    rows = layers.Embedding(VOCABULARY, WIDTH, name="table", **of_table)(words)
    return keras.Model(words, layers.Dense(2)(layers.Flatten()(rows)))


def adam(**options):
    return keras.optimizers.Adam(0.01, epsilon=0.1, **options)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": adam,
    "adamw": lambda: keras.optimizers.AdamW(
        0.01, epsilon=0.1, weight_decay=0.1, global_clipnorm=0.3
    ),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, epsilon=1e-3),
    "clipnorm": lambda: adam(clipnorm=0.1),
    "accumulating": lambda: adam(gradient_accumulation_steps=2),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(adam()),
}
# How far an update moves with a gradient: the rate / (1 - momentum), that over the root
# of Adagrad's first square, 0.1, and for Adam the rate / epsilon, 0.1.
RATES = {"momentum": 1.0, "adagrad": 1.0}


def drawn(batch, seed=1):
    """Three full batches and one that lacks a row; of one row, four batches."""
    rng = np.random.default_rng(seed)
    rows = 4 * batch - (batch > 1)
    x = rng.integers(0, 7, (rows, WORDS)).astype("int32")
    x[0, 0], x[-1, -1] = VOCABULARY - 1, 11  # the last part has the last word
    return x, rng.normal(size=(rows, 2)).astype("float32")


def fitted(strategy, build, optimizer, batch=10, **options):
    """The model, its losses, predictions and evaluation; None: one device."""
    x, y = drawn(batch)
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        model = build()
        model.compile(optimizer(), "mse", **{"jit_compile": False, **options})
    fit = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    seen = model.predict(x, batch_size=batch, verbose=0)
    return model, fit.history["loss"], seen, model.evaluate(x, y, batch, verbose=0)


@functools.cache
def on_one_device(name, batch):
    return fitted(None, classifier, OPTIMIZERS[name], batch)


def in_parts(replicas, **options):
    return make_strategy(replicas, shard="parameters", **options)


def assert_alike(own, one, rate=0.1, least=0.0):
    """Eight steps of at most 12 rows; gradients of a row are below 4."""
    bound = max(rounding_bound(one[0], 8, 36, 4.0, rate), least)
    assert largest_distance(one[0].get_weights(), own[0].get_weights()) < bound
    np.testing.assert_allclose(own[1], one[1], atol=100 * bound)
    np.testing.assert_allclose(own[2], one[2], atol=100 * bound)
    np.testing.assert_allclose(own[3], one[3], atol=100 * bound)


def rests_by_rows(model):
    """Whether the first table of a model rests by rows, in parts."""
    [table, *_] = [w for w in model.weights if w.name == "embeddings"]
    return len(getattr(table.value, "layout", table).shard_shape(0)) == 2


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("batch", [12, 9, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_one_device(name, batch, replicas):
    if name not in ("momentum", "adam", "adamw", "adagrad") and replicas != 3:
        pytest.skip("trained on three replicas")
    own = fitted(in_parts(replicas), classifier, OPTIMIZERS[name], batch)
    assert rests_by_rows(own[0])
    assert_alike(own, on_one_device(name, batch), RATES.get(name, 0.1))


class Tied(layers.Layer):
    """A product with the transposed table of another layer: reads the whole."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, inputs):
        return ops.matmul(inputs, ops.transpose(self.table.embeddings))


def of_words(make):
    words = keras.Input((WORDS,), dtype="int32")
    return keras.Model(words, layers.Dense(2)(layers.Flatten()(make(words))))


def tied():
    table = layers.Embedding(VOCABULARY, WIDTH)
    return of_words(
        lambda words: Tied(table)(layers.Dense(WIDTH)(layers.Flatten()(table(words))))
    )


def twice():
    table = layers.Embedding(VOCABULARY, WIDTH)
    return of_words(
        lambda words: layers.Concatenate()([table(words), table((words + 1) % 20)])
    )


def masked():
    words = keras.Input((WORDS,), dtype="int32")
    rows = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(2)(layers.LSTM(3)(rows)))


class Positions(layers.Layer):
    """A table that all replicas look the same positions up in."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS + 2, WIDTH)

    def build(self, shape):
        self.table.build()
        self.built = True

    def call(self, inputs):
        return inputs + self.table(ops.arange(WORDS))


def positions():
    return of_words(lambda words: Positions()(layers.Embedding(21, WIDTH)(words)))


class Doubled(layers.Embedding):
    """A lookup of its own."""

    def call(self, inputs):
        return super().call(inputs) * 2.0


class OfTable(layers.Layer):
    """A layer with a table, for a `call` that looks words up in a way of its own."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(VOCABULARY, WIDTH)

    def build(self, shape):
        self.table.build()
        self.built = True


class Summed(OfTable):
    """A lookup within a loop, where replicas cannot exchange."""

    def call(self, inputs):
        def add(turn, total):
            return turn + 1, total + self.table(inputs)

        start = tf.zeros([tf.shape(inputs)[0], WORDS, WIDTH])
        _, total = tf.while_loop(
            lambda turn, _: turn < 2, add, [0, start], maximum_iterations=2
        )
        return total


def with_lora():
    model = classifier()
    model.get_layer("table").enable_lora(2)
    return model


def frozen():
    model = classifier()
    model.get_layer("table").trainable = False
    return model


def regular():
    constraint = keras.constraints.NonNeg()
    return classifier(embeddings_regularizer="l2", embeddings_constraint=constraint)


FORMS = {
    "tied": tied,
    "twice": twice,
    "masked": masked,
    "positions": positions,
    "from the end": lambda: of_words(lambda w: layers.Embedding(21, WIDTH)(w - 3)),
    "bfloat16": lambda: classifier(dtype="mixed_bfloat16"),
    "rematerialized": lambda: tfdp.remat(classifier()),
    "in a block": lambda: tfdp.remat(classifier(), "whole"),
    "regular": regular,
    "frozen": frozen,
    # Gathered as any weight:
    "in a loop": lambda: of_words(Summed()),
    "lora": with_lora,
}


@pytest.mark.parametrize("form", FORMS)
def test_other_lookups_are_those_of_one_device(form):
    one = fitted(None, FORMS[form], adam)
    own = fitted(in_parts(3), FORMS[form], adam)
    # 8 bits of a number below 4; its gradient may differ by as much.
    least = 2**-9 * 0.1 if form == "bfloat16" else 0.0
    assert_alike(own, one, least=least)


@pytest.mark.parametrize("how", ["steps_per_execution", "float16"])
def test_other_ways_to_step_are_those_of_one_device(how):
    options = {
        "steps_per_execution": {"steps_per_execution": 2},
        "float16": {},
    }[how]
    build, make = classifier, adam
    if how == "float16":
        build = functools.partial(classifier, dtype="mixed_float16")
        make = lambda: keras.optimizers.LossScaleOptimizer(adam())  # noqa: E731
    one = fitted(None, build, make, **options)
    own = fitted(in_parts(2), build, make, **options)
    assert_alike(own, one, least=2**-11 * 0.1 if how == "float16" else 0.0)


def test_words_of_one_replica_are_added_once_if_the_strategy_says_so():
    """Without parts `repeated_rows="sum"` gives the same update."""
    whole = fitted(make_strategy(2, repeated_rows="sum"), classifier, adam)
    own = fitted(in_parts(2, repeated_rows="sum"), classifier, adam)
    assert_alike(own, whole)
    separate = on_one_device("adam", 10)[0].get_weights()
    assert largest_distance(own[0].get_weights(), separate) > 1e-4


def test_gradients_are_summed_and_not_divided_by_the_replicas():
    """A row of each replica has the word; rate 1, gradient 1 in a mean of two: each
    adds -0.5, as on one device. (TorchRec's tables by rows once gave -0.25.)"""
    with in_parts(2).scope():
        words = keras.Input((1,), dtype="int32")
        table = layers.Embedding(4, 3, embeddings_initializer="zeros")
        model = keras.Model(words, table(words))
        loss = lambda y, seen: ops.sum(seen * y, -1)[:, 0]  # noqa: E731
        model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=False)
    x = np.array([[1], [1]], "int32")
    model.fit(x, np.ones((2, 1, 3)), batch_size=2, verbose=0)
    expected = np.zeros((4, 3), "float32")
    expected[1] = -1.0  # -0.5 of each replica
    np.testing.assert_array_equal(model.get_weights()[0], expected)


def test_of_two_words_on_two_replicas_each_owner_gets_its_half():
    with in_parts(2).scope():
        words = keras.Input((1,), dtype="int32")
        table = layers.Embedding(4, 3, embeddings_initializer="zeros")
        model = keras.Model(words, table(words))
        loss = lambda y, seen: ops.sum(seen * y, -1)[:, 0]  # noqa: E731
        model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=False)
    x = np.array([[3], [0]], "int32")
    model.fit(x, np.ones((2, 1, 3)), batch_size=2, verbose=0)
    expected = np.zeros((4, 3), "float32")
    expected[[3, 0]] = -0.5
    np.testing.assert_array_equal(model.get_weights()[0], expected)


def large(rows=1000, width=8):
    keras.utils.set_random_seed(3)
    words = keras.Input((4,), dtype="int32")
    table = layers.Embedding(rows, width, name="table")
    return keras.Model(words, layers.Dense(1)(layers.Flatten()(table(words))))


def compiled(strategy, optimizer, build=large):
    with strategy.scope():
        model = build()
        model.compile(optimizer(), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_step_sends_the_rows_of_its_words(name, replicas):
    """Each replica has 2 rows of 4 words; counted by what owns them."""
    strategy = in_parts(replicas)
    model = compiled(strategy, OPTIMIZERS[name])
    part = -(-1000 // replicas)
    rng = np.random.default_rng(2)
    x = rng.integers(0, 1000, (2 * replicas, 4)).astype("int32")
    x[:, 1] = x[:, 0]  # twice in each row
    meter = TrafficMeter()
    strategy.extended.reducer.transport.traffic.meters.add(meter)
    y = np.zeros((len(x), 1))
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    # How many words each asks of each, in all and once: int32, to all others.
    sent = replicas * (replicas - 1) * 2 * replicas * 4
    for rank in range(replicas):
        own = x[2 * rank : 2 * rank + 2].ravel()
        away = own[own // part != rank]
        once, each = len(np.unique(away)), len(away)
        row = 8 * 4
        sent += once * (4 + row)  # words, and rows from the owners
        sent += once * row if name == "momentum" else each * (row + 4)
    dense = sum(int(np.prod(w.shape)) for w in model.layers[-1].weights)
    assert meter.sent_bytes == sent + 2 * (replicas - 1) * 4 * dense


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_no_tensor_of_a_step_has_the_size_of_a_table(name):
    strategy = in_parts(2)
    model = compiled(strategy, OPTIMIZERS[name])
    x = np.zeros((4, 4), "int32")
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros((4, 1)))).batch(4)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))

    @tf.function(autograph=False)
    def step(batch):
        strategy.run(model.train_step, (batch,))

    graph = step.get_concrete_function(batch).graph
    for operation in graph.get_operations():
        for output in operation.outputs:
            assert output.shape.num_elements() != 1000 * 8, operation


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_holds_its_rows_of_a_table_and_of_its_slots(replicas):
    model = compiled(in_parts(replicas), adam)
    table = model.get_layer("table").embeddings
    slots = [v for v in model.optimizer.variables if v.shape == table.shape]
    assert len(slots) == 2
    part = -(-1000 // replicas)
    for variable in (table, *slots):
        for rank in range(replicas):
            assert variable.value.shard(rank).shape == (part, 8)


def test_files_hold_whole_tables(tmp_path):
    own = fitted(in_parts(2), classifier, adam)[0]
    own.save(tmp_path / "model.keras")
    own.save_weights(tmp_path / "model.weights.h5")
    written = tf.train.Checkpoint(model=own).write(str(tmp_path / "points"))
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(plain.layers[1].embeddings.value, tf.Variable)
    with in_parts(3).scope():
        other = keras.models.load_model(tmp_path / "model.keras")
        by_weights, by_point = classifier(), classifier()
    by_weights.load_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=by_point).read(written).expect_partial()
    for model in (plain, other, by_weights, by_point):
        for read, saved in zip(model.get_weights(), own.get_weights(), strict=True):
            np.testing.assert_array_equal(read, saved)
    x, y = drawn(10, seed=5)
    states = []
    for model in (plain, other):  # both go on with the same slots
        model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
        states.append(model.get_weights())
    bound = rounding_bound(plain, 4, 30, 4.0, 0.1)
    assert rests_by_rows(other)
    assert largest_distance(*states) < bound


@pytest.mark.parametrize("word", [VOCABULARY, -VOCABULARY - 1, 2**31 - 1])
def test_a_word_without_a_row_is_an_error_that_names_the_layer(word):
    with in_parts(2).scope():
        model = classifier()
        model.compile("sgd", "mse", jit_compile=False)
    x, y = drawn(4)
    x[3, 1] = word  # of the second replica
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="table has rows for words 0 to 20"
    ):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    # And the next step runs.
    x[3, 1] = 0
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


def test_tables_that_others_need_whole_are_gathered():
    """Smaller than the replicas; for an owner; and with a call of its own."""
    small = lambda: of_words(lambda w: layers.Embedding(2, WIDTH)(w % 2))  # noqa: E731
    own = fitted(in_parts(3), small, OPTIMIZERS["momentum"])
    assert not rests_by_rows(own[0])
    assert_alike(own, fitted(None, small, OPTIMIZERS["momentum"]), 1.0)
    momentum = OPTIMIZERS["momentum"]
    doubled = lambda: of_words(Doubled(VOCABULARY, WIDTH))  # noqa: E731
    own = fitted(in_parts(3), doubled, momentum)
    assert_alike(own, fitted(None, doubled, momentum), 1.0)
    factored = lambda: keras.optimizers.Adafactor(0.01)  # noqa: E731
    own = fitted(in_parts(3), classifier, factored)
    whole = fitted(make_strategy(3, shard="optimizer"), classifier, factored)
    assert_alike(own, whole, 1.0)


class Padded(keras.Model):
    """A step that keeps the row of word 0, by the places of a gradient."""

    by = "product"

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def call(self, words):
        return self.inner(words)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        table, *others = tape.gradient(loss, self.trainable_variables)
        table = tf.convert_to_tensor(table)
        is_kept = tf.range(tf.shape(table)[0])[:, None] > 0
        if self.by == "product":
            table *= tf.cast(is_kept, table.dtype)
        elif self.by == "quotient":
            table /= tf.where(is_kept, 1.0, 1e9)
        elif self.by == "where":
            table = tf.where(is_kept, table, 0.0)
        else:
            table *= 0.5
        self.optimizer.apply([table, *others], self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("by", ["product", "quotient", "where"])
def test_places_of_a_part_are_refused_in_a_step_of_ones_own(by, monkeypatch):
    # The gradient is of a part: its first row is that of word 11 on another replica.
    monkeypatch.setattr(Padded, "by", by)
    with pytest.raises(tfdp.errors.ConfigurationError, match="not cut as it is"):
        fitted(in_parts(2), Padded, OPTIMIZERS["momentum"])


def test_a_step_of_ones_own_may_scale_the_gradient_of_a_table(monkeypatch):
    monkeypatch.setattr(Padded, "by", "number")
    one = fitted(None, Padded, OPTIMIZERS["momentum"])
    assert_alike(fitted(in_parts(3), Padded, OPTIMIZERS["momentum"]), one, 1.0)


class Last(OfTable):
    """A lookup of which some rows are taken: their gradient is slices."""

    def call(self, inputs):
        rows = tf.reshape(self.table(inputs), [-1, WIDTH])
        places = tf.range(tf.shape(rows)[0])[::-1]
        return tf.reshape(
            tf.gather(tf.gather(rows, places), places), [-1, WORDS, WIDTH]
        )


def test_rows_may_be_taken_from_a_lookup():
    build = lambda: of_words(Last())  # noqa: E731
    assert_alike(fitted(in_parts(3), build, adam), fitted(None, build, adam))


def test_the_plan_counts_the_rows_of_words():
    """4 rows of 4 words on each of 2 replicas: half of 16 rows, and their gradients."""

    def build():
        model = large(20_000)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    plan = tfdp.planning.plan(build, 8, replicas=2, shard="parameters")
    rows, dense = 16 * (8 * 4 + 4), 33 * 4
    assert plan.sent_bytes == rows + dense
    size = 20_000 * 8 * 4
    assert size / 2 <= plan.parts["weights"] < 1.01 * size / 2
    # No part of the step has the size of a part of the table.
    assert sum(plan.parts.values()) < 1.1 * size / 2
