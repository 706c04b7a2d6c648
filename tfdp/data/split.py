"""Splits batches for replicas: every element along its first axis.

TensorFlow silently splits elements of different lengths at different places or drops a
rest; a scalar, None and a sparse element without rows end in internal errors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.batch_stages import is_zip_of_batches
from tfdp._private.names import NoneTensorSpec, PerReplica
from tfdp.data.keras_input import NoElement
from tfdp.errors import DataError
from tfdp.tracing.rows import rows_between

ADVICE = (
    "A strategy splits every element of a batch along its first axis. If the dataset "
    "gives single rows, .batch(global_batch_size) is missing. Repeat what is the same "
    "for all rows once for each row (tf.repeat), or make it a part of the model."
)

DIFFER = "The elements of a batch have different numbers of rows"
UNLIKE = (
    "Elements of different lengths, such as labelled and unlabelled rows, are split "
    "only in a tf.data.Dataset.zip of batched datasets, if each length is a multiple "
    "of the number of replicas in every batch (drop_remainder=True, which mapped "
    "batches need). Batches of graphs, with nodes, edges and labels, cannot be split: "
    "give each replica whole graphs by strategy.distribute_datasets_from_function, "
    "first an element with one row per graph (docs/data.md)."
)


def splittable(
    dataset: tf.data.Dataset, reader: str | None, replicas: int | None = None
) -> tf.data.Dataset:
    """`dataset`, checked to have elements that split equally in each batch.

    Either all have one length; or they come from a zip of batched datasets and each
    length is a multiple of `replicas` (N, of all hosts): of 8 and 24 rows each of four
    replicas gets 2 and 6, and a loss over either is divided as on one device. Other
    rows may belong together (16 labels of 8 and 8 joined rows) and must not be split.
    If a Keras loop reads (`reader`: the class of its data adapter), None elements
    become `NoElement` until `strategy.run`.

    Raises a `DataError` by the static shapes, else `InvalidArgumentError` with the
    batch.

    Cost: none if shapes are static or Keras has checked; else a comparison per batch.
    """
    if not is_zip_of_batches(dataset):
        replicas = None
    spec = dataset.element_spec
    leaves = keras.tree.flatten_with_path(spec)
    lengths: dict[int | None, str] = {}
    for path, leaf in leaves:
        name = ".".join(map(str, path)) or "of the batch"
        if isinstance(leaf, NoneTensorSpec) and reader is None:
            raise DataError(
                f"The element {name} of each batch is None. Leave it out "
                "(dataset.map) before the strategy distributes the dataset."
            )
        shape = getattr(leaf, "shape", None)
        if not isinstance(leaf, (NoneTensorSpec, tf.OptionalSpec)) and shape == []:
            raise DataError(f"The element {name} of each batch is a scalar. {ADVICE}")
        if shape is not None and shape.rank:
            lengths.setdefault(shape[0], name)
    static = [length for length in lengths if length is not None]
    are_multiples = replicas and all(n and n % replicas == 0 for n in static)
    if len(static) > 1 and not are_multiples:
        raise DataError(
            f"The elements {lengths[static[0]]} and {lengths[static[1]]} of each batch "
            f"have {static[0]} and {static[1]} rows. {ADVICE} {UNLIKE}"
        )
    if any(isinstance(leaf, NoneTensorSpec) for _, leaf in leaves):
        dataset = dataset.map(_without_none)
    if None not in lengths or len(leaves) == 1 or reader == "ArrayDataAdapter":
        return dataset
    # A filter, because TensorFlow looks through it for the batch size.
    checked = dataset.filter(functools.partial(_have_the_same_split, replicas))
    batches = dataset.cardinality()
    if batches == tf.data.UNKNOWN_CARDINALITY:
        return checked
    return checked.apply(tf.data.experimental.assert_cardinality(batches))


def _without_none(*batch: Any) -> Any:
    marked = [NoElement() if part is None else part for part in tf.nest.flatten(batch)]
    structure = tf.nest.pack_sequence_as(batch, range(len(marked)))
    marked_batch = tf.nest.map_structure(lambda place: marked[place], structure)
    return marked_batch if len(marked_batch) > 1 else marked_batch[0]


def _have_the_same_split(replicas: int | None, *batch: Any) -> tf.Tensor:
    parts = [part for part in tf.nest.flatten(batch) if has_rows(part)]
    check = _check_lengths([length_of(part) for part in parts], replicas)
    with tf.control_dependencies([check]):
        return tf.constant(True)


def _check_lengths(lengths: Sequence[tf.Tensor], replicas: int | None) -> tf.Operation:
    """Fails if elements of these lengths do not split equally; see `splittable`."""
    all_lengths = tf.stack(lengths)
    is_equal = tf.reduce_all(all_lengths == all_lengths[0])
    if replicas:
        are_multiples = (all_lengths % replicas == 0) & (all_lengths > 0)
        is_equal |= tf.reduce_all(are_multiples)
    message = f"{DIFFER}. {ADVICE} {UNLIKE}"
    return tf.debugging.Assert(is_equal, [message, all_lengths])


def why_not_split(error: BaseException) -> DataError | None:
    """The error for a failed check of `splittable`; None: it is another error."""
    found = re.search(rf"{DIFFER}.*?\] \[([\d ]+)\]", str(error), re.DOTALL)
    if found is None:
        return None
    return DataError(f"{DIFFER}: {found[1]}. {ADVICE} {UNLIKE}")


def is_split_by_us(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow cannot slice zero rows: of sparse, most ragged elements."""
    return any(
        isinstance(spec, tf.SparseTensorSpec)
        or (isinstance(spec, tf.RaggedTensorSpec) and spec.shape.rank != 2)
        for spec in tf.nest.flatten(dataset.element_spec)
    )


def parts(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """The parts of each batch in sequence, one per replica.

    Of n rows replica r of N gets those from n r / N to n (r + 1) / N, rounded up.
    """

    def split(*batch: Any) -> tf.data.Dataset:
        elements = batch if len(batch) > 1 else batch[0]

        def part_of(rank: tf.Tensor) -> Any:
            def part(element: Any) -> Any:
                if not has_rows(element):
                    return element
                rows = length_of(element)
                start, stop = (-((-rows * r) // replicas) for r in (rank, rank + 1))
                return rows_between(element, start, stop)

            return tf.nest.map_structure(part, elements)

        return tf.data.Dataset.range(replicas).map(part_of)

    return dataset.flat_map(split).prefetch(replicas)


def in_parts(batch: Any, devices: Sequence[str]) -> Any:
    """An undistributed batch as per-replica values; other values as they are.

    `train_on_batch` and `test_on_batch` give every replica the whole batch. A mean over
    it is right on each, but not a sum, nor the square of a sparse gradient's rows.
    Replica r of N (`devices`) gets the rows from n r / N to n (r + 1) / N, rounded up.
    """
    elements = [part for part in tf.nest.flatten(batch) if part is not None]
    if not elements or any(isinstance(part, PerReplica) for part in elements):
        return batch
    tensors = [
        part
        if isinstance(part, (tf.RaggedTensor, tf.SparseTensor))
        else tf.convert_to_tensor(part)
        for part in elements
    ]
    if any(part.shape.rank == 0 for part in tensors):
        raise DataError(f"An element of this batch is a scalar. {ADVICE}")
    replicas = len(devices)
    static = {part.shape[0] for part in tensors}
    if None in static or len(static) > 1:
        _check_lengths([length_of(part) for part in tensors], None)

    def split(part: Any) -> Any:
        rows = length_of(part) if part.shape[0] is None else part.shape[0]
        places = [-((-rows * rank) // replicas) for rank in range(replicas + 1)]
        values = []
        for start, stop, device in zip(places, places[1:], devices, strict=False):
            with tf.device(device):
                values.append(rows_between(part, start, stop))
        return PerReplica(values)

    remaining = iter(tensors)
    return tf.nest.map_structure(
        lambda part: None if part is None else split(next(remaining)), batch
    )


def length_of(part: Any) -> tf.Tensor:
    """The length of the first axis, an int64 scalar."""
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int64)
    return tf.shape(part, out_type=tf.int64)[0]


def has_rows(part: Any) -> bool:
    """Whether `part` is split: a tensor, not Keras' optional for None."""
    return tf.is_tensor(part) and not isinstance(part, tf.experimental.Optional)


def bounds_of_host(rows: Any, rank: int, hosts: int) -> tuple[Any, Any]:
    """The first of a batch's `rows` that host `rank` takes, and the one after them."""
    return rows * rank // hosts, rows * (rank + 1) // hosts
