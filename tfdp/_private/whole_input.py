"""Distributed datasets of which a step takes a whole global batch, and then its rows.

Which rows a host takes is decided when the step takes the batch, behind all that is
read ahead: hosts read ahead by different numbers of batches. The strategy splits, by
its method `split_batch`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.host_input import (
    DatasetFromFunctionSpec,
    HostDatasetFromFunction,
    HostIterator,
    HostIteratorSpec,
)
from tfdp.seams.replace import with_state_of

BATCHES_AHEAD = 2


def taken_whole(distributed: Any) -> WholeDataset:
    """`distributed`, from a function of global batches; a step splits what it takes."""
    return with_state_of(WholeDataset, distributed)


class WholeIterator(HostIterator):
    """Takes a global batch, and returns the parts of this host's replicas."""

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The next batch for all replicas; empty at the end."""
        if self._cardinality == tf.data.INFINITE_CARDINALITY:
            return tf.experimental.Optional.from_value(self.get_next())
        self.is_read = True
        found = self._iterators[0].get_next_as_optional()
        return tf.cond(
            found.has_value(),
            lambda: tf.experimental.Optional.from_value(self._split(found.get_value())),
            lambda: tf.experimental.Optional.empty(self._element_spec),
        )

    def _get_next_no_partial_batch_handling(self, name: str | None = None) -> Any:
        self.is_read = True
        return self._split(self._iterators[0].get_next())

    def _split(self, batch: Any) -> Any:
        return self._per_replica(self._strategy.split_batch(batch))

    @property
    def _spec_class(self) -> type[HostIteratorSpec]:
        return WholeIteratorSpec


class WholeIteratorSpec(HostIteratorSpec):
    """The static type of a `WholeIterator` in a traced step."""

    @property
    def value_type(self) -> type[HostIterator]:
        return WholeIterator


class WholeDataset(HostDatasetFromFunction):
    """A dataset of global batches, which are split where a step takes them."""

    _is_split = True

    @property
    def _iterator_class(self) -> type[HostIterator]:
        return WholeIterator

    def _filled_up(self, dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
        return dataset  # one element is for all replicas

    @property
    def _host_datasets(self) -> list[tf.data.Dataset]:  # type: ignore[override]
        return [dataset.prefetch(BATCHES_AHEAD) for dataset in self._datasets]

    @property
    def _type_spec(self) -> WholeDatasetSpec:
        return WholeDatasetSpec(
            self._input_workers, self._element_spec, self._strategy, self._options
        )


class WholeDatasetSpec(DatasetFromFunctionSpec):
    """The static type of a `WholeDataset` that a `tf.function` takes."""

    @property
    def value_type(self) -> type[WholeDataset]:
        return WholeDataset

    def _from_components(self, components: Any) -> WholeDataset:
        return taken_whole(super()._from_components(components))
