"""Pads short batches to one size, with the true number of rows attached."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.batch_stages import rows_of_batches
from tfdp._private.keras_calls import batch_size_of_caller
from tfdp.errors import ConfigurationError, DataError
from tfdp.tracing.rows import PaddedBatch


def is_of_one_size(dataset: Any, replicas: int) -> bool:
    """Whether all batches have the same number of rows, which `replicas` divides."""
    rows = _static_rows(dataset)
    return rows is not None and rows % replicas == 0


def global_batch_rows(dataset: tf.data.Dataset, stated: int | None = None) -> int:
    """The number of rows of the full batches of `dataset`.

    `stated` by the user, or from the shapes, `fit`'s `batch_size`, the dataset's own
    `batch`, or the first batch, which is then read once more.
    """
    rows = stated or stated_batch_rows(dataset)
    if rows is not None:
        return rows
    source, _ = batch_size_of_caller()
    if source not in (None, "TFDatasetAdapter"):
        raise ConfigurationError(
            f"The size of the batches is not known: a {source} does not state it. Pass "
            "pad_batches=<global batch size> to the strategy."
        )
    # After this read, a shuffle upstream would yield another order.
    for batch in dataset.take(1):
        return int(tf.shape(tf.nest.flatten(batch)[0])[0])
    raise DataError("The dataset has no batch at all.")


def stated_batch_rows(dataset: tf.data.Dataset) -> int | None:
    """`global_batch_rows` if that is known before a batch is read; else None."""
    rows = _static_rows(dataset)
    if rows is not None:
        return rows
    source, rows = batch_size_of_caller()
    if rows is not None:
        return int(rows)
    is_dataset = source in (None, "TFDatasetAdapter")
    return rows_of_batches(dataset) if is_dataset else None


def pad_parts(
    dataset: tf.data.Dataset, rows: int, replicas: int, host: int = 0, hosts: int = 1
) -> tf.data.Dataset:
    """One `PaddedBatch` per replica of each batch of 1 to `rows` rows, of equal size.

    A short batch is padded to the next multiple of `replicas` from `rows` with copies
    of its own rows: valid input for the model, unlike zeros. A host takes each
    `hosts`-th part from `host` on, as Keras joins the results of TPU hosts in that
    order. Ragged, sparse or scalar elements raise a `DataError`.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        if not is_dense or not spec.shape[1:].is_fully_defined():
            raise DataError(
                "Batches can be filled up when their tensors are dense and of known "
                f"shape but for the first axis. Received: {spec}. Pad ragged features "
                '(variable_length="pad" and a fixed length), densify sparse ones.'
            )
    per_replica = -(-rows // replicas)
    size = per_replica * replicas
    is_whole = _static_rows(dataset) == size
    # `map` unpacks tuples, even of one: to Keras `((a, b),)` is two inputs and `(a, b)`
    # an input with its target.
    is_tuple = type(dataset.element_spec) is tuple

    def split(tensor: tf.Tensor) -> tf.Tensor:
        shape = [replicas, per_replica, *tensor.shape[1:]]
        return tf.reshape(tensor, shape)[host::hosts]

    def mark(*parts: Any) -> PaddedBatch:
        batch = parts if is_tuple else parts[0]
        return PaddedBatch.of(tf.nest.map_structure(split, batch), (), per_replica)

    def pad(*parts: Any) -> PaddedBatch:
        batch = parts if is_tuple else parts[0]
        count = tf.shape(tf.nest.flatten(batch)[0])[0]
        message = f"A batch of more than {rows} rows, the size of the first ones."
        check = tf.debugging.assert_less_equal(count, size, message)
        with tf.control_dependencies([check]):
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
    """`dataset`, padded and split for `strategy`'s replicas."""
    replicas = strategy.num_replicas_in_sync

    def parts(context: tf.distribute.InputContext) -> tf.data.Dataset:
        host, hosts = context.input_pipeline_id, context.num_input_pipelines
        return pad_parts(dataset, rows, replicas, host, hosts)

    return strategy.distribute_datasets_from_function(parts)


def _static_rows(dataset: Any) -> int | None:
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in specs]
    rows = {shape[0] if shape.rank else None for shape in shapes}
    return rows.pop() if len(rows) == 1 else None
