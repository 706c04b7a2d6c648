"""Keras' global generator of seeds, under a strategy.

`keras.random.normal(shape)` without a seed draws from a generator that Keras makes when
it is first asked, one for each thread. The replicas of a step are traced in threads
that are new every time, and a trace may make variables once at most: one device runs
such a layer, replicas would not. They are given the generator of the thread that called
`strategy.run`, whose state is a variable of the strategy, made outside of the trace.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.keras_layers import keras_attribute
from tfdp._private.names import (
    current_rank,
    global_seed,
    keras_state,
    put_global_seed,
)
from tfdp.variables.mirrored import SEED_STRIDE

# What Keras calls it.
ATTRIBUTE = "global_seed_generator"
PLAIN, OF_STRATEGY = "0", "1"


class GlobalSeed(keras.random.SeedGenerator):
    """A global generator with a state for each strategy; made when first asked.

    Not earlier: a generator takes its seed from Python's `random`, and one device
    would have it take it at the first draw.

    Args:
      plain: the generator that was there before; None: none was.
    """

    # Keras' own constructor would draw a seed and make a variable.
    def __init__(self, plain: keras.random.SeedGenerator | None):
        self.name = "global_seed"
        self._initial_seed = None
        self._plain = plain
        self._under: weakref.WeakKeyDictionary[Any, keras.random.SeedGenerator] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def state(self) -> keras.Variable:
        """That of the strategy in whose replica, or scope, the caller is."""
        return self._current().state

    def next(self, ordered: bool = True) -> Any:
        """The next seed."""
        generator = self._current()
        variable = generator.state.value
        if ordered or not isinstance(variable, tf.distribute.DistributedValues):
            return generator.next(ordered)
        # Keras' sequence, on what is stored: every replica sees that plus an offset of
        # its own, which the sequence would not leave alone.
        seen = tf.identity(variable)
        offset = getattr(variable, "own_offset", lambda: None)()
        stored = seen if offset is None else seen - offset
        following = (stored + 1) * 5387 % 933199
        variable.assign(following if offset is None else following + offset)
        return seen

    def _current(self) -> keras.random.SeedGenerator:
        if not tf.distribute.has_strategy():
            return self.make_plain()
        strategy = tf.distribute.get_strategy()
        if strategy not in self._under:
            # A thread of its own is in no replica and builds no graph.
            with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
                self._under[strategy] = thread.submit(self._made, strategy).result()
        return self._under[strategy]

    def make_plain(self) -> keras.random.SeedGenerator:
        """The generator without a strategy."""
        if self._plain is None:
            with tf.init_scope():
                self._plain = keras.random.SeedGenerator()
        return self._plain

    def states(self, strategy: tf.distribute.Strategy) -> dict[str, keras.Variable]:
        """What was made already, nothing else: see `global_seed_states`."""
        found = {} if self._plain is None else {PLAIN: self._plain.state}
        if strategy in self._under:
            found[OF_STRATEGY] = self._under[strategy].state
        return found

    def _made(self, strategy: tf.distribute.Strategy) -> keras.random.SeedGenerator:
        """A generator that goes on where the one without a strategy stands."""
        with strategy.scope():
            if self._plain is None:
                return keras.random.SeedGenerator()
            state = self._plain.state.numpy()
            made = keras.random.SeedGenerator(int(state[0]))
            made.state.assign(state)
            return made


def global_seed_states(strategy: tf.distribute.Strategy) -> dict[str, keras.Variable]:
    """The states of this thread's global generator that have been made, by name.

    Asking makes none: that would take a number from Python's `random`.

    Returns:
      PLAIN: that without a strategy; OF_STRATEGY: that of the replicas.
    """
    generator = keras_state.get_global_attribute(ATTRIBUTE)
    if generator is None:
        return {}
    if isinstance(generator, GlobalSeed):
        return generator.states(strategy)
    return {PLAIN: generator.state}


def make_global_seed_states(
    strategy: tf.distribute.Strategy, names: Collection[str]
) -> None:
    """Makes those that are missing of `names`, for values that are known already."""
    missing = set(names) - set(global_seed_states(strategy))
    if PLAIN in missing:
        generator = keras_state.get_global_attribute(ATTRIBUTE)
        if isinstance(generator, GlobalSeed):
            generator.make_plain()
        else:
            made = keras.random.SeedGenerator()
            keras_state.set_global_attribute(ATTRIBUTE, made)
    if OF_STRATEGY in missing:
        with strategy.scope():
            if tf.distribute.has_strategy():
                _ = _of_this_thread().state


def _of_this_thread() -> GlobalSeed:
    generator = keras_state.get_global_attribute(ATTRIBUTE)
    if not isinstance(generator, GlobalSeed):
        generator = GlobalSeed(generator)
        keras_state.set_global_attribute(ATTRIBUTE, generator)
    return generator


def with_global_seed(
    function: Callable, draw_as: Callable[[Any], None] = lambda rank: None
) -> Callable:
    """`function` as the replicas run it, with the global generator of this thread.

    Args:
      function: of a replica.
      draw_as: see `draws_apart`; one program for all replicas has no use for it.
    """
    generator = _of_this_thread()

    @library_code
    @functools.wraps(function)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        with keras_attribute(ATTRIBUTE, generator):
            draw_as(current_rank())
            return function(*args, **kwargs)

    return seeded


@contextlib.contextmanager
def draws_apart(first_draw: int | None) -> Iterator[Callable[[Any], None]]:
    """While this lasts `tf.random.normal` and its like draw apart on all replicas.

    TensorFlow seeds each by what `tf.random.set_seed` was given and by its number in
    the graph. The one is alike on all hosts, the other, in a branch or in a function
    that is called, on all replicas.

    Args:
      first_draw: which of the draws that are apart this process begins with, 0 being
        those of one device; None: replicas may draw alike.

    Yields:
      What the replica of the given rank calls before it draws.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    seed = global_seed() if graph is None else graph.seed

    def put(own: int | None) -> None:
        if graph is None:
            put_global_seed(own)
        else:
            graph.seed = own

    def draw_as(rank: Any) -> None:
        if first_draw is None or seed is None or not isinstance(rank, int):
            return
        # Seeds are nonnegative numbers of 31 bits.
        offset = (first_draw + rank) * SEED_STRIDE
        put((seed + offset) % (2**31 - 1) if offset else seed)

    draw_as(0)
    try:
        yield draw_as
    finally:
        # Not by each replica: where they take turns another one has put its own.
        put(seed)


class _Led:
    """Stands for Keras' global generator, which is made when it is first asked.

    Args:
      next_of: for the `next` of a generator that of the time being.
    """

    def __init__(self, next_of: Callable[[Callable], Callable]):
        self._next_of = next_of
        self.plain = keras_state.get_global_attribute(ATTRIBUTE)

    def next(self, ordered: bool = True) -> Any:
        """What the global generator gives, by `next_of`."""
        if self.plain is None:
            self.plain = keras.random.SeedGenerator()  # as Keras does
        return self._next_of(lambda given: self.plain.next(given))(ordered)


@contextlib.contextmanager
def drawing_globally(next_of: Callable[[Callable], Callable]) -> Iterator[None]:
    """While this lasts draws without a seed are led as `next_of(next)` says."""
    led = _Led(next_of)
    keras_state.set_global_attribute(ATTRIBUTE, led)
    try:
        yield
    finally:
        keras_state.set_global_attribute(ATTRIBUTE, led.plain)
