"""Reads a set of TFRecord files as global batches.

    files -> shuffled -> interleaved chunks -> records shuffled -> batches -> parsed

The size and ends of every file are compared with the index first, its checksums when it
is opened, and the counts while reading. A file that differs is searched for the record.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.data.encoding import decode_examples
from tfdp.data.index import RecordIndex
from tfdp.data.indexed_sets import mixed, open_share, own_records
from tfdp.data.pipeline import batch_examples, finish_batches, select_features
from tfdp.data.verify import FileCheck, check_before_reading, describe_fault

# Reading chunks of records amortizes the cost per chunk. The sizes bound the memory of
# the files in reading.
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

    The strategy splits each global batch over its replicas. On several hosts each one
    reads every file and keeps its slice of every batch, so N hosts see the batches of
    one. With `input_context` each reads its own files only: less reading, but batches
    differ from one host's.

    Args:
      source: What `write_tfrecords` returned; a directory that holds one set; a set's
        path (`out/train`); or a pattern of file names (`out/train-*.tfrecord`). Paths
        may be URLs that `tf.io.gfile` opens, such as `gs://bucket/train`.
      global_batch_size: Samples of all replicas together in one step, from 1.
      shuffle: Whether to shuffle, differently in every epoch.
      seed: Determines the order, together with `keras.utils.set_random_seed` if it is
        called: the same seed gives the same epochs.
      shuffle_buffer_examples: How many records are shuffled at a time. By default as
        many as fit in 256 MiB.
      drop_remainder: Whether to drop a last batch that is not full. A tfdp strategy
        weights a short batch exactly, so it may stay.
      repeat: Whether the dataset has no end; `fit` then needs `steps_per_epoch`.
      as_supervised: Names of the features of a tuple, such as ("image", "label"). By
        default a batch is a dict.
      transform: Applied to each example before batching, in parallel, as by `map`.
      variable_length: How to batch a feature whose length varies: "ragged", a
        `tf.RaggedTensor`, or "pad", dense with zeros at the end.
      cycle_length: How many files are read at a time, from 1.
      deterministic: False lets a slow file be overtaken, in an order that is never the
        same. Use it on one host only.
      input_context: The argument of the function given to
        `strategy.distribute_datasets_from_function`. The dataset is then this host's
        share, in batches of global_batch_size / replicas: whole files if there are at
        least as many as hosts, else every H-th record. All hosts together read each
        record once per epoch; unequal shares all finish under a tfdp strategy.

    Returns:
      A `tf.data.Dataset` of batches whose number is known (`len(dataset)`).

    Raises:
      ConfigurationError: An argument is out of range.
      DataError: No file or index, or a file is missing or differs from its index in
        size, beginning or end (with the number of its first bad record).
      tf.errors.InvalidArgumentError: While iterating: a record is corrupt or differs
        from the index. The message holds a `DataError` with file and record number.

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
        path = index.file_path(file)
        describe = functools.partial(describe_fault, path, file, index.compression)
        check_before_reading(path, file, describe)
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
    files = files.map(lambda path, count: (_called(check, path), count))
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
    """A file's records in chunks, or an error that names the bad record."""

    def require_complete(number: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
        before = number * chunk_examples
        expected = tf.minimum(promised_examples - before, chunk_examples)
        return tf.cond(
            tf.size(records, tf.int64) == expected,
            lambda: records,
            lambda: tf.expand_dims(_called(check.fail, path), 0),
        )

    chunk_count = -(-promised_examples // chunk_examples)
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    # `ignore_errors` ends the file at a damaged record, but retries forever to open a
    # file that cannot be opened. Zipped with the range first, each attempt consumes a
    # number, so the file ends in any case.
    numbered = tf.data.Dataset.zip(
        tf.data.Dataset.range(chunk_count), records.batch(chunk_examples)
    ).ignore_errors()
    # Chunks are missing only after an error; empty ones replace them.
    no_records = (tf.constant(0, tf.int64), tf.constant([], tf.string))
    missing = tf.data.Dataset.from_tensors(no_records).repeat()
    return numbered.concatenate(missing).take(chunk_count).map(require_complete)


def _called(check: Callable[[str], None], path: tf.Tensor) -> tf.Tensor:
    """`path`, after a call of `check` when the graph runs."""

    def call(text: bytes) -> bytes:
        check(text.decode())
        return text

    called = tf.numpy_function(call, (path,), tf.string, stateful=False)
    return tf.ensure_shape(called, ())
