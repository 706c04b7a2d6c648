"""Distributed datasets for Keras' loops: building a model reads no batch.

Under a strategy Keras reads a batch before it trains or evaluates, only for its shapes,
and starts over. A Python generator cannot: batches read (ahead) are lost, and no batch
at all is a `StopIteration`. Here the build gets the dataset's element spec instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private import keras_calls, names
from tfdp._private.host_input import HostIterator
from tfdp._private.keras_loops import begin_no_epoch_to_build
from tfdp._private.names import NoneTensorSpec
from tfdp._private.step_ops import PYTHON

# Adapters of Python data, for which Keras states shapes.
OF_PYTHON = ("GeneratorDataAdapter", "PyDatasetAdapter")


class NoElement(NamedTuple):
    """Stands for None in a batch: it has no tensors to split."""


def with_none(arguments: Any) -> Any:
    """`arguments` with None instead of `NoElement`."""
    if isinstance(arguments, NoElement):
        return None
    if isinstance(arguments, dict):
        return {name: with_none(part) for name, part in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(with_none(part) for part in arguments)
    return arguments


class KerasInput:
    """A distributed dataset for a Keras loop; a model's build gets its element spec.

    With `reuses_unread` an unread iterator serves as the next one.
    """

    def __init__(self, distributed: Any, element_spec: Any, reuses_unread: bool):
        self._distributed, self._element_spec = distributed, element_spec
        self._reuses_unread = reuses_unread
        self._last: Any = None

    def __iter__(self) -> Iterator[Any]:
        if keras_calls.is_building_model():
            return iter([self._element_spec])
        if self._last is not None and not self._last.is_read:
            return self._last
        iterator = iter(self._distributed)
        if self._reuses_unread and isinstance(iterator, HostIterator):
            self._last = iterator
        return iterator


def keras_input(element_spec: Any, distributed: Any, source: tf.data.Dataset) -> Any:
    """`distributed`, wrapped if a Keras loop calls that may build from its spec.

    A spec with unknown axes besides the first cannot always stand for a batch: then
    Keras reads one, except from a generator, which one device, too, builds from.
    """
    adapter = keras_calls.adapter_of_caller()
    if adapter is None:
        return distributed
    begin_no_epoch_to_build(adapter)
    leaves = tf.nest.flatten(element_spec)
    is_of_python = type(adapter).__name__ in OF_PYTHON
    if not is_of_python and not all(map(_has_static_shape, leaves)):
        return distributed
    stated = [None if _is_none(leaf) else leaf for leaf in leaves]
    spec = tf.nest.pack_sequence_as(element_spec, stated)
    return KerasInput(distributed, spec, has_no_side_effects(source))


def _is_none(spec: Any) -> bool:
    return isinstance(spec, (tf.OptionalSpec, NoneTensorSpec))  # Keras takes it as None


def _has_static_shape(spec: Any) -> bool:
    shape = getattr(spec, "shape", tf.TensorShape(None))
    return _is_none(spec) or bool(shape.rank and shape[1:].is_fully_defined())


# On finite datasets Keras makes an iterator at the end of an epoch, drops it unread and
# makes another; each costs as much as some steps of a small model. The first may serve
# as the second if creating it has no side effect: a shuffle that reshuffles draws its
# next seeds then; Python code and services might do anything. These classes, named like
# their operations, act only when read:
QUIET = {
    *("Batch", "Cache", "Concatenate", "Filter", "FlatMap", "Interleave", "Lasting"),
    *("Map", "Options", "PaddedBatch", "ParallelBatch", "ParallelInterleave"),
    *("ParallelMap", "Prefetch", "Range", "Repeat", "Shard", "Skip", "TFRecord"),
    *("Take", "Tensor", "TensorSlice", "Zip"),
}
KIND = re.compile(r"_?(\w*?)Dataset(V\d)?")


def has_no_side_effects(dataset: tf.data.Dataset) -> bool:
    """Whether creating an iterator of `dataset` is known to have no side effect."""
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
