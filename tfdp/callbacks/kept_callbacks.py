"""What other callbacks know, as a checkpoint of a `fit` keeps it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np

__all__ = [
    "KeepsState",
    "arrays_of",
    "kept_logs",
    "kept_of",
    "put_back",
    "put_back_logs",
]

# Plain numbers. The weights that EarlyStopping holds are arrays, see `arrays_of`.
BEST = "best_weights"
ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: (
        *("best", "epochs_since_last_save", "_current_epoch"),
        *("_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}


@runtime_checkable
class KeepsState(Protocol):
    """A callback that says itself what it knows, in plain numbers and lists."""

    def state_to_keep(self) -> dict[str, Any]:
        """What it knows after a step."""

    def take_back(self, state: dict[str, Any]) -> None:
        """Knows that again, before an epoch begins."""


# By which they stand in what is kept.
NAMES = {kind.__name__ for kind in (keras.callbacks.History, *ATTRIBUTES)}


def kept_of(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """What each of them that is known here knows, as JSON can hold it, in order."""
    return [[_name_of(callback), _kept(callback)] for callback in _known(callbacks)]


def _known(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """Keras' own, and behind them those that know by themselves what to keep."""
    callbacks = list(callbacks)
    of_keras = [c for c in callbacks if _kind_of(c) is not None]
    return [*of_keras, *filter(_is_own, callbacks)]


def _is_own(callback: keras.callbacks.Callback) -> bool:
    return _kind_of(callback) is None and isinstance(callback, KeepsState)


def _kind_of(callback: keras.callbacks.Callback) -> type | None:
    kinds = (keras.callbacks.History, *ATTRIBUTES)
    return next((kind for kind in kinds if isinstance(callback, kind)), None)


def _name_of(callback: keras.callbacks.Callback) -> str:
    return (_kind_of(callback) or type(callback)).__name__


def _kept(callback: keras.callbacks.Callback) -> dict[str, Any]:
    if _is_own(callback):
        return {name: _plain(v) for name, v in callback.state_to_keep().items()}
    if isinstance(callback, keras.callbacks.History):
        history = {name: _plain(values) for name, values in callback.history.items()}
        return {"epoch": _plain(callback.epoch), "history": history}
    for kind, names in ATTRIBUTES.items():
        if isinstance(callback, kind):
            found = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
            return {name: _plain(value) for name, value in found.items()}
    return {}


def arrays_of(
    callbacks: Iterable[keras.callbacks.Callback],
) -> dict[str, np.ndarray]:
    """The best weights that `EarlyStopping` holds, by name."""
    return {
        f"callback{number}/{place}": np.asarray(weight)
        for number, callback in enumerate(_known(callbacks))
        for place, weight in enumerate(getattr(callback, BEST, None) or ())
        if isinstance(callback, keras.callbacks.EarlyStopping)
    }


def put_back(
    callbacks: Iterable[keras.callbacks.Callback],
    kept: Any,
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """Gives callbacks what they knew.

    Args:
      callbacks: in their order.
      kept: what `kept_of` returned.
      arrays: and `arrays_of`.

    Returns:
      The names of those that were given nothing. Of Keras' it is all of them where the
      list is another one now.
    """
    known = _known(callbacks)
    entries = list(kept) if isinstance(kept, list) else []
    own = list(filter(_is_own, known))
    forgotten = []
    for callback in own:
        name = _name_of(callback)
        entry = next((e for e in entries if e[0] == name and name not in NAMES), None)
        if entry is None:
            forgotten.append(name)
            continue
        entries.remove(entry)
        try:
            callback.take_back({name: _numbers(v) for name, v in entry[1].items()})
        except Exception:  # of another version: the others go on all the same
            forgotten.append(_name_of(callback))
    of_keras = [callback for callback in known if callback not in own]
    found = [entry for entry in entries if entry[0] in NAMES]
    if [name for name, _ in found] != list(map(_name_of, of_keras)):
        return [*map(_name_of, of_keras), *forgotten]
    for number, (callback, (_, state)) in enumerate(zip(of_keras, found, strict=True)):
        _give(callback, state, number, arrays)
    return forgotten


def _give(
    callback: keras.callbacks.Callback,
    known: Any,
    number: int,
    arrays: Mapping[str, np.ndarray],
) -> None:
    if isinstance(callback, keras.callbacks.EarlyStopping):
        names = itertools.takewhile(
            arrays.__contains__,
            (f"callback{number}/{place}" for place in itertools.count()),
        )
        setattr(callback, BEST, [arrays[name] for name in names] or None)
    if isinstance(callback, keras.callbacks.History):
        callback.epoch = list(known["epoch"])
        callback.history = {n: _numbers(v) for n, v in known["history"].items()}
        return
    for kind, found in ATTRIBUTES.items():
        if isinstance(callback, kind):
            for name in found:
                if name in known:
                    setattr(callback, name, _numbers(known[name]))


def kept_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in the logs of a step, as JSON can hold them."""
    return {
        name: _plain(value)
        for name, value in logs.items()
        if isinstance(value, int | float | np.number)
    }


def put_back_logs(kept: Any) -> dict[str, Any]:
    """What `kept_logs` returned; empty when that is not what came."""
    try:
        return {str(name): _numbers(value) for name, value in kept.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """A value that JSON can hold: infinities and NaN as text."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | str):
        return value
    array = np.asarray(value)
    if array.ndim:
        return _plain(array.tolist())
    number = array.item()
    if isinstance(number, float) and not math.isfinite(number):
        return {"float": repr(number)}
    return number


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    if isinstance(value, dict):
        return float(value["float"])
    return value
