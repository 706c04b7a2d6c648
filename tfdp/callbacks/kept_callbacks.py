"""What other callbacks know, as a checkpoint of a `fit` keeps it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

__all__ = ["arrays_of", "kept_logs", "kept_of", "put_back", "put_back_logs"]

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


def kept_of(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """What each of them that is known here knows, as JSON can hold it, in order."""
    return [
        [kind.__name__, _kept(callback)]
        for callback in callbacks
        if (kind := _kind_of(callback)) is not None
    ]


def _kind_of(callback: keras.callbacks.Callback) -> type | None:
    kinds = (keras.callbacks.History, *ATTRIBUTES)
    return next((kind for kind in kinds if isinstance(callback, kind)), None)


def _kept(callback: keras.callbacks.Callback) -> dict[str, Any]:
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
    known = [c for c in callbacks if _kind_of(c) is not None]
    return {
        f"callback{number}/{place}": np.asarray(weight)
        for number, callback in enumerate(known)
        for place, weight in enumerate(getattr(callback, BEST, None) or ())
        if isinstance(callback, keras.callbacks.EarlyStopping)
    }


def put_back(
    callbacks: Iterable[keras.callbacks.Callback],
    kept: Any,
    arrays: Mapping[str, np.ndarray],
) -> bool:
    """Gives callbacks what they knew; false where the list is another one now.

    Args:
      callbacks: in their order.
      kept: what `kept_of` returned.
      arrays: and `arrays_of`.
    """
    callbacks = [c for c in callbacks if _kind_of(c) is not None]
    kinds = [kind.__name__ for kind in map(_kind_of, callbacks) if kind is not None]
    if not isinstance(kept, list) or [name for name, _ in kept] != kinds:
        return False
    for number, (callback, (_, known)) in enumerate(zip(callbacks, kept, strict=True)):
        if isinstance(callback, keras.callbacks.EarlyStopping):
            names = itertools.takewhile(
                arrays.__contains__,
                (f"callback{number}/{place}" for place in itertools.count()),
            )
            setattr(callback, BEST, [arrays[name] for name in names] or None)
        if isinstance(callback, keras.callbacks.History):
            callback.epoch = list(known["epoch"])
            callback.history = {n: _numbers(v) for n, v in known["history"].items()}
            continue
        for kind, found in ATTRIBUTES.items():
            if isinstance(callback, kind):
                for name in found:
                    if name in known:
                        setattr(callback, name, _numbers(known[name]))
    return True


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
