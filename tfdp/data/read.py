"""Reads a set of TFRecord files as global batches.

    files -> shuffled -> interleaved chunks -> records shuffled -> batches -> parsed

Of every file the size and the ends are compared with the index before anything else,
its checksums when it is opened, and each chunk must hold as many records as the index
promises. Only a file that differs is searched for the record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.data.encoding import decode_examples
from tfdp.data.index import RecordIndex
from tfdp.data.indexed_sets import mixed, open_share, own_records
from tfdp.data.pipeline import (
    batch_examples,
    finish_batches,
    select_features,
)
from tfdp.data.verify import FileCheck, check_before_reading

# Records come in chunks from one file after the other: what is done for each chunk
# costs little for each record. The sizes bound the memory of the files in reading.
_CHUNK_BYTES = 1024 * 1024
_MOST_CHUNK_EXAMPLES = 64


def read_tfrecords(
    source: str | os.PathLike[str] | RecordIndex,
    global_batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    shuffle_buffer_examples: int | None = None,
    drop_remainder: bool = False,
    repeat: bool = False,
    as_supervised: Sequence[str] | None = None,
    transform: Callable[..., Any] | None = None,
    variable_length: str = "ragged",
    cycle_length: int = 16,
    deterministic: bool = True,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Reads a set of TFRecord files as global batches, ready for `model.fit`.

    The strategy splits each global batch over its replicas. On several hosts each
    one reads every file and keeps its slice of every batch, so that N hosts see
    the batches that one would. With `input_context` each reads its own files only,
    which is less reading, and batches are other ones than one host's.

    Args:
      source: What `write_tfrecords` returned; or a directory that holds one set; or
        a set's path (`out/train`); or a pattern of file names
        (`out/train-*.tfrecord`). A path may be a URL that `tf.io.gfile` opens, such
        as `gs://bucket/train`. The index beside the files is required.
      global_batch_size: Samples of all replicas together in one step, from 1.
      shuffle: Whether the order changes; if so, it changes every epoch.
      seed: Decides the order, together with `keras.utils.set_random_seed` where
        that is called. The same seed gives the same epochs in the same order.
      shuffle_buffer_examples: How many records are mixed at a time. By default
        the whole set where it fits 256 MiB, else as many as do.
      drop_remainder: Whether a last batch that is not full is left out. A tfdp
        strategy weights a short batch exactly, so it may stay.
      repeat: Whether the dataset has no end; `fit` then needs `steps_per_epoch`.
      as_supervised: Names of the features that make up a tuple, such as
        ("image", "label"). By default a batch is a dict.
      transform: Applied to each example before batching, in parallel, with the
        calling convention of `tf.data.Dataset.map`.
      variable_length: What a feature whose length varies becomes in a batch:
        "ragged", a `tf.RaggedTensor`, or "pad", dense with zeros at the end.
      cycle_length: How many files are read at a time, from 1.
      deterministic: False lets a slow file be overtaken: faster at times, but the
        order is another one every time. Use it on one host only.

      input_context: What `strategy.distribute_datasets_from_function` hands to its
        function. Then the dataset is this host's share, in batches of
        global_batch_size / replicas: whole files where there are as many files as
        hosts or more, else every H-th record of all; a line on standard error says
        which. Over all hosts every record is read once in an epoch; hosts whose
        shares differ in length all finish under a tfdp strategy.

    Returns:
      A `tf.data.Dataset` of batches whose number is known (`len(dataset)`).

    Raises:
      ConfigurationError: An argument is out of range.
      DataError: No file, no index, or a file is missing, or its size, its beginning
        or its end are not what its index says (with the number of its first bad
        record).
      tf.errors.InvalidArgumentError: While iterating: a record is corrupt, or the
        file holds other records than its index says. The message holds a `DataError`
        with the file and the record's number.

    Example:
      >>> import numpy as np, tempfile
      >>> import tfdp.data
      >>> index = tfdp.data.write_tfrecords(
      ...     {"image": np.zeros((10, 8, 8), np.uint8), "label": np.arange(10)},
      ...     tempfile.mkdtemp(), num_shards=4)
      >>> batches = tfdp.data.read_tfrecords(
      ...     index, global_batch_size=4, as_supervised=("image", "label"))
      >>> [int(image.shape[0]) for image, label in batches]
      [4, 4, 2]
    """
    share = open_share(
        source,
        "tfrecord",
        global_batch_size,
        seed=seed,
        variable_length=variable_length,
        cycle_length=cycle_length,
        shuffle_buffer_examples=shuffle_buffer_examples,
        as_supervised=as_supervised,
        input_context=input_context,
        deterministic=deterministic,
    )
    index, batch_size = share.index, share.batch_size
    for file in index.files:
        check_before_reading(index.file_path(file), file, index.compression)
    batches_per_epoch = share.batches(drop_remainder)

    records = _interleaved_records(index, shuffle, seed, cycle_length, deterministic)
    records = own_records(records, share, shuffle, seed, shuffle_buffer_examples)
    features = index.features
    if transform is None and not any(spec.varies for spec in features.values()):
        batches = records.batch(batch_size, drop_remainder=drop_remainder)
        batches = batches.map(
            lambda batch: decode_examples(batch, features),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        batches = select_features(batches, as_supervised, None)
    else:
        examples = records.map(
            lambda record: decode_examples(record, features),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        examples = select_features(examples, as_supervised, transform)
        batches = batch_examples(examples, batch_size, drop_remainder, variable_length)
    return finish_batches(
        batches, batches_per_epoch, repeat=repeat, deterministic=deterministic
    )


def _interleaved_records(
    index: RecordIndex, shuffle: bool, seed: int, cycle_length: int, deterministic: bool
) -> tf.data.Dataset:
    paths = [str(index.file_path(file)) for file in index.files]
    counts = tf.constant([file.examples for file in index.files], tf.int64)
    files = tf.data.Dataset.from_tensor_slices((paths, counts))
    if shuffle:
        files = mixed(files, len(paths), seed)
    check = FileCheck(index)
    files = files.map(lambda path, count: (_checked_in_graph(check, path), count))
    bytes_per_example = max(1, index.size_bytes // index.examples)
    chunk_examples = min(_MOST_CHUNK_EXAMPLES, 1 + _CHUNK_BYTES // bytes_per_example)
    chunks = files.interleave(
        lambda path, count: _chunks_of_file(
            check, path, count, chunk_examples, index.compression
        ),
        cycle_length=min(cycle_length, len(paths)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=deterministic,
    )
    return chunks.unbatch()


def _chunks_of_file(
    check: FileCheck,
    path: tf.Tensor,
    promised_examples: tf.Tensor,
    chunk_examples: int,
    compression: str,
) -> tf.data.Dataset:
    """As many records as the index promises, or an error that names the bad one."""

    def require_complete(number: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
        before = number * chunk_examples
        expected = tf.minimum(promised_examples - before, chunk_examples)
        return tf.cond(
            tf.size(records, tf.int64) == expected,
            lambda: records,
            lambda: _raise_in_graph(check, path),
        )

    chunk_count = -(-promised_examples // chunk_examples)
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    # `ignore_errors` ends the file at a damaged record, but tries without end to open
    # one that cannot be opened. The numbers come first, so that every attempt uses
    # one up and the file ends in any case.
    numbered = tf.data.Dataset.zip(
        tf.data.Dataset.range(chunk_count), records.batch(chunk_examples)
    ).ignore_errors()
    # Only after an error are there too few chunks; empty ones then take their place.
    no_records = (tf.constant(0, tf.int64), tf.constant([], tf.string))
    missing = tf.data.Dataset.from_tensors(no_records).repeat()
    return numbered.concatenate(missing).take(chunk_count).map(require_complete)


def _checked_in_graph(check: FileCheck, path: tf.Tensor) -> tf.Tensor:
    def checked(text: bytes) -> bytes:
        check(text.decode())
        return text

    return tf.ensure_shape(
        tf.numpy_function(checked, (path,), tf.string, stateful=False), ()
    )


def _raise_in_graph(check: FileCheck, path: tf.Tensor) -> tf.Tensor:
    raised = tf.numpy_function(
        lambda text: check.fail(text.decode()), (path,), tf.string, stateful=False
    )
    return tf.ensure_shape(raised, (None,))
