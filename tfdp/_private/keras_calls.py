"""Notes what Keras is doing in the calling thread, in methods that tfdp replaces.

Keras calls the same strategy method, or creates the same kind of variable, for several
purposes. The replaced methods note their arguments, and call Keras' own.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.names import keras_state
from tfdp.checks import check_whole
from tfdp.seams.replace import replace_for_good
from tfdp.seams.table import LOOP, MODEL, VARIABLE


class _Now(NamedTuple):
    """The innermost call of each kind."""

    #: A Keras variable, and the value that is added to it, or taken from it.
    added: tuple[Any, Any] | None = None
    #: The Keras variable whose TensorFlow variable is created.
    initialized: Any = None
    #: The model that is built, and whether Keras still reads the batch for it.
    built: Any = None
    is_reading: bool = False
    #: The epoch iterator that is created.
    loop: Any = None


class _Calls(threading.local):
    now = _Now()


_calls = _Calls()
_counted: list[bool] = []
_watched: weakref.WeakKeyDictionary[Any, Callable[[Any], None]]
_watched = weakref.WeakKeyDictionary()
_on_loops: list[Callable[[], None]] = []


@contextlib.contextmanager
def _noted(**values: Any) -> Iterator[None]:
    before, _calls.now = _calls.now, _calls.now._replace(**values)
    try:
        yield
    finally:
        _calls.now = before


def is_counted_by_keras(variable: tf.Variable) -> bool:
    """Whether Keras is adding a Python number to `variable`, as to `iterations`."""
    added = _calls.now.added
    is_number = added is not None and isinstance(added[1], (int, float))
    return is_number and added[0].value is variable  # type: ignore[index]


def has_counted() -> bool:
    """Whether Keras ever added to a variable, as each update does to `iterations`."""
    return bool(_counted)


def is_made_for_autocast() -> bool:
    """Whether the variable being created belongs to a Keras variable that autocasts.

    Not with `layer.add_weight(autocast=False)`.
    """
    return bool(getattr(variable_of_caller(), "_autocast", False))


def variable_of_caller() -> Any:
    """The Keras variable whose TensorFlow variable is being created; else None."""
    return _calls.now.initialized


def makers_of_variable() -> list[Any]:
    """The layers, or other objects of Keras, that create a variable; innermost last."""
    stack = keras_state.get_global_attribute("name_scope_stack") or []
    return [getattr(scope, "caller", None) for scope in stack]


def is_building_model() -> bool:
    """Whether Keras is building a model from the first batch of its input."""
    return _calls.now.built is not None


def model_to_build() -> Any:
    """The model for which Keras reads a batch, to build it; None: it builds already.

    There Keras calls `strategy.reduce("MEAN", <a real batch>)` only for shapes and
    dtypes. The arguments look like a user's reduction, which must stay one.
    """
    return _calls.now.built if _calls.now.is_reading else None


def reading_ended() -> contextlib.AbstractContextManager[None]:
    """Notes within the context that Keras has the batch and builds."""
    return _noted(is_reading=False)


def is_of_replicas(strategy: Any) -> bool:
    """Whether a strategy is one of tfdp, which traces its replicas itself."""
    return hasattr(getattr(strategy, "extended", None), "current_step")


def loop_of_caller() -> Any:
    """The epoch iterator of the Keras loop that creates its input; else None."""
    return _calls.now.loop


def adapter_of_caller() -> Any:
    """The data adapter of the Keras loop that creates its input; else None."""
    return getattr(_calls.now.loop, "data_adapter", None)


def batch_size_of_caller() -> tuple[str | None, int | None]:
    """The class name of the calling Keras loop's data adapter, and its batch size."""
    adapter = adapter_of_caller()
    if adapter is None:
        return None, None
    return type(adapter).__name__, adapter.batch_size


def call_for_loops(distributed: Any, on_loop: Callable[[Any], None]) -> Any:
    """Makes each Keras loop over the dataset call `on_loop(epoch iterator)` first.

    Keras does not notify a strategy of a dataset that was distributed before.
    """
    _watched[distributed] = on_loop
    return distributed


def call_before_loops(on_loop: Callable[[], None]) -> None:
    """Calls `on_loop` before each loop of Keras begins, of any strategy."""
    _on_loops.append(on_loop)


def _noting_added(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add(self: Any, value: Any) -> Any:
        _counted[:] = [True]
        with _noted(added=(self, value)):
            return original(self, value)

    return add


def _noting_initialized(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(self: Any, value: Any) -> Any:
        with _noted(initialized=self):
            return original(self, value)

    return initialize


def _noting_built(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        with _noted(built=self, is_reading=True):
            return original(self, iterator=iterator, data_batch=data_batch)

    return build


def _check_counts(given: Mapping[str, Any]) -> None:
    """Refuses counts for which Keras fails far from `fit`, or takes its default."""
    for name in ("batch_size", "steps_per_execution"):
        value = given.get(name)
        if value is not None:
            is_integer = isinstance(value, numbers.Integral)
            check_whole(name, int(value) if is_integer else value, 1)


def _noting_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for note in _on_loops:
            note()
        if is_of_replicas(kwargs.get("distribute_strategy", tf.distribute)):
            _check_counts(kwargs)
        with _noted(loop=self):
            original(self, *args, **kwargs)
            on_loop = _watched.get(self._distributed_dataset)
            if on_loop is not None:
                on_loop(self)

    return init


replace_for_good(VARIABLE, "assign_add", _noting_added)
replace_for_good(VARIABLE, "assign_sub", _noting_added)
replace_for_good(VARIABLE, "_initialize", _noting_initialized)
replace_for_good(MODEL, "_maybe_symbolic_build", _noting_built)
replace_for_good(LOOP, "__init__", _noting_loop)
