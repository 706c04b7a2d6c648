"""Input that lives as long as a thread still reads it.

An iterator over several devices reads ahead in a thread of its own. TensorFlow puts a
dataset with options on top of the pipeline, and lets go of it before it waits for that
thread. Where the pipeline is not rewritten (Python generators, optimizations switched
off), nothing else holds that dataset: the thread's iterator is the one of the dataset
below. A read that ends in between asks a dataset that is gone for its types: now and
then a segmentation fault when an iterator is dropped, as Keras does after `fit` and
`evaluate`. Stock strategies have it too (TensorFlow 2.21).

With another dataset on top the thread's iterator is that dataset's own, and holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp._private.frames import adapter_of_caller
from tfdp._private.host_input import read_on_host, share_memory
from tfdp._private.step_ops import PYTHON

EVERYTHING = -1


class LastingInput:
    """For an extended strategy: makes the datasets that it distributes last, in memory
    of their own."""

    worker_devices: tuple[str, ...]
    #: Whether no other process has replicas that make the step together with these.
    is_of_one_host = True

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        is_of_one = self.is_of_one_host and len(self.worker_devices) == 1
        if is_of_one and share_memory(self.worker_devices):
            if adapter_of_caller() is not None:
                # Keras reads it as without a strategy. No thread of TensorFlow reads
                # ahead, so that nothing has to last.
                return owned(dataset)
        distributed = super()._experimental_distribute_dataset(  # type: ignore[misc]
            dataset, options
        )
        return read_on_host(names.with_host_datasets(distributed, _lasting))

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable, options: Any
    ) -> Any:
        distributed = super()._distribute_datasets_from_function(  # type: ignore[misc]
            dataset_fn, options
        )
        return read_on_host(names.with_host_datasets(distributed, _lasting))


def _lasting(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return _Lasting(owned(dataset))


class _Lasting(names.UnaryUnchangedStructureDataset):
    """The same dataset; what gives it options puts another one on top of them."""

    def __init__(self, dataset: tf.data.Dataset):
        super().__init__(dataset, names.variant_of(dataset))

    def with_options(
        self, options: tf.data.Options, name: str | None = None
    ) -> tf.data.Dataset:
        return super().with_options(options, name=name).take(EVERYTHING)


# Batches in memory of their own.
#
# What a Python generator or `tf.numpy_function` gives stays where it lies, in the
# program's NumPy array, when it happens to be aligned to 64 bytes. TensorFlow's kernels
# write their results over inputs that no other tensor uses, and do not know of the
# array. Behind a strategy the first replica's part of a batch is such an input: a step
# wrote its gradients over the targets, and a generator that gives the same arrays again
# trained on those from then on (TensorFlow 2.21, stock strategies as well). These parts
# are copied.
#
# Cost: one copy of each batch in the host's memory, in the input pipeline.


def owned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, with elements that share no memory with what Python code holds."""
    if not _reads_python(dataset):
        return dataset
    is_unpacked = type(dataset.element_spec) is tuple

    def copy_element(*parts: Any) -> Any:
        element = parts if is_unpacked else parts[0]
        return tf.nest.map_structure(_copy, element, expand_composites=True)

    return dataset.map(copy_element)


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    dtype = tensor.dtype
    is_plain = dtype.is_floating or dtype.is_integer or dtype.is_bool
    if not (is_plain or dtype.is_complex):
        return tensor  # strings are copied when they come
    # Not identity, which is the same memory; and as a stateful operation it is kept.
    return tf.ensure_shape(tf.raw_ops.DeepCopy(x=tensor), tensor.shape)


def _reads_python(dataset: tf.data.Dataset) -> bool:
    """Whether Python code runs somewhere in the pipeline."""
    return any(
        operation in PYTHON
        for stage in names.stages_of(dataset)
        for operation in names.operations_of(stage)
    )
