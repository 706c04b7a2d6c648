"""Batches of one size from batches of several: short ones are filled up and say so."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.batch_stages import rows_of_batches
from tfdp._private.frames import batch_size_of_caller
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError, DataError
from tfdp.tracing.padded_batch import PaddedBatch


def check_pad_batches(value: Any) -> bool | int:
    """`value`, when it can be the argument `pad_batches` of a strategy.

    Raises:
      ConfigurationError: when it is neither a switch nor a size.
    """
    if isinstance(value, bool) or is_whole(value, least=1):
        return value
    raise ConfigurationError(
        "pad_batches must be True, False, or the global batch size (at least 1). "
        f"Received: {value!r}."
    )


def is_of_one_size(dataset: Any, replicas: int) -> bool:
    """Whether every batch has the same number of rows, which `replicas` divides."""
    rows = _static_rows(dataset)
    return rows is not None and rows % replicas == 0


def global_batch_rows(dataset: tf.data.Dataset, stated: int | None = None) -> int:
    """How many rows the batches of `dataset` have, the short ones aside.

    Args:
      dataset: of batches.
      stated: what the user said; None to find out: from the shapes, from `fit`'s
        `batch_size`, from the dataset's own `batch`, or from the first batch, which is
        then read once more.

    Raises:
      ConfigurationError: when none of these tells.
    """
    rows = stated or _static_rows(dataset)
    if rows is not None:
        return rows
    source, rows = batch_size_of_caller()
    if rows is not None:
        return int(rows)
    if source not in (None, "TFDatasetAdapter"):
        raise ConfigurationError(
            f"The size of the batches is not known: the data come through a {source}, "
            "which does not tell. Pass pad_batches=<global batch size> to the strategy."
        )
    rows = rows_of_batches(dataset)
    if rows is not None:
        return rows
    # A shuffle before would have another order from then on.
    for batch in dataset.take(1):
        return int(tf.shape(tf.nest.flatten(batch)[0])[0])
    raise DataError("The dataset has no batch at all.")


def pad_parts(
    dataset: tf.data.Dataset, rows: int, replicas: int, host: int = 0, hosts: int = 1
) -> tf.data.Dataset:
    """One element for each replica of each batch, all of the same size.

    Others than whole ones are filled up to the next multiple of `replicas` from `rows`
    with copies of their own rows: values that the model can take, unlike zeros.

    Args:
      dataset: of batches of 1 to `rows` rows: nested dense tensors with a first axis.
      rows: the largest number of rows of a batch.
      replicas: N.
      host, hosts: take each `hosts`-th part from `host` on: Keras joins the results of
        TPU hosts in that order.

    Returns:
      A dataset of `PaddedBatch`, N / hosts for each batch.

    Raises:
      DataError: when elements are ragged, sparse, scalars or of unknown size.
    """
    _check_elements(dataset)
    per_replica = -(-rows // replicas)
    size = per_replica * replicas
    is_whole = _static_rows(dataset) == size
    # `map` takes tuples apart, those of one as well: to Keras `((a, b),)` are two
    # inputs and `(a, b)` an input with its target.
    is_tuple = type(dataset.element_spec) is tuple

    def split(tensor: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tensor, [replicas, per_replica, *tensor.shape[1:]])[
            host::hosts
        ]

    def mark(*parts: Any) -> PaddedBatch:
        batch = parts if is_tuple else parts[0]
        return PaddedBatch.of(tf.nest.map_structure(split, batch), (), per_replica)

    def pad(*parts: Any) -> PaddedBatch:
        batch = parts if is_tuple else parts[0]
        count = tf.shape(tf.nest.flatten(batch)[0])[0]
        message = f"A batch of more than {rows} rows, the size of the first ones."
        with tf.control_dependencies(
            [tf.debugging.assert_less_equal(count, size, message)]
        ):
            places = tf.range(size)
        order = places % tf.maximum(count, 1)
        signed = tf.where(places < count, count, -count)
        data = tf.nest.map_structure(lambda t: split(tf.gather(t, order)), batch)
        return PaddedBatch.of(data, split(signed), per_replica)

    padded = dataset.map(
        mark if is_whole else pad,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    return padded.unbatch().prefetch(2 * replicas // hosts)


def distribute_padded(
    strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, rows: int
) -> tf.distribute.DistributedDataset:
    """`dataset`, filled up and split, as `strategy`'s replicas take it."""
    replicas = strategy.num_replicas_in_sync

    def parts(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return pad_parts(
            dataset,
            rows,
            replicas,
            context.input_pipeline_id,
            context.num_input_pipelines,
        )

    return strategy.distribute_datasets_from_function(parts)


def _static_rows(dataset: Any) -> int | None:
    """The rows of every batch, where the shapes tell."""
    rows = {
        getattr(spec, "shape", tf.TensorShape(None))[:1].as_list()[0]
        if getattr(spec, "shape", tf.TensorShape(None)).rank
        else None
        for spec in tf.nest.flatten(dataset.element_spec)
    }
    return rows.pop() if len(rows) == 1 else None


def _check_elements(dataset: tf.data.Dataset) -> None:
    for spec in tf.nest.flatten(dataset.element_spec):
        is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        if not is_dense or not spec.shape[1:].is_fully_defined():
            raise DataError(
                "Batches can be filled up when their tensors are dense and of known "
                f"shape but for the first axis. Received: {spec}. Pad ragged features "
                '(variable_length="pad" and a fixed length), densify sparse ones.'
            )
