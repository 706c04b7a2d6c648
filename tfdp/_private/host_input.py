"""Distributed datasets that replicas on CPUs read directly from the host's pipeline.

TensorFlow reads for several devices through a `MultiDeviceIterator`: a thread for the
pipeline and, per device, a generator that calls the host, with a buffer and a thread,
all created for every epoch with six traced functions per replica. Logical CPUs share
the pipeline's memory: here the step takes one element per replica, in rank order, the
same elements. A pipeline with fewer elements than replicas left is padded with empty
ones, so the step has no condition per element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_lib

from tfdp.seams.replace import with_state_of

DatasetFromFunctionSpec = input_lib.DistributedDatasetsFromFunctionSpec


def read_on_host(distributed: Any) -> Any:
    """`distributed`, a dataset for the CPUs of one host, read directly.

    Returns it unchanged for other devices, or if it has options.
    """
    workers = distributed._input_workers
    if workers.num_workers != 1 or distributed._options is not None:
        return distributed
    devices = workers.compute_devices_for_worker(0)
    if not share_memory(devices):
        return distributed
    kinds = {
        input_lib.DistributedDataset: HostDataset,
        input_lib.DistributedDatasetsFromFunction: HostDatasetFromFunction,
    }
    # Copy all state of the dataset; only the class that reads differs.
    return with_state_of(kinds[type(distributed)], distributed)


def share_memory(devices: Sequence[str]) -> bool:
    """Whether all `devices`, of this process, are CPUs."""
    return all(tf.DeviceSpec.from_string(d).device_type == "CPU" for d in devices)


class _HostRead:
    """Mixin of a distributed dataset: creates iterators over the host's pipeline."""

    #: Whether every step finds elements for all replicas, or none.
    _is_split: bool
    _host_datasets: list[tf.data.Dataset]
    # Attributes of both TensorFlow classes.
    _cardinality: Any
    _enable_get_next_as_optional: bool
    _input_workers: Any
    _options: Any
    _strategy: tf.distribute.Strategy

    def __iter__(self) -> input_lib.DistributedIterator:
        workers, strategy = self._input_workers, self._strategy
        [dataset] = self._host_datasets
        devices = workers.compute_devices_for_worker(0)
        with tf.device(workers.worker_devices[0]):
            dataset = self._filled_up(dataset, len(devices))
            is_whole = self._enable_get_next_as_optional or self._is_split
            iterator = self._iterator_class(
                workers,
                iterators=[iter(dataset)],
                strategy=strategy,
                cardinality=self._cardinality,
                enable_get_next_as_optional=not is_whole,
                options=self._options,
            )
        iterator._element_spec = input_lib._create_distributed_tensor_spec(
            strategy, dataset.element_spec
        )
        return iterator

    @property
    def _iterator_class(self) -> type[HostIterator]:
        return HostIterator

    def _filled_up(self, dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
        """`dataset`, at whose end a step finds empty elements for other replicas."""
        if not self._enable_get_next_as_optional or replicas == 1:
            return dataset
        nothing = input_lib._dummy_tensor_fn(dataset.element_spec)
        rest = tf.data.Dataset.from_tensors(nothing).repeat(replicas - 1)
        return dataset.concatenate(rest)


class HostDataset(_HostRead, input_lib.DistributedDataset):
    """A dataset of global batches, which the pipeline splits per replica."""

    _is_split = True

    @property
    def _host_datasets(self) -> list[tf.data.Dataset]:  # type: ignore[override]
        return self._cloned_datasets


class HostDatasetFromFunction(_HostRead, input_lib.DistributedDatasetsFromFunction):
    """A dataset of per-replica batches from a function."""

    _is_split = False

    @property
    def _host_datasets(self) -> list[tf.data.Dataset]:  # type: ignore[override]
        # Prefetch: otherwise a step would wait for each read.
        devices = self._input_workers.compute_devices_for_worker(0)
        return [dataset.prefetch(len(devices)) for dataset in self._datasets]


class HostIterator(input_lib.DistributedIterator):
    """Takes one element of the host's pipeline per replica.

    `enable_get_next_as_optional`: a step may find elements for only some replicas.
    """

    #: Whether a step or a caller has read it.
    is_read = False

    def get_next(self, name: str | None = None) -> Any:
        """The next element for all replicas, as per-replica values.

        Raises:
          tf.errors.OutOfRangeError: there is none for one of them.
        """
        if tf.distribute.get_replica_context() is not None and (
            tf.distribute.has_strategy()
        ):
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        return self._get_next_no_partial_batch_handling(name)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The next element for all replicas; empty at the end."""
        if self._cardinality == tf.data.INFINITE_CARDINALITY:
            return tf.experimental.Optional.from_value(self.get_next())
        self.is_read = True
        iterator, workers = self._iterators[0], self._input_workers
        parts = [iterator.get_next_as_optional() for _ in self._devices]
        needed = parts[0] if self._enable_get_next_as_optional else parts[-1]

        def values() -> tf.experimental.Optional:
            if self._enable_get_next_as_optional:
                found = input_lib._get_value_or_dummy(
                    workers, [parts], produce_dummy=True
                )
            else:
                found = [part.get_value() for part in parts]
            return tf.experimental.Optional.from_value(self._per_replica(found))

        return tf.cond(
            needed.has_value(),
            values,
            lambda: tf.experimental.Optional.empty(self._element_spec),
        )

    @property
    def _spec_class(self) -> type[HostIteratorSpec]:
        return HostIteratorSpec

    @property
    def _devices(self) -> tuple[str, ...]:
        return self._input_workers.compute_devices_for_worker(0)

    @functools.cached_property
    def _type_spec(self) -> HostIteratorSpec:
        # Every call of a step reads and compares it.
        self.is_read = True
        return self._spec_class(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )

    def _get_next_no_partial_batch_handling(self, name: str | None = None) -> Any:
        self.is_read = True
        iterator = self._iterators[0]
        parts = [iterator.get_next() for _ in self._devices]
        # Count one call: TensorFlow refuses 33 in one trace.
        iterator._get_next_call_count -= min(
            len(parts) - 1, iterator._get_next_call_count
        )
        return self._per_replica(parts)

    def _per_replica(self, parts: list[Any]) -> Any:
        return input_lib._create_per_replica(parts, self._strategy)


class HostIteratorSpec(input_lib.DistributedIteratorSpec):
    """The static type of a `HostIterator` in a traced step."""

    @property
    def value_type(self) -> type[HostIterator]:
        return HostIterator

    @functools.cached_property
    def _component_specs(self) -> list[tf.TypeSpec]:
        part = tf.nest.map_structure(
            lambda spec: input_lib._replace_per_replica_spec(spec, 0),
            self._element_spec,
        )
        return [tf.data.IteratorSpec(part)]

    def _from_components(self, components: Any) -> HostIterator:
        return self.value_type(
            self._input_workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )

    def _serialize(self) -> tuple[Any, ...]:
        return (*super()._serialize(), self._traits)

    def sanity_check_type(self, other: Any) -> None:
        """Raises if a trace for `other` does not fit this one."""
        super().sanity_check_type(other)
        if self._traits != other._traits:
            raise ValueError(f"{self} and {other} end in different ways.")

    @property
    def _traits(self) -> tuple[bool, bool]:
        """Properties that the graph depends on besides the elements."""
        is_endless = self._cardinality == tf.data.INFINITE_CARDINALITY
        return bool(is_endless), bool(self._enable_get_next_as_optional)
