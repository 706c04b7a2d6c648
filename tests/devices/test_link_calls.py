"""Calls over a link run in the order in which they are built, conditionals included."""

import time

import tensorflow as tf

from tfdp.exchange.link_calls import LinkCalls

# What comes first is slow: whatever does not wait for it runs before it.
SECONDS = {"before": 0.3, "within": 0.2, "after": 0.1, "last": 0.0}


def order_of(build):
    ran = []
    calls = LinkCalls()

    def call(name):
        def exchange(value):
            time.sleep(SECONDS[name])
            ran.append(name)
            return [value]

        spec = tf.TensorSpec([], tf.float32)
        return calls.call(exchange, [tf.constant(1.0)], [spec])[0]

    @tf.function
    def step(taken):
        return build(call, taken)

    for taken in (True, False, True):
        step(tf.constant(taken))
    return ran


def test_a_call_in_a_conditional_keeps_its_place():
    def build(call, taken):
        before = call("before")
        within = tf.cond(taken, lambda: call("within"), lambda: tf.constant(0.0))
        return before, within, call("after"), call("last")

    all_four = ["before", "within", "after", "last"]
    assert order_of(build) == [*all_four, "before", "after", "last", *all_four]


def test_so_does_one_in_two_conditionals():
    def build(call, taken):
        before = call("before")
        within = tf.cond(
            taken,
            lambda: tf.cond(taken, lambda: call("within"), lambda: tf.constant(0.0)),
            lambda: tf.constant(0.0),
        )
        return before, within, call("last")

    three = ["before", "within", "last"]
    assert order_of(build) == [*three, "before", "last", *three]


def test_a_conditional_without_a_call_changes_nothing():
    def build(call, taken):
        before = call("before")
        between = tf.cond(taken, lambda: tf.constant(1.0), lambda: tf.constant(0.0))
        return before, between, call("after"), call("last")

    assert order_of(build) == ["before", "after", "last"] * 3


def test_two_conditionals_in_a_row_keep_theirs():
    def build(call, taken):
        first = tf.cond(taken, lambda: call("before"), lambda: tf.constant(0.0))
        second = tf.cond(taken, lambda: call("within"), lambda: tf.constant(0.0))
        return first, second, call("after"), call("last")

    all_four = ["before", "within", "after", "last"]
    assert order_of(build) == [*all_four, "after", "last", *all_four]


def test_each_call_gets_something_of_the_one_before():
    """TensorFlow's optimizer takes an order out where data say the same as well, and
    then may find those data constant (tests/processes/test_generator_hosts.py)."""
    calls = LinkCalls()
    built = []

    def call(value):
        spec = tf.TensorSpec([], tf.float32)
        (result,) = calls.call(lambda array: [array], [value], [spec])
        built.append(result.op.inputs[0].op)
        return result

    @tf.function
    def step(taken):
        first, second = call(tf.constant(1.0)), call(tf.constant(2.0))
        within = tf.cond(taken, lambda: call(tf.constant(3.0)), lambda: 0.0)
        return first, second, within

    graph = step.get_concrete_function(tf.constant(True)).graph
    first, second, within = built
    assert first in [tensor.op for tensor in second.inputs]
    assert within.graph is not graph
    # Into the conditional it comes as what the branch captures.
    captured = [outer.op for outer, _ in within.graph.captures]
    assert second in captured
