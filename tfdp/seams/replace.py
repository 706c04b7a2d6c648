"""Replaces methods of Keras' and TensorFlow's objects: the only place that does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tfdp.seams.table import SEAMS, owner_of


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

    `replacement` takes the original and returns what takes its place. Nothing is
    replaced that is not there: `check_seams` refuses such a Keras.
    """
    [row] = [
        seam for seam in SEAMS if (seam.owner, seam.attribute) == (owner, attribute)
    ]
    with contextlib.suppress(ImportError, AttributeError):
        found = owner_of(row)
        original = getattr(found, attribute)
        if not hasattr(original, "replaced_by_tfdp"):
            replaced = replacement(original)
            replaced.replaced_by_tfdp = True
            setattr(found, attribute, replaced)
