"""Calls by a conditional: what they return, and in which order they run."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp._private import shared_calls
from tfdp._private.names import current_rank
from tfdp._private.one_call import as_conditional
from tfdp._private.shared_graphs import trace_alone


def steps_of(body, looked_into):
    """What each of two replicas has after two calls of `body(variable, number)`.

    Before, between and behind the calls the replica itself changes its variable.
    """
    strategy = make_strategy(2)
    with strategy.scope():
        variable = tf.Variable(tf.range(4.0))
    traced = []

    @tf.function
    def step(number):
        def replica():
            rank = current_rank()
            own = variable.values[rank]
            own.assign_add(tf.fill([4], tf.cast(rank, tf.float32)))
            if not traced:
                device = strategy.extended.worker_devices[rank]
                given = [tf.identity(number)]
                traced.append(trace_alone(lambda g: body(own, g[0]), given, device))
            first = traced[0].call([number], rank, looked_into=looked_into)
            own.assign(2.0 * own)
            second = traced[0].call([number + 1.0], rank, looked_into=looked_into)
            own.assign_add(tf.ones([4]))
            return [first, second]

        return strategy.run(replica)

    results = tf.nest.map_structure(strategy.experimental_local_results, step(3.0))
    graph = step.get_concrete_function(3.0).graph
    kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("If") == (0 if looked_into else 4)
    return results, [copy.numpy() for copy in variable.values]


def in_place(variable, number):
    variable.assign_sub(number * tf.sqrt(variable + 1.0))
    return {"read": variable.read_value(), "number": number}


def placed(variable, number):
    matrix = tf.reshape(variable, [2, 2])
    variable.assign(tf.reshape(matrix @ matrix, [4]) / number)
    return (tf.reduce_sum(matrix), None, [matrix])


@pytest.mark.parametrize("body", [in_place, placed])
def test_a_call_by_a_conditional_is_a_plain_one(body, monkeypatch):
    found = []
    plain = shared_calls._runs_in_place

    def runs_in_place(function):
        found.append(plain(function))
        return found[-1]

    monkeypatch.setattr(shared_calls, "_runs_in_place", runs_in_place)
    expected, expected_copies = steps_of(body, True)
    results, copies = steps_of(body, False)
    assert found == [body is in_place]
    for here, there in zip(copies, expected_copies, strict=True):
        np.testing.assert_array_equal(here, there)
    assert not np.array_equal(copies[0], copies[1])
    tf.nest.assert_same_structure(results, expected)
    for here, there in zip(
        tf.nest.flatten(results), tf.nest.flatten(expected), strict=True
    ):
        assert (here is None) == (there is None)
        if here is not None:
            np.testing.assert_array_equal(here.numpy(), there.numpy())


@pytest.mark.parametrize("returns", [True, False])
def test_the_other_branch_fails(returns):
    variable = tf.Variable(1.0)

    @tf.function
    def body():
        variable.assign_add(1.0)
        return [tf.identity(variable)] if returns else None

    concrete = body.get_concrete_function()
    outputs = [(tensor.dtype, tensor.shape) for tensor in concrete.outputs]

    @tf.function
    def step(holds):
        function, inputs = concrete._inference_function, concrete.captured_inputs
        as_conditional(function, inputs, outputs, holds)

    step(tf.constant(True))
    assert variable.numpy() == 2.0
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(False))
    assert variable.numpy() == 2.0
