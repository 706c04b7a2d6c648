"""Whether files of records are as their index says, in the time that reading takes.

A whole file is read and parsed within TensorFlow, in batches, and nothing comes to
Python but the number of records. What is wrong with a file that is not sound is for
`tfdp.data.verify` to find, record by record.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from tfdp.data.encoding import decode_examples
from tfdp.data.features import FeatureSpec
from tfdp.data.framing import FramingFault, scan_records
from tfdp.data.index import RecordFile
from tfdp.data.places import Place
from tfdp.errors import DataError
from tfdp.progress_bar import progress_bar

__all__ = ["in_turn", "is_parsed", "is_sound"]

# What is parsed at a time: many small records, few large ones.
BATCH_BYTES = 2**20
MOST_BATCH_EXAMPLES = 1024

Found = TypeVar("Found")


def is_sound(
    path: Place,
    file: RecordFile,
    features: Mapping[str, FeatureSpec],
    compression: str = "",
) -> bool:
    """Whether a file holds the records that its index promises, and all of them parse.

    Args:
      path: of the file.
      file: what its index promises.
      features: what every record holds.
      compression: "", "GZIP" or "ZLIB".

    Cost: reads the file twice: its framing, and what is in it.
    """
    is_known = bool(file.records_digest)
    try:
        # Lengths that have the digest of the index are those that were checked then.
        framing = scan_records(path, compression, check_lengths=not is_known)
        if framing.records != file.examples:
            return False
        if is_known and framing.digest != file.records_digest:
            return False
    except (FramingFault, OSError, DataError, tf.errors.OpError):
        return False
    return is_parsed(path, file, features, compression)


def is_parsed(
    path: Place,
    file: RecordFile,
    features: Mapping[str, FeatureSpec],
    compression: str = "",
) -> bool:
    """Whether TensorFlow reads and parses all records of a file whose framing is sound.

    Args: see `is_sound`.
    """
    try:
        return _parsed_examples(path, file, features, compression) == file.examples
    except (OSError, DataError, tf.errors.OpError):
        return False


def _parsed_examples(
    path: Place,
    file: RecordFile,
    features: Mapping[str, FeatureSpec],
    compression: str,
) -> int:
    """How many records TensorFlow reads and parses.

    Raises:
      tf.errors.OpError: when one is damaged, or is no such example.
    """
    records = tf.data.TFRecordDataset(str(path), compression_type=compression)
    if any(spec.varies for spec in features.values()):
        # Only one at a time can be of any length.
        parsed = records.map(
            lambda record: (
                tf.constant(1, tf.int64),
                decode_examples(record, features),
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    else:
        bytes_per_example = max(1, file.size_bytes // max(1, file.examples))
        batch = min(MOST_BATCH_EXAMPLES, 1 + BATCH_BYTES // bytes_per_example)
        parsed = records.batch(batch).map(
            lambda batch: (tf.size(batch, tf.int64), decode_examples(batch, features)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    total = parsed.reduce(tf.constant(0, tf.int64), lambda seen, new: seen + new[0])
    return int(total)


def in_turn(
    label: str, files: Sequence[RecordFile], act: Callable[[RecordFile], Found]
) -> list[Found]:
    """What `act` finds of each file, in their order; several at once, with a bar.

    Args:
      label: what is done, in a few words.
      files: their sizes are the bar's.
      act: called in other threads. The error of the first file that raises one is
        raised once all that were begun have ended.
    """
    total = sum(file.size_bytes for file in files)
    workers = max(1, min(len(files), os.cpu_count() or 1, 8))
    with (
        progress_bar(label, total) as advance,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):

        def counted(file: RecordFile) -> Found:
            found = act(file)
            advance(file.size_bytes)
            return found

        futures = [pool.submit(counted, file) for file in files]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
