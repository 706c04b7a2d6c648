"""Whether a model or an optimizer runs code of Keras, TensorFlow and tfdp only.

Looked for is whatever a person wrote, wherever an object holds it: a class of one's
own, a function as an activation, a schedule, a penalty or in a `Lambda`, a method that
was put in the place of Keras'. What is not known counts as a person's.

Not seen are functions that were put into the modules of Keras or TensorFlow, objects
that are called and were put into their classes, and gradients that were registered for
TensorFlow's operations.

Private here is where Keras and TensorFlow keep their code.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["runs_known_code"]

LIBRARIES = (
    *("keras", "tensorflow", "tfdp", "numpy", "ml_dtypes", "optree"),
    *("wrapt", "_wrappers", "pybind11_builtins"),
)
# Modules of Python whose classes only hold something, or say what it is.
HOLDERS = (
    *("builtins", "abc", "collections", "enum", "functools", "inspect", "types"),
    *("typing", "weakref", "_weakref", "_thread", "threading", "contextlib"),
    *("dataclasses", "_abc", "_collections", "collections.abc", "_weakrefset"),
)
# Of exactly these types: one's own kind of number could do anything when added.
VALUES = {type(None), bool, int, float, complex, str, bytes, type(...), slice, range}
VALUES |= {type(NotImplemented), object, np.ndarray, np.dtype}
MANY = (list, tuple, set, frozenset, collections.deque)
HOLDING = (*MANY, dict, types.MappingProxyType)
# Methods of classes that are not written in Python, and not looked into.
NOT_OF_PYTHON = (
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.BuiltinFunctionType, types.GetSetDescriptorType),
)
CHANGING = (list, dict, set, collections.deque, types.SimpleNamespace)
# What holds nothing that is called.
LEAVES: tuple[type, ...] = (
    *(tf.Tensor, tf.Variable, tf.DType, tf.TensorShape, tf.TypeSpec, tf.Graph),
    *(
        np.generic,
        np.dtype,
        tf.distribute.Strategy,
        inspect.Signature,
        inspect.Parameter,
    ),
)


def runs_known_code(
    roots: Iterable[Any],
    leaves: tuple[type, ...] = (),
    besides: Any = None,
    *,
    works_on_given: bool = False,
) -> bool:
    """Whether no person's code is held by `roots`, or by what they hold.

    Args:
      roots: any objects.
      leaves: types of tfdp's own whose objects nobody need look into.
      besides: an object that is not looked into, where one of them holds it.
      works_on_given: whether a person's functions and classes will do that name nothing
        but libraries, values and such functions, and hold no layer: that work on what
        they are given, and on what is their own.
    """
    # With each value whether a person's code holds it.
    todo: list[tuple[Any, bool]] = [(root, False) for root in roots]
    seen = {(id(besides), False): besides}
    while todo:
        value, of_person = todo.pop()
        if type(value) in VALUES or (id(value), of_person) in seen:
            continue
        seen[id(value), of_person] = value  # kept, so that nobody else gets its id
        if works_on_given and isinstance(value, keras.Layer):
            if of_person:
                return False
            continue  # libraries ask it for nothing that it has left
        held = _held_by(value, leaves)
        if held is None and works_on_given:
            held, of_person = _worked_on(value), True
        if held is None:
            return False
        todo += [(each, of_person) for each in held]
    return True


def _held_by(value: Any, leaves: tuple[type, ...]) -> list[Any] | None:
    """What has to be looked at besides; None: `value` may run a person's code."""
    kind = type(value)
    if kind is types.FunctionType:
        return _held_by_function(value)
    if kind is types.MethodType:
        return [value.__self__, value.__func__]
    if kind is types.BuiltinFunctionType:
        is_plain = isinstance(value.__self__, types.ModuleType)
        return [value.__self__] if is_plain else None
    if kind is types.ModuleType:
        name = value.__name__
        return [] if name in ("builtins", "math") or _is_library(name) else None
    if isinstance(value, type):
        return _held_by_class(value)
    if not all(_is_known(base) for base in kind.__mro__):
        return None
    if isinstance(value, LEAVES + leaves):
        return [kind]
    if any(base.__name__ == "ObjectProxy" for base in kind.__mro__):
        return [kind, value.__wrapped__]  # TensorFlow's stand-in for a dictionary
    if kind.__module__ == "builtins" and not issubclass(kind, HOLDING):
        return None
    held: list[Any] = [kind]
    if isinstance(value, functools.partial):
        held += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, weakref.ref):
        held.append(value())
    elif isinstance(value, Mapping):
        held += [*value.keys(), *value.values()]
    elif isinstance(value, MANY):
        held += value
    held += getattr(value, "__dict__", {}).values()
    held += _in_slots(value)
    return held


def _held_by_function(function: types.FunctionType) -> list[Any] | None:
    # Not its name's module, which a wrapper has from what it wraps.
    if not _is_of_library(function):
        return None
    held = list(function.__defaults__ or ())
    held += (function.__kwdefaults__ or {}).values()
    held += vars(function).values()
    return held + [_content_of(cell) for cell in function.__closure__ or ()]


def _worked_on(value: Any) -> list[Any] | None:
    """What a person's function, class or object may work on; None: not known."""
    if isinstance(value, types.FunctionType):
        return _named_by(value)
    if isinstance(value, types.ModuleType):
        return None
    is_class = isinstance(value, type)
    held = [] if is_class else list(getattr(value, "__dict__", {}).values())
    for base in (value if is_class else type(value)).__mro__:
        if _is_known(base):
            held.append(base)
            continue
        for name, member in vars(base).items():
            functions = list(_functions_of(member))
            is_own = not (name.startswith("__") and name.endswith("__"))
            if is_own and isinstance(member, NOT_OF_PYTHON):
                return None
            held += functions or ([member] if is_own else [])
    return held


def _named_by(function: types.FunctionType) -> list[Any] | None:
    """What a person's function may work on; None: something that others may change."""
    names: set[str] = set()
    codes = [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    outside = function.__globals__
    named = {name: outside[name] for name in names if name in outside}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    named |= {name: _content_of(cell) for name, cell in cells}
    its_class = [named.pop("__class__")] if "__class__" in named else []  # for `super`
    held = [*named.values(), *vars(function).values(), *(function.__defaults__ or ())]
    held += (function.__kwdefaults__ or {}).values()
    return None if any(map(_may_change, held)) else held + its_class


def _may_change(value: Any) -> bool:
    """Whether it may hold something else by the time that it is asked."""
    kind = value if isinstance(value, type) else type(value)
    is_changing = issubclass(kind, (*CHANGING, keras.Layer))
    return is_changing or not all(map(_is_known, kind.__mro__))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # it is empty


@functools.cache
def _is_known(kind: type) -> bool:
    return _is_library(kind.__module__) or kind.__module__ in HOLDERS


def _is_of_library(function: types.FunctionType) -> bool:
    """Whether a library wrote it, or Python: what that wraps is looked at as well."""
    name = function.__globals__.get("__name__", "")
    is_made = name.startswith("namedtuple_")
    return is_made or name in HOLDERS or _is_library(name)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _held_by_class(kind: type) -> list[Any] | None:
    """The methods of a class of a library: one may have been put in another's place."""
    if not all(_is_known(base) for base in kind.__mro__):
        return None
    for base in kind.__mro__:
        if not _is_library(base.__module__):
            continue
        for member in vars(base).values():
            for function in _functions_of(member):
                if not _is_of_library(function):
                    return None
    return []


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, property):
        members = [member.fget, member.fset, member.fdel]
    elif isinstance(member, (staticmethod, classmethod)):
        members = [member.__func__]
    elif isinstance(member, functools.cached_property):
        members = [member.func]
    else:
        members = [member]
    for each in members:
        while isinstance(each, types.FunctionType):
            yield each
            each = vars(each).get("__wrapped__")


def _in_slots(value: Any) -> Iterator[Any]:
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)
