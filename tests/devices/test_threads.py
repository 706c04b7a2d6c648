"""Threads that train several models under one strategy."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, make_strategy
from tfdp.errors import CollectiveError
from tfdp.tracing import trace_order


class Waits(keras.layers.Layer):
    """Where it is traced for training, begins what runs beside the trace."""

    def __init__(self, begin):
        super().__init__()
        self.begin = begin

    def call(self, inputs, training=False):
        if training and not tf.executing_eagerly():
            self.begin()
        return inputs


def model_for(strategy, number, begin=lambda: None):
    keras.utils.set_random_seed(number)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(8 + number, "tanh"),
                Waits(begin),
                keras.layers.Dropout(0.2, seed=number),
                tfdp.layers.SyncBatchNormalization(),
                keras.layers.Dense(5),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    return model


def trained(model, number):
    """The numbers that a training reports, its weights, and predictions."""
    x, y = classification_data(42 + number)
    options = {"batch_size": 14, "verbose": 0}
    history = model.fit(
        x, y, epochs=2, shuffle=False, validation_data=(x, y), **options
    ).history
    return [*history.values(), *model.get_weights(), model.predict(x, **options)]


class Thread(threading.Thread):
    """A thread whose result, or error, is that of `join_for_result`."""

    def __init__(self, work, *args):
        super().__init__(daemon=True)
        self._work, self._args = work, args
        self._result = self._error = None

    def run(self):
        try:
            self._result = self._work(*self._args)
        except BaseException as error:
            self._error = error

    def join_for_result(self):
        self.join(900)
        assert not self.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error
        return self._result


def test_trainings_side_by_side_are_those_one_after_the_other():
    strategy, threads = make_strategy(2), []
    alone = [trained(model_for(strategy, number), number) for number in range(2)]

    def begin_another():
        if not threads[1].ident:
            threads[1].start()
            # The first trace goes on for a while; how far the other one comes in it
            # makes no difference.
            threads[1].join(0.5)

    models = [
        model_for(strategy, number, begin)
        for number, begin in enumerate((begin_another, lambda: None))
    ]
    threads += [Thread(trained, model, n) for n, model in enumerate(models)]
    threads[0].start()
    for thread, expected in zip(threads, alone, strict=True):
        for value, one in zip(thread.join_for_result(), expected, strict=True):
            np.testing.assert_array_equal(value, one)


def test_a_metric_of_another_thread_counts_as_it_is():
    strategy, counts = make_strategy(2), []
    with strategy.scope():
        metric = keras.metrics.Mean()

    def count():
        metric.update_state(6.0)
        return float(metric.count)

    def begin_another():
        thread = Thread(count)
        thread.start()
        counts.append(thread.join_for_result())

    model_for(strategy, 0, begin_another).fit(*classification_data(14), verbose=0)
    # Each replica traces the layer.
    assert counts == [1.0, 2.0]


def test_a_thread_that_never_gets_its_turn_says_who_has_it(monkeypatch):
    monkeypatch.setattr(trace_order, "LONGEST_WAIT_SECONDS", 0.1)
    strategy = make_strategy(2)

    def wait_for_another():
        thread = Thread(strategy.run, lambda: tf.constant(1.0))
        thread.start()
        thread.join_for_result()

    with pytest.raises(CollectiveError, match="while thread 'MainThread' builds one"):
        strategy.run(wait_for_another)


def test_a_second_thread_is_refused_where_hosts_train_together():
    class OfTwoHosts(tfdp.DataParallelStrategy):
        cluster = tfdp.Cluster(workers=2, rank=0, coordinator=None)

    def run_under(strategy):
        tf.function(lambda: strategy.run(lambda: tf.constant(1.0)))()

    strategy = OfTwoHosts(["CPU:0", "CPU:1"])
    first, other = Thread(run_under, strategy), Thread(run_under, strategy)
    first.start()
    first.join_for_result()
    run_under(strategy)  # the first one has ended
    other.start()
    with pytest.raises(CollectiveError, match="one after the other in one thread"):
        other.join_for_result()
