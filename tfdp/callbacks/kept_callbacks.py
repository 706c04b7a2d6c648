"""What other callbacks know, as a checkpoint of a `fit` keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

__all__ = ["kept_of", "plain", "put_back", "unplain"]

# Plain numbers; what they hold else (weights, files) is not in here.
ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
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
        history = {name: plain(values) for name, values in callback.history.items()}
        return {"epoch": plain(callback.epoch), "history": history}
    for kind, names in ATTRIBUTES.items():
        if isinstance(callback, kind):
            found = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
            return {name: plain(value) for name, value in found.items()}
    return {}


def put_back(callbacks: Iterable[keras.callbacks.Callback], kept: Any) -> bool:
    """Gives callbacks what they knew; false where the list is another one now.

    Args:
      callbacks: in their order.
      kept: what `kept_of` returned.
    """
    callbacks = [c for c in callbacks if _kind_of(c) is not None]
    kinds = [kind.__name__ for kind in map(_kind_of, callbacks) if kind is not None]
    if not isinstance(kept, list) or [name for name, _ in kept] != kinds:
        return False
    for callback, (_, known) in zip(callbacks, kept, strict=True):
        if isinstance(callback, keras.callbacks.History):
            callback.epoch = list(known["epoch"])
            callback.history = {n: unplain(v) for n, v in known["history"].items()}
            continue
        for kind, names in ATTRIBUTES.items():
            if isinstance(callback, kind):
                for name in names:
                    if name in known:
                        setattr(callback, name, unplain(known[name]))
    return True


def plain(value: Any) -> Any:
    """A value that JSON can hold: infinities and NaN as text, other things as None."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if value is None or isinstance(value, bool | str):
        return value
    array = np.asarray(value)
    if array.ndim:
        return plain(array.tolist())
    number = array.item()
    if isinstance(number, float) and not math.isfinite(number):
        return {"float": repr(number)}
    return number


def unplain(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, list):
        return [unplain(part) for part in value]
    if isinstance(value, dict):
        if set(value) == {"float"}:
            return float(value["float"])
        return {name: unplain(part) for name, part in value.items()}
    return value
