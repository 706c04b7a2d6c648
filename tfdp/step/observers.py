"""What callbacks attach to the training steps of a model.

Several callbacks may attach an observer each, also of one kind. They are kept with the
model, so that a `fit` of another model, within a callback or in another thread, has its
own. A step takes those of its model when it is built.
"""

from __future__ import annotations

from typing import Any, TypeVar

import keras

__all__ = ["attach", "detach", "observers_of"]

OBSERVERS = "_tfdp_observers"

Kind = TypeVar("Kind")


def attach(model: keras.Model, observer: Any) -> None:
    """Steps of `model` that are built from now on have `observer`."""
    # Not by setattr, which would track it as a part of the model.
    vars(model).setdefault(OBSERVERS, []).append(observer)


def detach(model: keras.Model, observer: Any) -> None:
    """Steps of `model` that are built from now on do not have `observer`."""
    others = [one for one in observers_of(model, object) if one is not observer]
    vars(model)[OBSERVERS] = others


def observers_of(model: Any, kind: type[Kind]) -> list[Kind]:
    """Those of one kind that are attached to `model`, the first attached first."""
    attached = getattr(model, "__dict__", {}).get(OBSERVERS, ())
    return [one for one in attached if isinstance(one, kind)]
