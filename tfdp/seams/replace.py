"""Replaces methods of Keras' and TensorFlow's objects: the only place that does."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def instance_attributes(target: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Sets attributes in the instance dictionary, and restores it afterwards.

    Not by setattr: Keras' objects track what is set on them.
    """
    own = vars(target)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                own[name] = before[name]
            else:
                own.pop(name, None)


def replace_for_good(
    owner: str, attribute: str, replacement: Callable[[Any], Any]
) -> None:
    """Replaces a function of a module, or a method of a class, in this process.

    `replacement` takes the original and returns what takes its place.
    """
    module, _, name = owner.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, name) if name else found
    original = getattr(found, attribute)
    if not hasattr(original, "replaced_by_tfdp"):
        replaced = replacement(original)
        replaced.replaced_by_tfdp = True
        setattr(found, attribute, replaced)
