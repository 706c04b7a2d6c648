"""Calls over a link run in the order in which they are built, conditionals included."""

import threading
import time

import pytest
import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.exchange.link_calls import LinkCalls
from tfdp.hosts.async_exchanges import AsyncExchanges

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


@pytest.mark.parametrize("inner", ["call", "conditional"])
def test_a_call_in_a_loop_keeps_its_place(inner):
    def build(call, taken):
        def turn(number, total):
            within = call("within")
            if inner == "conditional":
                within = tf.cond(taken, lambda: call("last"), lambda: within)
            return number + 1, total + within

        before = call("before")
        # Nothing is computed from what came before the loop, or in its other turns.
        start = tf.constant(0), tf.constant(0.0)
        _, total = tf.while_loop(lambda number, _: number < 2, turn, start)
        return before, total, call("after")

    turn = ["within", "last"] if inner == "conditional" else ["within"]
    taken = ["before", *turn * 2, "after"]
    assert order_of(build) == [*taken, "before", "within", "within", "after", *taken]


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

    def token_of(op):
        passed = op.inputs[-1].op
        assert passed.type == "Identity"  # for the gradient tape
        return passed.inputs[0]

    @tf.function
    def step(taken):
        first, second = call(tf.constant(1.0)), call(tf.constant(2.0))
        within = tf.cond(taken, lambda: call(tf.constant(3.0)), lambda: 0.0)
        return first, second, within

    graph = step.get_concrete_function(tf.constant(True)).graph
    first, second, within = built
    assert token_of(second).op is first
    assert within.graph is not graph
    # Into the conditional it comes as what the branch captures.
    captured = {id(inner): outer for outer, inner in within.graph.captures}
    assert captured[id(token_of(within))].op is second


class Ahead:
    """Calls ahead of each other; each ends when a test says so.

    Args:
      channels: see `LinkCalls.call_ahead`.
    """

    def __init__(self, channels):
        self.calls = LinkCalls()
        self.channels = channels
        self.ran = []
        self.lock = threading.Lock()
        self.begun = {name: threading.Event() for name in "abcd"}

    def call(self, name, waits_for=None, value=1.0):
        def exchange(channel, number):
            with self.lock:
                self.ran.append((name, channel))
            self.begun[name].set()
            if waits_for is not None:
                assert self.begun[waits_for].wait(60)
            return [2 * number]

        given = tf.constant(value)
        spec = tf.TensorSpec([], tf.float32)
        return self.calls.call_ahead(exchange, [given], [spec], self.channels)[0][0]

    def plain(self, name):
        def exchange(number):
            self.ran.append((name, None))
            return [number]

        spec = tf.TensorSpec([], tf.float32)
        return self.calls.call(exchange, [tf.constant(0.0)], [spec])[0]


def test_as_many_are_under_way_as_there_are_channels():
    """The first does not end before the second has begun."""
    ahead = Ahead(("step", "ahead"))

    @tf.function
    def step():
        return ahead.call("a", "b", 1.0), ahead.call("b", "c", 2.0), ahead.call("c")

    assert [float(number) for number in step()] == [2.0, 4.0, 2.0]
    assert sorted(ahead.ran) == [("a", "step"), ("b", "ahead"), ("c", "step")]


def test_those_of_a_channel_keep_their_order():
    ahead = Ahead(("step",))

    @tf.function
    def step():
        return [ahead.call(name, value=float(n)) for n, name in enumerate("abcd")]

    for _ in range(3):
        assert [float(number) for number in step()] == [0.0, 2.0, 4.0, 6.0]
    assert [name for name, _ in ahead.ran] == list("abcd") * 3


@pytest.mark.parametrize("taken", [True, False])
def test_a_plain_call_comes_after_all_before_it_and_before_all_after_it(taken):
    ahead = Ahead(("step", "ahead"))

    @tf.function
    def step(taken):
        first = [ahead.call("a", "b"), ahead.call("b")]
        within = tf.cond(taken, lambda: ahead.plain("w"), lambda: tf.constant(0.0))
        then = [ahead.plain("x"), ahead.call("c", "d"), ahead.call("d")]
        return [*first, within, *then]

    for _ in range(3):
        ahead.ran.clear()
        for event in ahead.begun.values():
            event.clear()
        step(tf.constant(taken))
        order = [name for name, _ in ahead.ran]
        between = ["w", "x"] if taken else ["x"]
        assert sorted(order[:2]) == ["a", "b"] and sorted(order[-2:]) == ["c", "d"]
        assert order[2:-2] == between


def test_an_error_is_that_of_the_call_and_the_next_step_gets_its_own():
    ahead = Ahead(("step", "ahead"))
    fails = [True]

    def exchange(channel, number):
        if fails[0]:
            raise ValueError("no such exchange")
        return [number]

    @tf.function
    def step(number):
        spec = tf.TensorSpec([], tf.float32)
        results, _ = ahead.calls.call_ahead(exchange, [number], [spec], ahead.channels)
        return results[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="no such exchange"):
        step(tf.constant(1.0))
    fails[0] = False
    assert float(step(tf.constant(3.0))) == 3.0


def test_eager_calls_ahead_are_made_at_once():
    ahead = Ahead(("step", "ahead"))
    assert float(ahead.call("a", value=3.0)) == 6.0
    assert ahead.ran == [("a", "step")]


@pytest.mark.parametrize("channel", ["step", "ahead"])
def test_after_one_that_fails_none_of_its_step_is_made(channel):
    """Others wait for its part in vain, and would take the next one for it."""
    exchanges = AsyncExchanges()
    goes_on, made = threading.Event(), []

    def fail():
        assert goes_on.wait(60)
        raise MemoryError("the first error")

    failed = exchanges.begin("step", fail)
    queued = exchanges.begin("step", lambda: made.append(1))
    goes_on.set()
    said = "MemoryError: the first error"
    with pytest.raises(CollectiveError, match=said):
        exchanges.take(queued)
    later = exchanges.begin(channel, lambda: made.append(2))
    with pytest.raises(CollectiveError, match=said):
        exchanges.take(later)
    last = exchanges.begin(channel, lambda: made.append(3))
    with pytest.raises(MemoryError, match="the first error"):
        exchanges.take(failed)
    # Whether it runs before or after the error was taken.
    with pytest.raises(CollectiveError, match=said):
        exchanges.take(last)
    assert not made
    exchanges.take(exchanges.begin(channel, lambda: made.append(4)))
    assert made == [4]
    exchanges.close()
