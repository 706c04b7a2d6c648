"""What Keras' loops read: distributed datasets of which builds of models read nothing.

Under a strategy Keras takes a batch off the input before it trains or evaluates, only
to learn shapes and types, and then begins anew. A Python generator cannot begin anew:
what was read, and read ahead, is lost. Input without a batch ends there with a
`StopIteration`. One device does neither. Here the build gets the shapes and types that
the dataset states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private import frames, names
from tfdp._private.host_input import HostIterator
from tfdp._private.keras_loops import begin_no_epoch_to_build
from tfdp._private.names import NoneTensorSpec
from tfdp._private.step_ops import PYTHON

# Adapters of what Python gives, of which Keras states shapes.
OF_PYTHON = ("GeneratorDataAdapter", "PyDatasetAdapter")


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
    if not is_of_python and not all(map(_has_static_shape, leaves)):
        return distributed
    stated = [None if _is_none(leaf) else leaf for leaf in leaves]
    spec = tf.nest.pack_sequence_as(element_spec, stated)
    return KerasInput(distributed, spec, makes_nothing_happen(source))


def _is_none(spec: Any) -> bool:
    """Whether Keras takes what `spec` is of for None."""
    return isinstance(spec, (tf.OptionalSpec, NoneTensorSpec))


def _has_static_shape(spec: Any) -> bool:
    shape = getattr(spec, "shape", tf.TensorShape(None))
    return _is_none(spec) or bool(shape.rank and shape[1:].is_fully_defined())


# Whether an iterator that nobody read may stand for the next one.
#
# Behind a finite dataset Keras makes an iterator when an epoch ends, and another one
# when the next begins: the first is dropped unread. Making one costs as much as some
# steps of a small model. Where nothing happens when an iterator is made, the first may
# be used in the place of the second. A shuffle with `reshuffle_each_iteration` takes
# its next seeds when an iterator is made, so that dropped ones count; Python code and
# services might.


# By the names of their classes, which are those of their operations: what happens in
# these happens when somebody reads.
QUIET = {
    "Batch",
    "Cache",
    "Concatenate",
    "Filter",
    "FlatMap",
    "Interleave",
    "Lasting",
    "Map",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Range",
    "Repeat",
    "Shard",
    "Skip",
    "TFRecord",
    "Take",
    "Tensor",
    "TensorSlice",
    "Zip",
}
KIND = re.compile(r"_?(\w*?)Dataset(V\d)?")


def makes_nothing_happen(dataset: tf.data.Dataset) -> bool:
    """Whether an iterator of `dataset` that nobody reads leaves no trace.

    False also where that is not known.
    """
    for stage in names.stages_of(dataset):
        if not _is_quiet(type(stage).__name__):
            return False
        for operation in names.operations_of(stage):
            if operation in PYTHON:
                return False
            if "Dataset" in operation and not _is_quiet(operation):
                return False
    return True


def _is_quiet(name: str) -> bool:
    found = KIND.fullmatch(name)
    return found is not None and found[1] in QUIET
