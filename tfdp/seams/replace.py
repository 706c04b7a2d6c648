"""Replaces methods of Keras' and TensorFlow's objects: the only place that does.

What has no row in the table of seams is refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tfdp.errors import SeamError
from tfdp.seams.table import SEAMS, Seam, checked_versions, owner_of

OWN = "_tfdp_"


class Override(NamedTuple):
    """An attribute of an instance to replace for a while.

    Args:
      target: the instance.
      attribute: its name.
      make: returns what takes the place of the value that it is called with.
    """

    target: Any
    attribute: str
    make: Callable[[Any], Any]


def instead(value: Any) -> Callable[[Any], Any]:
    """The `make` of an override that does not use the original."""
    return lambda original: value


def around(function: Callable[..., Any], *given: Any) -> Callable[[Any], Any]:
    """The `make` of a method: `function` gets the original and `given` first."""
    return lambda original: functools.partial(function, original, *given)


@contextlib.contextmanager
def overridden(overrides: Iterable[Override]) -> Iterator[None]:
    """Applies overrides in order: of several for one attribute the last one runs first,
    and gets what the others made as its original."""
    with contextlib.ExitStack() as stack:
        for target, attribute, make in overrides:
            made = {attribute: make(getattr(target, attribute))}
            stack.enter_context(instance_attributes(target, made))
        yield


@contextlib.contextmanager
def instance_attributes(target: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replaces attributes of an instance, and restores them afterwards."""
    own = vars(target)
    before = {name: own[name] for name in attributes if name in own}
    try:
        for name, value in attributes.items():
            replace(target, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                own[name] = before[name]
            else:
                restore(target, name)


def replace(target: Any, attribute: str, value: Any) -> None:
    """Replaces an attribute of an instance, in its dictionary.

    Not by setattr: Keras' objects track what is set on them, and refuse some.
    """
    if not any(isinstance(target, owner) for owner in _owners(attribute)):
        raise SeamError(
            f"tfdp replaces {attribute} of {type(target).__name__}, which is not in "
            f"its table of seams. {checked_versions()}"
        )
    own = vars(target)
    if attribute not in own and not hasattr(type(target), attribute):
        raise SeamError(
            f"tfdp replaces {attribute} of {type(target).__name__}, which has no such "
            f"attribute. {checked_versions()}"
        )
    own[attribute] = value


def restore(target: Any, attribute: str) -> None:
    """Lets the class of an instance decide about an attribute again."""
    vars(target).pop(attribute, None)


def is_replaced(target: Any, attribute: str) -> bool:
    """Whether an instance has an attribute in its dictionary."""
    return attribute in vars(target)


def note_on(target: Any, name: str, value: Any) -> None:
    """Keeps a value of tfdp's own with an instance, which does not track it."""
    if not name.startswith(OWN):
        raise SeamError(f"A note on an object of another package begins with {OWN}.")
    if hasattr(target, "__dict__"):
        vars(target)[name] = value
    else:  # TensorFlow's graphs show no dictionary
        setattr(target, name, value)


def with_state_of(kind: Any, source: Any) -> Any:
    """An object of a subclass of tfdp's with all attributes of `source`."""
    result = kind.__new__(kind)
    vars(result).update(vars(source))
    return result


def replace_for_good(
    owner: str, attribute: str, replacement: Callable[[Any], Any]
) -> None:
    """Replaces a function of a module, or a method of a class, in this process.

    `replacement` takes the original and returns what takes its place. Nothing is
    replaced that is not there: `check_seams` refuses such a Keras.
    """
    with contextlib.suppress(ImportError, AttributeError):
        found = owner_of(_row_of(owner, attribute))
        original = getattr(found, attribute)
        is_property = isinstance(original, property)
        function = original.fget if is_property else original
        if not hasattr(function, "replaced_by_tfdp"):
            replaced = replacement(function)
            replaced.replaced_by_tfdp = True
            setattr(found, attribute, property(replaced) if is_property else replaced)


def replace_function(module: str, name: str, replacement: Callable[[Any], Any]) -> None:
    """`replace_for_good` for a function, also where a module has imported its name."""
    with contextlib.suppress(ImportError, AttributeError):
        found = owner_of(_row_of(module, name))
        original = getattr(found, name)
        replace_for_good(module, name, replacement)
        replaced = getattr(found, name)
        for holder in list(sys.modules.values()):
            # Not getattr, which imports what a lazy module stands for.
            names = getattr(holder, "__dict__", {})
            if names.get(name) is original:
                names[name] = replaced


@contextlib.contextmanager
def class_attribute(
    owner: str, attribute: str, replacement: Callable[[Any], Any]
) -> Iterator[None]:
    """Replaces a method of a class within the context, for all threads."""
    found = owner_of(_row_of(owner, attribute))
    is_own = attribute in vars(found)
    original = getattr(found, attribute)
    setattr(found, attribute, replacement(original))
    try:
        yield
    finally:
        if is_own:
            setattr(found, attribute, original)
        else:
            delattr(found, attribute)


def _row_of(owner: str, attribute: str) -> Seam:
    for seam in SEAMS:
        if (seam.owner, seam.attribute) == (owner, attribute):
            return seam
    raise SeamError(f"{attribute} of {owner} is not in the table of seams of tfdp.")


@functools.cache
def _owners(attribute: str) -> tuple[type, ...]:
    """The classes with a row for an attribute."""
    found = []
    for seam in SEAMS:
        if seam.attribute == attribute:
            with contextlib.suppress(ImportError, AttributeError):
                found.append(owner_of(seam))
    return tuple(kind for kind in found if isinstance(kind, type))
