"""Overrides what a TensorFlow checkpoint stores of one variable."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import ResourceVariable
from tfdp.seams.replace import is_replaced, replace

VALUE = "VARIABLE_VALUE"
WRITE, READ = "_serialize_to_tensors", "_restore_from_tensors"


def checkpoint_as(
    variable: Any, write: Callable[[], Any], read: Callable[[tf.Tensor], None]
) -> None:
    """Makes checkpoints store the result of `write`, and pass it to `read`."""
    replace(variable, WRITE, lambda: {VALUE: write()})
    replace(variable, READ, lambda tensors: read(tensors[VALUE]))


def checkpoint_unless_hooked(
    variable: Any, write: Callable[[], Any], read: Callable[[tf.Tensor], None]
) -> None:
    """`checkpoint_as`, unless the variable has an override already."""
    if not is_replaced(variable, WRITE):
        checkpoint_as(variable, write, read)


def is_checkpointed_as(variable: Any) -> bool:
    """Whether checkpoints store another value of `variable` than its own."""
    return is_replaced(variable, WRITE)


def note_restored(
    variable: Any, components: Sequence[tf.Variable], call: Callable[[], None]
) -> None:
    """Calls `call` after a checkpoint was read into a mirrored variable.

    What is written stays the same. `components` are the copies of `variable`.
    """

    def read(tensors: dict[str, tf.Tensor]) -> None:
        assign_each(components, [tensors[VALUE]] * len(components))
        call()

    replace(variable, WRITE, lambda: components[0]._serialize_to_tensors())
    replace(variable, READ, read)


def assign_each(components: Sequence[tf.Variable], values: Iterable[Any]) -> None:
    """Assigns to each component on its own device."""
    for component, value in zip(components, values, strict=True):
        with tf.device(component.device):
            component.assign(value)


def local_copy_of(component: tf.Variable, whole: Any) -> tf.Variable:
    """A plain variable with the component's value, on its device."""
    with tf.init_scope(), tf.device(component.device):
        value, trainable = component.read_value(), component.trainable
        name = f"{component.name.split(':')[0]}/local"
        copy = ResourceVariable(value, trainable=trainable, name=name)
    # Keras and gradient tapes map a component to its variable by this.
    copy.handle._distributed_container = weakref.ref(whole)
    return copy


def plain_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """A variable of no strategy with `value`, on its device; call it eagerly."""
    with tf.device(value.device):
        return ResourceVariable(value, trainable=False, name=name)


def replace_copies(variable: Any, copies: Sequence[Any]) -> None:
    """Lets a mirrored variable have other copies, which stand for variables."""
    variable._values = tuple(copies)
    for copy in copies:
        copy._distributed_container = weakref.ref(variable)


def are_copies_in_use(variable: Any) -> bool:
    """Whether something beside a mirrored variable holds its copies, or their storage.

    A function that was traced holds the storage that it reads and assigns.
    """
    kept = object()
    handles = [copy.handle for copy in variable.values]
    # Each is in its list and in one other place.
    of_copy, of_handle = _references([object()])[0], _references([kept])[0]
    return any(count > of_copy for count in _references(variable.values)) or any(
        count > of_handle for count in _references(handles)
    )


def _references(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(one) for one in values]


def facts_of(component: tf.Variable) -> dict[str, Any]:
    """Attributes of a component that TensorFlow and Keras read, beside its value."""
    names = ("_unique_id", "_graph_key", "_in_graph_mode", "_shared_name")
    public = ("name", "trainable", "synchronization", "aggregation", "constraint")
    return {name: getattr(component, name) for name in (*public, *names)}
