"""Random numbers of replicas: of `tf.random`, and of Keras' global seed generator.

`tf.random` draws by a seed of the graph, which each replica gets shifted.
`keras.random.normal(shape)` without a seed draws from a generator that Keras creates on
first use, one for each thread. Replicas are traced in new threads every time, and a
trace may create variables only once, so such a layer would fail. Replicas get the
generator of the thread that called `strategy.run`, whose state is a variable of the
strategy, created outside the trace.
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
from tfdp._private.names import current_rank, keras_state
from tfdp.variables.mirrored import SEED_STRIDE

# The name in Keras' global state.
ATTRIBUTE = "global_seed_generator"
PLAIN, OF_STRATEGY = "0", "1"


class GlobalSeed(keras.random.SeedGenerator):
    """A global generator with a state for each strategy, created on first use.

    Not earlier: a generator takes its seed from Python's `random`, which on one device
    happens at the first draw. `plain`: the previous generator, if any.
    """

    # Keras' own constructor would draw a seed and create a variable.
    def __init__(self, plain: keras.random.SeedGenerator | None):
        self.name = "global_seed"
        self._initial_seed = None
        self._plain = plain
        self._under: weakref.WeakKeyDictionary[Any, keras.random.SeedGenerator] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def state(self) -> keras.Variable:
        return self._current().state

    def next(self, ordered: bool = True) -> Any:
        generator = self._current()
        variable = generator.state.value
        if ordered or not isinstance(variable, tf.distribute.DistributedValues):
            return generator.next(ordered)
        # Keras' sequence, applied to the stored state: each replica reads that plus its
        # own offset, which the sequence would not preserve.
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
            # A new thread is in no replica and builds no graph.
            with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
                self._under[strategy] = thread.submit(self._made, strategy).result()
        return self._under[strategy]

    def make_plain(self) -> keras.random.SeedGenerator:
        if self._plain is None:
            with tf.init_scope():
                self._plain = keras.random.SeedGenerator()
        return self._plain

    def states(self, strategy: tf.distribute.Strategy) -> dict[str, keras.Variable]:
        found = {} if self._plain is None else {PLAIN: self._plain.state}
        if strategy in self._under:
            found[OF_STRATEGY] = self._under[strategy].state
        return found

    def _made(self, strategy: tf.distribute.Strategy) -> keras.random.SeedGenerator:
        """A generator that continues from the state of the one without a strategy."""
        with strategy.scope():
            if self._plain is None:
                return keras.random.SeedGenerator()
            state = self._plain.state.numpy()
            made = keras.random.SeedGenerator(int(state[0]))
            made.state.assign(state)
            return made


def global_seed_states(strategy: tf.distribute.Strategy) -> dict[str, keras.Variable]:
    """The existing states of this thread's global generator, by name; creates none."""
    generator = keras_state.get_global_attribute(ATTRIBUTE)
    if generator is None:
        return {}
    if isinstance(generator, GlobalSeed):
        return generator.states(strategy)
    return {PLAIN: generator.state}


def make_global_seed_states(
    strategy: tf.distribute.Strategy, names: Collection[str]
) -> None:
    """Creates the states of `names` that do not exist, before they are restored."""
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
    """`function` as the replicas run it, with the global generator of this thread."""
    generator = _of_this_thread()

    @library_code
    @functools.wraps(function)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        with keras_attribute(ATTRIBUTE, generator):
            draw_as(current_rank())
            return function(*args, **kwargs)

    return seeded


@contextlib.contextmanager
def independent_draws(first_draw: int | None) -> Iterator[Callable[[Any], None]]:
    """Makes `tf.random.normal` and similar ops differ by replica within the context.

    TensorFlow seeds each op by `tf.random.set_seed` and by its number in the graph. The
    former is equal on all hosts; the latter, in a branch or in a called function, on
    all replicas.

    `first_draw`: the index of this process's first replica, 0 to draw as one device;
    None: replicas may draw the same numbers. Yields a function that the replica of the
    given rank calls before it draws.
    """
    graph = tf.compat.v1.get_default_graph()
    seed = graph.seed

    def draw_as(rank: Any) -> None:
        if first_draw is None or seed is None or not isinstance(rank, int):
            return
        # Seeds are nonnegative 31-bit integers.
        offset = (first_draw + rank) * SEED_STRIDE
        graph.seed = (seed + offset) % (2**31 - 1) if offset else seed

    draw_as(0)
    try:
        yield draw_as
    finally:
        graph.seed = seed


class _OverriddenGenerator:
    """Keras' global generator with `next` overridden by `override(next)`."""

    def __init__(self, override: Callable[[Callable], Callable]):
        self._override = override
        self.plain = keras_state.get_global_attribute(ATTRIBUTE)

    def next(self, ordered: bool = True) -> Any:
        if self.plain is None:
            self.plain = keras.random.SeedGenerator()  # as Keras does
        return self._override(lambda given: self.plain.next(given))(ordered)


@contextlib.contextmanager
def drawing_globally(override: Callable[[Callable], Callable]) -> Iterator[None]:
    """Makes `override(next)` do the draws without a seed within the context."""
    generator = _OverriddenGenerator(override)
    keras_state.set_global_attribute(ATTRIBUTE, generator)
    try:
        yield
    finally:
        keras_state.set_global_attribute(ATTRIBUTE, generator.plain)
