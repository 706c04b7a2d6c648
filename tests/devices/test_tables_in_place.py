"""A table of which updates change rows is not copied for who reads it."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp._private.names import own_copy
from tfdp.step.rows_in_place import read_in_place

WORDS, WIDTH = 1500, 6

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "distributed": lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(0.5)),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
}


def fitted(strategy, make_optimizer=OPTIMIZERS["sgd"], **options):
    """A model with a table, its optimizer and its words after four steps."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(2)
    words = rng.integers(0, WORDS, (48, 5))
    labels = rng.normal(size=(48, 1)).astype(np.float32)
    with strategy.scope():
        layers = [
            keras.layers.Embedding(WORDS, WIDTH),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        model.compile(make_optimizer(), "mse", **options)
    model.fit(words, labels, batch_size=12, epochs=1, shuffle=False, verbose=0)
    return model


def copies_of(model, replicas):
    """Of the table, and of what an optimizer keeps for each of its numbers."""
    shaped = [v.value for v in model.optimizer.variables if v.shape == (WORDS, WIDTH)]
    tables = [model.layers[0].embeddings.value, *shaped]
    return [own_copy(table, rank) for table in tables for rank in range(replicas)]


def read(variable):
    """What TensorFlow reads, at its address: not a copy for NumPy."""
    return np.asarray(
        tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    )


def is_read_in_place(variable):
    return np.shares_memory(read(variable), read(variable))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_who_reads_gets_a_copy_without_it(monkeypatch, optimizer):
    # Else the other rows would show nothing.
    monkeypatch.setattr("tfdp.step.features.read_in_place", lambda ops: None)
    model = fitted(make_strategy(2), OPTIMIZERS[optimizer])
    assert not any(map(is_read_in_place, copies_of(model, 2)))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_is_read_where_it_lies(optimizer, replicas):
    model = fitted(make_strategy(replicas), OPTIMIZERS[optimizer])
    for copy in copies_of(model, replicas):
        assert is_read_in_place(copy)


def test_with_several_steps_in_a_call():
    model = fitted(make_strategy(2), steps_per_execution=2)
    assert all(map(is_read_in_place, copies_of(model, 2)))


def test_what_was_read_before_an_update_stays_as_it_was():
    model = fitted(make_strategy(2))
    table = copies_of(model, 2)[0]
    held = read(table)
    before = held.copy()
    words = np.arange(12 * 5).reshape(12, 5)
    model.fit(words, np.ones((12, 1)), batch_size=12, verbose=0)
    np.testing.assert_array_equal(held, before)
    after = read(table)
    changed = np.flatnonzero((after != before).any(axis=1))
    np.testing.assert_array_equal(changed, np.arange(60))
    assert is_read_in_place(table)


def test_a_step_that_reads_the_table_between_updates_sees_each_of_them():
    table = tf.Variable(tf.zeros([WORDS, WIDTH]))
    rows = tf.constant([3, 5])

    @tf.function
    def step():
        first = tf.identity(table.read_value())
        table.scatter_add(tf.IndexedSlices(tf.ones([2, WIDTH]), rows))
        second = tf.identity(table.read_value())
        table.scatter_sub(tf.IndexedSlices(tf.fill([2, WIDTH], 3.0), rows))
        read_in_place(tf.compat.v1.get_default_graph().get_operations())
        return first, second, tf.identity(table.read_value())

    for turn in range(2):
        sums = [float(tf.reduce_sum(each)) / (2 * WIDTH) for each in step()]
        assert sums == [-2 * turn, 1 - 2 * turn, -2 - 2 * turn]
    assert is_read_in_place(table)


@pytest.mark.parametrize("around", ["cond", "while", "function", "all"])
def test_an_update_within_functions_is_found(around):
    table = tf.Variable(tf.zeros([WORDS, WIDTH]))

    def change():
        ones = tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([7]))
        table.scatter_add(ones)
        return tf.constant(0)

    def within_cond(inner):
        return lambda: tf.cond(
            tf.random.uniform([]) < 2.0, inner, lambda: tf.constant(0)
        )

    def within_while(inner):
        def body(turn):
            return turn + 1 + inner()

        return lambda: tf.while_loop(lambda turn: turn < 1, body, [tf.constant(0)])[0]

    wrappers = {"cond": within_cond, "while": within_while, "function": tf.function}
    chosen = wrappers.values() if around == "all" else [wrappers[around]]
    wrapped = functools.reduce(lambda inner, wrap: wrap(inner), chosen, change)

    @tf.function
    def step():
        result = wrapped()
        read_in_place(tf.compat.v1.get_default_graph().get_operations())
        return result

    step()
    assert is_read_in_place(table)
    assert float(tf.reduce_sum(table)) == WIDTH


def test_a_step_that_xla_compiles_as_a_whole_has_no_such_mode():
    """XLA has no kernel for what ends it."""
    strategy = make_strategy(1)
    with strategy.scope():
        table = tf.Variable(tf.zeros([WORDS, WIDTH]))

    def replica(places):
        ones = tf.ones([tf.shape(places)[0], WIDTH])
        table.scatter_add(tf.IndexedSlices(ones, places))

    @tf.function(jit_compile=True)
    def step(places):
        strategy.run(replica, args=(places,))

    step(tf.constant([3, 5]))
    assert float(tf.reduce_sum(table)) == 2 * WIDTH


def test_a_variable_that_a_step_makes_is_left_alone():
    """In a branch that is not taken it is never there."""

    def change(handle):
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([4, 2]))
        tf.raw_ops.ResourceScatterAdd(
            resource=handle, indices=[1], updates=tf.ones([1, 2])
        )
        return tf.constant(1)

    def replica(x):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[4, 2], shared_name="assigned_in_a_branch"
        )
        return tf.cond(x > 0, lambda: change(handle), lambda: tf.constant(0))

    strategy = make_strategy(2)

    @tf.function
    def step(x):
        return strategy.run(replica, args=(x,))

    assert [int(each) for each in step(tf.constant(-1)).values] == [0, 0]


def test_several_runs_in_a_function_end_it_once_each():
    strategy = make_strategy(2)
    with strategy.scope():
        table = tf.Variable(tf.zeros([WORDS, WIDTH]))

    def replica():
        first = tf.reduce_sum(tf.convert_to_tensor(table))
        table.scatter_add(
            tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([3])),
        )
        return first

    @tf.function
    def steps():
        return [strategy.run(replica) for _ in range(3)]

    sums = [[float(each) / WIDTH for each in one.values] for one in steps()]
    assert sums == [[0, 0], [1, 1], [2, 2]]
    graph = steps.get_concrete_function().graph
    types = [op.type for op in graph.get_operations()]
    assert types.count("DisableCopyOnRead") == 3 * 2
