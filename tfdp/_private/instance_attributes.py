"""Temporary attributes of an instance, which override methods of its class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
