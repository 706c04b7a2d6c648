"""What Keras' loops read: distributed datasets of which builds of models read nothing.

Under a strategy Keras takes a batch off the input before it trains or evaluates, only
to learn shapes and types, and then begins anew. A Python generator cannot begin anew:
what was read, and read ahead, is lost. Input without a batch ends there with a
`StopIteration`. One device does neither. Here the build gets the shapes and types that
the dataset states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private import frames
from tfdp._private.host_input import HostIterator
from tfdp._private.keras_loops import begin_no_epoch_to_build
from tfdp._private.names import NoneTensorSpec
from tfdp.data.unread_iterators import makes_nothing_happen

# Adapters of what Python gives, of which Keras states shapes.
OF_PYTHON = ("GeneratorDataAdapter", "PyDatasetAdapter")

__all__ = ["KerasInput", "NoElement", "keras_input", "with_none"]


class NoElement(NamedTuple):
    """Stands for None in a batch: without tensors, there is nothing to be split."""


def with_none(arguments: Any) -> Any:
    """`arguments` with None in the place of `NoElement`."""
    if isinstance(arguments, NoElement):
        return None
    if isinstance(arguments, dict):
        return {name: with_none(part) for name, part in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(with_none(part) for part in arguments)
    return arguments


class KerasInput:
    """The distributed dataset, for a Keras loop.

    Args:
      distributed: what the strategy made of the dataset.
      element_spec: of the dataset; it stands for a batch where a model is built.
      reuses_unread: whether an iterator that nobody read may stand for the next one.
    """

    def __init__(self, distributed: Any, element_spec: Any, reuses_unread: bool):
        self._distributed = distributed
        self._element_spec = element_spec
        self._reuses_unread = reuses_unread
        self._last: Any = None

    def __iter__(self) -> Iterator[Any]:
        if frames.is_building_model():
            return iter([self._element_spec])
        if self._last is not None and not self._last.is_read:
            return self._last
        iterator = iter(self._distributed)
        if self._reuses_unread and isinstance(iterator, HostIterator):
            self._last = iterator
        return iterator


def keras_input(element_spec: Any, distributed: Any, source: tf.data.Dataset) -> Any:
    """`distributed`, as the caller's Keras loop may read it; else as it is.

    Shapes with more unknown axes than the first one cannot always stand for a batch.
    There one is read, as Keras does; but not from a generator, which one device, too,
    builds the model for by these shapes.

    Args:
      element_spec: of the dataset that was distributed.
      distributed: what the strategy made of it.
      source: what was distributed.
    """
    adapter = frames.adapter_of_caller()
    if adapter is None:
        return distributed
    begin_no_epoch_to_build(adapter)
    leaves = tf.nest.flatten(element_spec)
    is_of_python = type(adapter).__name__ in OF_PYTHON
    if not is_of_python and not all(map(_tells_shape, leaves)):
        return distributed
    stated = [None if _is_none(leaf) else leaf for leaf in leaves]
    spec = tf.nest.pack_sequence_as(element_spec, stated)
    return KerasInput(distributed, spec, makes_nothing_happen(source))


def _is_none(spec: Any) -> bool:
    """Whether Keras takes what `spec` is of for None."""
    return isinstance(spec, (tf.OptionalSpec, NoneTensorSpec))


def _tells_shape(spec: Any) -> bool:
    shape = getattr(spec, "shape", tf.TensorShape(None))
    return _is_none(spec) or bool(shape.rank and shape[1:].is_fully_defined())
