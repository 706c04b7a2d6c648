"""Keeps a pipeline alive while a thread reads it, and batches in memory of their own.

An iterator over several devices reads ahead in a thread. TensorFlow puts a dataset with
options on top of the pipeline and releases it before it joins that thread, which reads
the dataset below. If the pipeline is not rewritten (Python generators, optimizations
off), a read then uses freed memory: occasional segmentation faults when Keras drops an
iterator (TensorFlow 2.21, stock strategies too). Another dataset on top prevents that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp._private.host_input import read_on_host, share_memory
from tfdp._private.keras_calls import adapter_of_caller
from tfdp._private.step_ops import PYTHON

EVERYTHING = -1


class LastingInput:
    """Extended-strategy mixin: distributes datasets that outlive their readers."""

    worker_devices: tuple[str, ...]
    is_of_one_host = True  # whether all replicas of a step belong to this process

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        is_of_one = self.is_of_one_host and len(self.worker_devices) == 1
        if is_of_one and share_memory(self.worker_devices):
            if adapter_of_caller() is not None:
                # Keras reads it directly: no thread reads ahead, nothing must outlive.
                return owned(dataset)
        distributed = super()._experimental_distribute_dataset(  # type: ignore[misc]
            dataset, options
        )
        return read_on_host(names.with_host_datasets(distributed, _Lasting))

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable, options: Any
    ) -> Any:
        distributed = super()._distribute_datasets_from_function(  # type: ignore[misc]
            dataset_fn, options
        )
        return read_on_host(names.with_host_datasets(distributed, _Lasting))


class _Lasting(names.UnaryUnchangedStructureDataset):
    """The same dataset; `with_options` puts another one on top of the options."""

    def __init__(self, dataset: tf.data.Dataset):
        dataset = owned(dataset)
        super().__init__(dataset, names.variant_of(dataset))

    def with_options(
        self, options: tf.data.Options, name: str | None = None
    ) -> tf.data.Dataset:
        return super().with_options(options, name=name).take(EVERYTHING)


# What a Python generator or `tf.numpy_function` returns stays in the program's NumPy
# array if aligned to 64 bytes. TensorFlow's kernels write results over inputs that no
# other tensor uses, unaware of the array. Behind a strategy the first replica's part of
# a batch is such an input: a step overwrote targets with its gradients, and a generator
# that yields the same arrays again trained on those (TensorFlow 2.21, stock strategies
# too). So these parts are copied, once per batch, in the input pipeline.


def owned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, with elements that share no memory with Python objects."""
    stages = names.stages_of(dataset)
    if not any(op in PYTHON for stage in stages for op in names.operations_of(stage)):
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
        return tensor  # strings are copied on arrival
    # Not identity, which shares the memory; and a stateful operation is not pruned.
    return tf.ensure_shape(tf.raw_ops.DeepCopy(x=tensor), tensor.shape)
