"""Batches as strategies can split them: every element along its first axis.

TensorFlow splits each element of a batch by itself. Where it does not know the size of
the batches it splits elements of different lengths in different places, or leaves the
rest of one out, silently; a scalar, None and a sparse element without rows end in
errors of its inside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.batch_stages import is_zip_of_batches
from tfdp._private.names import NoneTensorSpec, PerReplica
from tfdp.data.keras_input import NoElement
from tfdp.errors import DataError

ADVICE = (
    "A strategy splits every element of a batch along its first axis. If the dataset "
    "gives single rows, .batch(global_batch_size) is missing. Repeat what is the same "
    "for all rows once for each row (tf.repeat), or make it a part of the model."
)

UNLIKE = (
    "Elements of different lengths, such as labelled and unlabelled rows, are split "
    "where they come out of tf.data.Dataset.zip, of datasets that were batched before, "
    "and each length is a multiple of the number of replicas in every batch "
    "(drop_remainder=True leaves the odd last one out, and lets shapes tell lengths, "
    "which batches need that are mapped); docs/data.md says where not. Batches of "
    "graphs, with nodes, edges and labels, cannot be split: give each replica whole "
    "graphs by strategy.distribute_datasets_from_function, first an element with one "
    "row per graph (docs/data.md)."
)


def splittable(
    dataset: tf.data.Dataset, reader: str | None, replicas: int | None = None
) -> tf.data.Dataset:
    """`dataset`, made sure to have elements that are split alike in each batch.

    They have one length; or come from datasets of their own (a zip of batched ones) and
    have each a multiple of the number of replicas: of elements with 8 and 24 rows each
    of four replicas gets 2 and 6, a quarter of both, and a loss over either is divided
    by what it is on one device. Other rows may belong together, as 16 labels to 8 and 8
    rows that the model joins, and be split apart.

    Args:
      dataset: of global batches.
      reader: the class of Keras' data adapter, when a Keras loop is to read it. Then
        None is `NoElement` until `strategy.run`.
      replicas: N, of all hosts; None: only elements of one length are split alike.

    Raises:
      DataError: when an element is a scalar, or of a length by its shape that is not
        split alike, or None outside of Keras. Where shapes leave lengths open, the
        error comes with the batch (`tf.errors.InvalidArgumentError`).

    Cost: none where the shapes tell, or Keras has looked; else a comparison per batch.
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
    known = [length for length in lengths if length is not None]
    if len(known) > 1 and not (
        replicas and all(n and n % replicas == 0 for n in known)
    ):
        raise DataError(
            f"The elements {lengths[known[0]]} and {lengths[known[1]]} of each batch "
            f"have {known[0]} and {known[1]} rows. {ADVICE} {UNLIKE}"
        )
    if any(isinstance(leaf, NoneTensorSpec) for _, leaf in leaves):
        dataset = dataset.map(_without_none)
    if None not in lengths or len(leaves) == 1 or reader == "ArrayDataAdapter":
        return dataset
    # A filter, because TensorFlow looks through it for the size of the batches.
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
    """Fails where elements of so many rows are not split alike; see `splittable`."""
    all_lengths = tf.stack(lengths)
    is_alike = tf.reduce_all(all_lengths == all_lengths[0])
    if replicas:
        are_multiples = (all_lengths % replicas == 0) & (all_lengths > 0)
        is_alike |= tf.reduce_all(are_multiples)
    message = f"The elements of a batch have different numbers of rows. {ADVICE} "
    return tf.debugging.Assert(is_alike, [message + UNLIKE, all_lengths])


def is_split_by_us(dataset: tf.data.Dataset) -> bool:
    """Whether batches have elements of which TensorFlow cannot split off no rows.

    Those are sparse ones, and ragged ones but for rows of numbers.
    """
    return any(map(_stands_no_empty_part, tf.nest.flatten(dataset.element_spec)))


def _stands_no_empty_part(spec: Any) -> bool:
    if isinstance(spec, tf.RaggedTensorSpec):
        return spec.shape.rank != 2
    return isinstance(spec, tf.SparseTensorSpec)


def parts(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """The parts of each batch, one for each replica and behind each other.

    Of n rows replica r of N gets those from n r / N to n (r + 1) / N, rounded up.
    """

    def split(*batch: Any) -> tf.data.Dataset:
        elements = batch if len(batch) > 1 else batch[0]

        def part_of(rank: tf.Tensor) -> Any:
            def part(element: Any) -> Any:
                rows = length_of(element)
                start, stop = (-((-rows * r) // replicas) for r in (rank, rank + 1))
                return rows_between(element, start, stop)

            return tf.nest.map_structure(
                lambda element: part(element) if has_rows(element) else element,
                elements,
            )

        return tf.data.Dataset.range(replicas).map(part_of)

    return dataset.flat_map(split).prefetch(replicas)


def in_parts(batch: Any, devices: Sequence[str]) -> Any:
    """A batch that nobody distributed, as per-replica values; else `batch` as it is.

    `train_on_batch` and `test_on_batch` give every replica the whole batch. A mean over
    it is the same on each, but not a sum, nor the square of a sparse gradient's rows.

    Args:
      batch: nested tuples, lists and dicts of tensors or None, of n rows each.
      devices: of the replicas; replica r of N gets the rows from n r / N to
        n (r + 1) / N, rounded up.

    Raises:
      DataError: when an element is a scalar.
      tf.errors.InvalidArgumentError: when elements have different lengths.
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
    known = {part.shape[0] for part in tensors}
    if None in known or len(known) > 1:
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
    """The length of the first axis, a scalar of type int64."""
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int64)
    return tf.shape(part, out_type=tf.int64)[0]


def rows_between(part: Any, start: tf.Tensor | int, stop: tf.Tensor | int) -> Any:
    """The rows from `start` to `stop`."""
    if not isinstance(part, tf.SparseTensor):
        return part[start:stop]
    first = tf.concat([[start], tf.zeros_like(part.dense_shape[1:])], axis=0)
    size = tf.concat([[stop - start], part.dense_shape[1:]], axis=0)
    rows = tf.sparse.slice(part, first, size)
    # Layers are built from the length of rows, which a slice forgets.
    rows.set_shape([None, *part.shape[1:]])
    return rows


def has_rows(part: Any) -> bool:
    """Whether `part` is an element that is split: not Keras' mark for None."""
    return tf.is_tensor(part) and not isinstance(part, tf.experimental.Optional)
