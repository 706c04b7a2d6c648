"""What replicas do to what they share: nobody waits for himself, and words for it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    loss_and_gradients,
    make_strategy,
)
from tests.support.replica_steps import distribute, replica_function
from tfdp.errors import CollectiveError, LocalStateWarning

# Two updates by gradients below 10 with the learning rate 0.01, each a sum of 12 terms,
# of which two orders differ by 2 * 12 * 6e-8 * 10 * 0.01 * 2 = 3e-7 at most.
TOLERANCE = 1e-6


def over_replicas(value):
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


def notes():
    """A list, and what a program calls to note a word and a number there."""
    seen = []

    def note(what, value):
        tf.py_function(lambda v: seen.append((what, int(v))), [value], [])

    return seen, note


class Acting(keras.Model):
    """Does something around an update in each step: `before(x)` gives the rows."""

    def __init__(self, before, after):
        super().__init__()
        self.before, self.after = before, after
        self.dense = keras.layers.Dense(5)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        x = self.before(x)
        loss, gradients = loss_and_gradients(self, (x, y))
        self.optimizer.apply(gradients, self.trainable_variables)
        self.after(tf.reduce_sum(self.dense.kernel))
        return {"loss": loss}


def with_python_calls():
    def before(x):
        return tf.ensure_shape(tf.py_function(lambda v: v, [x], x.dtype), x.shape)

    return before, lambda total: tf.py_function(lambda v: None, [total], [])


def with_assertions():
    """As `tf.image` and others do it: rows wait for a check of them."""

    def before(x):
        check = tf.debugging.Assert(tf.reduce_all(x < 1e9), [x])
        with tf.control_dependencies([check]):
            return tf.identity(x)

    return before, lambda total: tf.debugging.Assert(total < 1e9, [total])


def with_a_variable():
    scale = tf.Variable(0.5)
    return lambda x: x * scale, lambda total: scale.assign(total)


def with_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.5)
    key = tf.constant(1, tf.int64)

    def before(x):
        return x * tf.ensure_shape(table.lookup(key), [])

    return before, lambda total: table.insert(key, total)


def with_printing():
    def before(x):
        tf.print(tf.reduce_sum(x) > -1e9)
        return x

    return before, lambda total: tf.print(total > -1e9)


KINDS = {
    "python": with_python_calls,
    "assertions": with_assertions,
    "variable": with_a_variable,
    "table": with_a_table,
    "printing": with_printing,
}


def fitted(strategy, kind):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = Acting(*kind())
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    model.fit(*classification_data(24), batch_size=12, verbose=0, shuffle=False)
    return model


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2},
        {"replicas": 3, "engine": "tensorflow"},
        {"replicas": 3, "shard": "parameters"},
        {"replicas": 4, "hierarchy": (2, 2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KINDS)
def test_what_replicas_do_before_and_behind_an_update(name, options):
    """In the order of the graph's building all but the printing waits for ever."""
    model = fitted(make_strategy(**options), KINDS[name])
    one = fitted(tf.distribute.get_strategy(), KINDS[name])
    for mine, theirs in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE)


def test_beside_functions_that_were_written_down():
    """Compression across replicas calls some, of which nobody has a graph."""
    strategy = make_strategy(
        2, compression=tfdp.compression.Int8(), compression_across="replicas"
    )
    model = fitted(strategy, KINDS["printing"])
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_beside_a_function_that_is_called_twice(engine):
    """Its exchanges have the same names in both calls."""
    strategy = make_strategy(2, engine=engine)
    within, (seen, note) = tf.function(over_replicas), notes()

    def replica_step(x):
        note("before", x)
        once = within(x)
        note("between", once)
        return within(once)

    assert replica_function(strategy, replica_step)([1.0, 2.0]) == [[6.0], [6.0]]
    words = [what for what, _ in seen]
    assert words == ["before"] * 2 + ["between"] * 2


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_each_replica_has_the_order_of_its_program(engine):
    """Also where what comes later waits for no exchange, and around a run."""
    strategy = make_strategy(3, engine=engine)
    seen, note = notes()

    def replica_step(x):
        note("own", x)
        note("sum", over_replicas(x))
        note("end", x)
        return x

    run = replica_function(strategy, replica_step)

    @tf.function
    def step():
        note("before", tf.constant(0))
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(1 + context.replica_id_in_sync_group)
        )
        strategy.run(replica_step, args=(rows,))
        note("behind", tf.constant(0))

    wanted = [
        *[("own", 1), ("own", 2), ("own", 3)],
        *[("sum", 6), ("end", 1), ("sum", 6), ("end", 2), ("sum", 6), ("end", 3)],
    ]
    run([1, 2, 3])
    assert seen == wanted
    seen.clear()
    step()
    assert seen == [("before", 0), *wanted, ("behind", 0)]


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_what_lies_between_two_runs_stays_there(engine):
    """The first run has exchanges and no effects of its own."""
    strategy = make_strategy(2, engine=engine)
    seen, note = notes()

    def noting(x):
        note("own", x)
        total = over_replicas(x)
        note("sum", total)
        return total

    def twice(x):
        note("first", tf.constant(0))
        strategy.run(over_replicas, args=(x,))
        note("between", tf.constant(0))
        return strategy.run(noting, args=(x,))

    function = tf.function(twice)
    for _ in range(3):
        seen.clear()
        function(distribute(strategy, [1.0, 2.0]))
        words = [what for what, _ in seen]
        assert words == ["first", "between", "own", "own", "sum", "sum"]


def test_a_counter_that_replicas_share_is_changed_in_their_order():
    """One replica behind the other, before an exchange as well as behind it."""
    strategy = make_strategy(3)
    counter = tf.Variable(0)

    def replica_step(x):
        before = tf.identity(counter.assign_add(1))
        total = over_replicas(x * before)
        return before, total, tf.identity(counter.assign_add(10 * total))

    run = replica_function(strategy, replica_step)
    assert run([1, 1, 1]) == [[1, 6, 63], [2, 6, 123], [3, 6, 183]]
    assert counter.numpy() == 183


def test_replicas_that_take_turns():
    """A `merge_call` has the graphs of replicas built by turns."""
    strategy = make_strategy(2)
    shared = tf.Variable(1.0)

    def replica_step(x):
        x = x * shared
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda strategy: None)
        total = over_replicas(x)
        shared.assign(total)
        return total

    run = replica_function(strategy, replica_step)
    assert run([1.0, 2.0]) == [[3.0], [3.0]]
    assert run([1.0, 2.0]) == [[9.0], [9.0]]


def test_replicas_that_take_turns_keep_the_order_of_their_program():
    strategy = make_strategy(2)
    shared = tf.Variable(1.0)

    def replica_step(x):
        tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        shared.assign(over_replicas(x * shared))
        shared.assign(2.0)
        return x

    replica_function(strategy, replica_step)([1.0, 2.0])
    assert shared.numpy() == 2.0


def test_a_function_that_meets_nobody_may_use_several_things():
    """A teacher that was made outside of the scope, moved towards the weights."""
    strategy = make_strategy(2)
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    with strategy.scope():
        own = tf.Variable(3.0)

    @tf.function
    def target(x):
        return x * first * second + own

    def replica_step(x):
        total = over_replicas(target(x))
        first.assign(total)
        second.assign(0.5)
        own.assign(-total)
        return total, own + 0.0

    run = replica_function(strategy, replica_step)
    # (1 + 2) * 1 * 2 + 2 * 3, and then (1 + 2) * 12 * 0.5 - 2 * 12.
    assert run([1.0, 2.0]) == [[12.0, -12.0]] * 2
    assert run([1.0, 2.0]) == [[-6.0, 6.0]] * 2


def test_a_function_that_does_both_is_refused():
    """It cannot be half way when the next replica begins."""
    strategy = make_strategy(2)
    shared = tf.Variable(1.0)

    @tf.function
    def within(x):
        total = over_replicas(x * shared)
        shared.assign(total)
        return total

    with pytest.raises(CollectiveError, match=r"not made in strategy\.scope\(\)"):
        replica_function(strategy, lambda x: within(x))([1.0, 2.0])


CHANGES = {
    "counter": (lambda v, x: v.assign_add(1.0), "is counted up by each of 2 replicas"),
    "sum": (lambda v, x: v.assign_add(tf.reduce_sum(x)), None),
    "maximum": (lambda v, x: v.assign(tf.maximum(v, tf.reduce_max(x))), None),
    "of before": (lambda v, x: v.assign(0.9 * v), "from its previous value"),
    "of rows": (lambda v, x: v.assign(tf.reduce_mean(x)), "of its own rows"),
    "of all rows": (lambda v, x: v.assign(over_replicas(tf.reduce_sum(x))), None),
    "a number": (lambda v, x: v.assign(2.0), None),
}


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("name", CHANGES)
def test_a_variable_of_no_replica_is_told_of(name, recwarn):
    change, words = CHANGES[name]
    shared = tf.Variable(1.0, name="temperature")

    def kind():
        return lambda x: [x, change(shared, x)][0], lambda total: None

    if words is not None:
        words = f"'temperature', which was not made in .*{words}"
        told = pytest.warns(LocalStateWarning, match=words)
    else:
        told = contextlib.nullcontext()
    with told:
        fitted(make_strategy(2), kind)
    if words is None:
        assert not [w for w in recwarn if w.category is LocalStateWarning]


class AppliesTwice(keras.Model):
    """A critic, as keras.io's WGAN-GP has it, whose optimizer nobody has built."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        self.own_optimizer = keras.optimizers.RMSprop(0.01)

    def train_step(self, x):
        weights = self.net.trainable_variables
        for _ in range(2):
            with tf.GradientTape() as tape:
                rows = tf.reduce_mean(self.net(x, training=True) ** 2)
                loss = tfdp.losses.local_mean(rows)
            gradients = tape.gradient(loss, weights)
            self.own_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@pytest.mark.filterwarnings("error::tfdp.errors.LocalStateWarning")
def test_slots_that_a_step_makes_are_no_shared_variables():
    found = []
    x = np.random.default_rng(1).normal(size=(16, 6)).astype("float32")
    for replicas in (1, 2):
        with make_strategy(replicas).scope():
            keras.utils.set_random_seed(3)
            model = AppliesTwice()
            model.compile(jit_compile=False)
        model.fit(x, batch_size=8, shuffle=False, verbose=0)
        found.append(model.net.get_weights())
    for one, several in zip(*found, strict=True):
        # Four updates of at most 0.03, gradients of 8 terms: 4 * 0.03 * 8 u = 6e-8,
        # and RMSprop divides by roots as small as 0.3 of them.
        np.testing.assert_allclose(several, one, rtol=0, atol=2e-6)
