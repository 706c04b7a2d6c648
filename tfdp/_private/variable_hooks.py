"""What a checkpoint holds of one variable, where that is not what its class says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import ResourceVariable

__all__ = [
    "assign_each",
    "checkpoint_as",
    "checkpoint_unless_hooked",
    "local_copy_of",
    "note_restored",
]


VALUE = "VARIABLE_VALUE"
WRITE, READ = "_serialize_to_tensors", "_restore_from_tensors"


def checkpoint_as(
    variable: Any, write: Callable[[], Any], read: Callable[[tf.Tensor], None]
) -> None:
    """Makes checkpoints hold what `write` returns, and give it back to `read`.

    The instance's own attributes, which TensorFlow asks for before the class's.
    """
    vars(variable)[WRITE] = lambda: {VALUE: write()}
    vars(variable)[READ] = lambda tensors: read(tensors[VALUE])


def checkpoint_unless_hooked(
    variable: Any, write: Callable[[], Any], read: Callable[[tf.Tensor], None]
) -> None:
    """`checkpoint_as`, where nobody has said yet what checkpoints hold of it."""
    if WRITE not in vars(variable):
        checkpoint_as(variable, write, read)


def note_restored(
    variable: Any, components: Sequence[tf.Variable], call: Callable[[], None]
) -> None:
    """Calls `call` after a checkpoint was read into the mirrored `variable`.

    Args:
      variable: the mirrored variable; what is written of it stays what it is.
      components: its copies.
    """

    def read(tensors: dict[str, tf.Tensor]) -> None:
        assign_each(components, [tensors[VALUE]] * len(components))
        call()

    vars(variable)[WRITE] = lambda: components[0]._serialize_to_tensors()
    vars(variable)[READ] = read


def assign_each(components: Sequence[tf.Variable], values: Sequence[Any]) -> None:
    """Assigns to each component on its own device."""
    for component, value in zip(components, values, strict=True):
        with tf.device(component.device):
            component.assign(value)


# A variable of one replica that stands for a component of a mirrored variable.


def local_copy_of(component: tf.Variable, whole: Any) -> tf.Variable:
    """A plain variable on the component's device that starts with its value."""
    with tf.init_scope(), tf.device(component.device):
        copy = ResourceVariable(
            component.read_value(),
            trainable=component.trainable,
            name=f"{component.name.split(':')[0]}/local",
        )
    # Keras and tapes find by it which variable of theirs a component belongs to.
    copy.handle._distributed_container = weakref.ref(whole)
    return copy
