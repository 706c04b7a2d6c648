"""The random numbers of a layer, drawn once more as they were."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdp._private.keras_models import layers_within, seed_generators_of
from tfdp.variables.global_seed import drawing_globally

__all__ = ["RandomDraws"]

# What a generator's `next` is for the time being.
Draw = Callable[[bool], Any]


class RandomDraws:
    """The seeds that the random layers within `layer` drew in one pass."""

    def __init__(self, layer: keras.layers.Layer):
        self._generators = [
            generator
            for sublayer in layers_within(layer)
            for generator in seed_generators_of(sublayer)
        ]
        self._drawn: list[Any] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts every draw is noted."""
        self._drawn = []

        def recorded(plain: Draw) -> Draw:
            def draw(ordered: bool) -> Any:
                seed = plain(ordered)
                self._drawn.append(seed)
                return seed

            return draw

        with self._drawing(recorded):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """While this lasts every draw gives what it gave before, in the same order."""
        left = iter(self._drawn)

        def replayed(plain: Draw) -> Draw:
            return lambda ordered: next(left)

        with self._drawing(replayed):
            yield

    @contextlib.contextmanager
    def _drawing(self, led: Callable[[Draw], Draw]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for generator in self._generators:
                stack.enter_context(_leads.leading(generator, led))
            stack.enter_context(drawing_globally(led))
            yield


class _Leads:
    """What draws in the place of generators, in each thread by itself.

    Eager replicas are threads that take turns at their exchanges, so that one of them
    may begin a block, and end it, while another one is in the middle of it.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._users: dict[int, int] = defaultdict(int)

    @contextlib.contextmanager
    def leading(self, generator: Any, led: Callable[[Draw], Draw]) -> Iterator[None]:
        """While this lasts `generator` draws in this thread as `led` says.

        Of a block within a block: on top of what the outer one leads it with.
        """
        key, own = id(generator), self._of_this_thread()
        outer = own.get(key)
        own[key] = led(outer or _plain(generator))
        self._use(generator, 1)
        try:
            yield
        finally:
            self._use(generator, -1)
            if outer is None:
                del own[key]
            else:
                own[key] = outer

    def _of_this_thread(self) -> dict[int, Draw]:
        found: dict[int, Draw] = vars(self._of_thread).setdefault("led", {})
        return found

    def _use(self, generator: Any, change: int) -> None:
        with self._lock:
            self._users[id(generator)] += change
            if not self._users[id(generator)]:
                del self._users[id(generator)]
                vars(generator).pop("next")
            elif change > 0:
                # Not by setattr: Keras' objects track what is set on them.
                vars(generator)["next"] = self._next_of(generator)

    def _next_of(self, generator: Any) -> Callable:
        def draw(ordered: bool = True) -> Any:
            led = self._of_this_thread().get(id(generator))
            return (led or _plain(generator))(ordered)

        return draw


_leads = _Leads()


def _plain(generator: Any) -> Draw:
    return lambda ordered: type(generator).next(generator, ordered)
