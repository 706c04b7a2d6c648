"""Takes back what Keras 3.16 does otherwise in `fit` than 3.15.

It orders shuffled arrays by the epoch, a Python number that TensorFlow reads once: each
epoch, run and seed has one order. Here the order follows from the seed, the number of
such fits since it was set, and the epoch: on all hosts, and after a restart. And it
takes a batch outside of the step, which another number of rows then traces again.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private import keras_calls, names
from tfdp._private.frames import loop_around
from tfdp.seams.replace import note_on, replace_for_good
from tfdp.seams.table import ARRAYS, LOOP, MODEL, is_of_keras_3_16

ORDER, FITS = "_tfdp_order", "_tfdp_fits"
INPUTS = (tf.data.Iterator, tf.distribute.DistributedIterator)


def mend_newer_keras() -> None:
    """Replaces these methods in this process, if the installed Keras has them."""
    if is_of_keras_3_16():
        replace_for_good(ARRAYS, "_tf_shuffle", _in_order_of_pass)
        replace_for_good(LOOP, "_get_iterator", _numbering_passes)
        replace_for_good(MODEL, "_make_function", _fetching_in_graph)


def _seed_of_fit() -> list[int]:
    seed = names.global_seed()
    if seed is None:
        return [secrets.randbits(62), 0]
    stream = names.runtime_context.context()._rng  # a new one with each seed
    note_on(stream, FITS, vars(stream).get(FITS, 0) + 1)
    return [int(seed) % 2**62, vars(stream)[FITS]]


def _in_order_of_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def shuffle(adapter: Any, tensors: Any) -> Any:
        loop = keras_calls.loop_of_caller()
        if loop is None or not keras_calls.is_of_replicas(loop._distribute_strategy):
            return original(adapter, tensors)
        if ORDER not in vars(loop):
            order = _seed_of_fit(), names.make_counter(), itertools.count()
            note_on(loop, ORDER, order)
        fit, number, _ = vars(loop)[ORDER]
        seed = tf.constant(fit, tf.int64)
        for part in (number, tensors[0]):  # each batch in an order of its own, too
            seed = tf.random.experimental.stateless_fold_in(seed, part)
        return tf.random.experimental.stateless_shuffle(tensors, seed)

    return shuffle


def _numbering_passes(original: Callable[..., Any]) -> Callable[..., Any]:
    """A pass has the number of its epoch; if several epochs share it, its own."""

    @functools.wraps(original)
    def get_iterator(loop: Any) -> Any:
        if ORDER in vars(loop) and not keras_calls.is_building_model():
            _, number, passes = vars(loop)[ORDER]
            fit, is_shared = loop_around(), loop.steps_per_epoch is not None
            # At the end of an epoch Keras makes the next iterator already.
            is_end = loop._num_batches and loop._steps_seen >= loop._num_batches
            epoch = (fit["epoch"] or 0) + bool(is_end) if fit is not None else 0
            number.assign(next(passes) if is_shared else epoch)
        return original(loop)

    return get_iterator


def _fetching_in_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_function(model: Any, step_function: Any) -> Any:
        run = original(model, step_function)

        @tf.function(autograph=False, reduce_retracing=True)
        def one_step(iterator: Any) -> Any:
            return run([iterator.get_next()])

        def steps(iterator: Any) -> Any:
            is_one = model.steps_per_execution == 1 and isinstance(iterator, INPUTS)
            return (one_step if is_one else run)(iterator)

        is_of_replicas = keras_calls.is_of_replicas(model.distribute_strategy)
        return steps if is_of_replicas and not model.run_eagerly else run

    return make_function
