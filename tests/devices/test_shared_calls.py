"""Calls by a conditional: what they return, and in which order they run."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp._private import optimized_once, step_ops
from tfdp._private.names import current_rank
from tfdp._private.one_call import as_conditional
from tfdp._private.shared_graphs import LaterChanges, trace_alone


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


def fail(*given):
    raise ValueError("what the graph optimizer may say")


def in_place(variable, number):
    variable.assign_sub(number * tf.sqrt(variable + 1.0))
    return {"read": variable.read_value(), "number": number}


def placed(variable, number):
    matrix = tf.reshape(variable, [2, 2])
    variable.assign(tf.reshape(matrix @ matrix, [4]) / number)
    return (tf.reduce_sum(matrix), None, [matrix])


@pytest.mark.parametrize("fails", [False, True], ids=["optimized", "not"])
@pytest.mark.parametrize("body", [in_place, placed])
def test_a_call_by_a_conditional_is_a_plain_one(body, fails, monkeypatch):
    if fails:
        monkeypatch.setattr(optimized_once, "_optimized", fail)
    expected, expected_copies = steps_of(body, True)
    results, copies = steps_of(body, False)
    # TensorFlow, where it sees the call's numbers, divides by a product with 1 / n:
    # half a unit in the last place more in each of two calls, doubled by the square.
    most = 4 * np.finfo(np.float32).eps if fails else 0.0
    for here, there in zip(copies, expected_copies, strict=True):
        np.testing.assert_allclose(here, there, rtol=most)
    assert not np.array_equal(copies[0], copies[1])
    tf.nest.assert_same_structure(results, expected)
    for here, there in zip(
        tf.nest.flatten(results), tf.nest.flatten(expected), strict=True
    ):
        assert (here is None) == (there is None)
        if here is not None:
            np.testing.assert_allclose(here.numpy(), there.numpy(), rtol=most)


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


def called_in(graph):
    """The functions that conditionals of `graph`, and of branches in it, call."""
    for op in graph.get_operations():
        if op.type == "If" and step_ops.IS_CALL in op.node_def.attr:
            yield op.get_attr("then_branch").name
        for inner in step_ops.graphs_called(op):
            yield from called_in(inner)


def test_what_is_built_into_a_branch_calls_what_is_optimized():
    """A branch is done before the step is: later changes of its calls would be lost."""
    with make_strategy(2).scope():
        whole = tf.Variable(1.0)
    variable = whole.values[0]
    begun = []

    @tf.function
    def step(number):
        changes = LaterChanges(tf.compat.v1.get_default_graph())

        def body(given):
            variable.assign_add(given[0])

        traced = trace_alone(body, [number], variable.device)

        def call():
            traced.call([number], looked_into=False, changes=changes)
            return number

        tf.cond(number > 0.0, call, lambda: number)
        call()
        begun.extend(called_in(tf.compat.v1.get_default_graph()))
        changes.make()
        return number

    graph = step.get_concrete_function(tf.constant(2.0)).graph
    found = list(called_in(graph))
    assert len(found) == len(begun) == 2
    assert sum("optimized_once" in name for name in begun) == 1
    assert all("optimized_once" in name for name in found)
    step(tf.constant(2.0))
    assert variable.numpy() == 5.0
