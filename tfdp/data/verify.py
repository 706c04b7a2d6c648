"""Finds what is wrong with a TFRecord file, down to the record.

TensorFlow's own message for a damaged file gives a byte offset and no file name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import tensorflow as tf

from tfdp.data.encoding import decode_examples
from tfdp.data.features import FeatureSpec
from tfdp.data.index import COMPRESSIONS, SUFFIX, RecordFile, RecordIndex, find_index
from tfdp.data.places import Place, matching_files, place_of
from tfdp.errors import ConfigurationError, DataError

__all__ = ["describe_fault", "index_tfrecords", "verify_tfrecords"]

_RECORDS_PER_READ = 1024
_REMEDY = "restore the file or write the set again"


def _count_sound_records(path: str, compression: str) -> int:
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    # `ignore_errors` ends a file at its first damaged record.
    chunks = records.ignore_errors().batch(_RECORDS_PER_READ)
    return sum(len(chunk) for chunk in chunks.as_numpy_iterator())


def _read_error(path: str, compression: str, after_records: int) -> str | None:
    """What TensorFlow says about the record after some sound ones; None at the end."""
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    try:
        next(iter(records.skip(after_records)), None)
    except tf.errors.OpError as error:
        found = re.search(r"(corrupted|truncated) record at (\d+)", error.message)
        if found:
            return f"{found[1]} record at byte {found[2]}"
        return error.message
    return None


def describe_fault(
    path: str | os.PathLike[str], promised_examples: int, compression: str = ""
) -> str | None:
    """What is wrong with a file, with its name and the record's number.

    Args:
      path: A TFRecord file.
      promised_examples: How many records its index promises.
      compression: "", "GZIP" or "ZLIB".

    Returns:
      One sentence, or None for a file that holds what was promised.
    """
    path = os.fspath(path)
    if not place_of(path).is_file():
        return f"{path} is missing; {_REMEDY}"
    sound = _count_sound_records(path, compression)
    error = _read_error(path, compression, sound)
    place = f"{path}, record {sound} (counted from 0)"
    promise = f"the index promises {promised_examples} records; {_REMEDY}"
    if error:
        return f"{place}: {error}; {promise}"
    if sound < promised_examples:
        return f"{place}: the file ends before it; {promise}"
    if sound > promised_examples:
        return f"{path} holds {sound} records; {promise}"
    return None


def _describe_content_fault(
    path: Place, features: Mapping[str, FeatureSpec], compression: str
) -> str | None:
    records = tf.data.TFRecordDataset(str(path), compression_type=compression)
    parsed = records.map(
        lambda record: decode_examples(record, features),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    sound = 0
    try:
        for _ in parsed:
            sound += 1
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        return (
            f"{path}, record {sound} (counted from 0): not an example with the "
            f"features of the index ({reason}); {_REMEDY}"
        )
    return None


def verify_tfrecords(source: str | os.PathLike[str] | RecordIndex) -> RecordIndex:
    """Reads every record of a set and compares it with the index.

    Args:
      source: What `read_tfrecords` takes: an index, a directory, a set's path or a
        pattern of file names.

    Returns:
      The index, once every file is sound.

    Raises:
      DataError: Some are not; there is one line for each, with the file's name
        and the number of its first bad record.
    """
    index = find_index(source)
    faults = []
    for file in index.files:
        path = index.file_path(file)
        fault = describe_fault(path, file.examples, index.compression)
        if fault is None:
            fault = _describe_content_fault(path, index.features, index.compression)
        if fault is not None:
            faults.append(fault)
    if faults:
        raise DataError("\n".join(faults))
    return index


def index_tfrecords(
    pattern: str | os.PathLike[str],
    features: Mapping[str, FeatureSpec],
    *,
    name: str,
    compression: str = "",
) -> RecordIndex:
    """Writes the index of TFRecord files that another tool wrote.

    Reads every file once, to count its records and to see that each one parses.

    Args:
      pattern: A pattern of file names in one directory, such as
        `/data/imagenet/train-*` or `gs://bucket/imagenet/train-*`.
      features: Name to `FeatureSpec` of the features to read; a record may hold
        more. Encoded images are `FeatureSpec((), "string")`.
      name: The set's name: the index is `name.index.json` beside the files.
      compression: "", "GZIP" or "ZLIB".

    Returns:
      The index.

    Raises:
      ConfigurationError: `compression` or `features` is not allowed.
      DataError: No file matches, or one is damaged or holds something else.
    """
    if compression not in COMPRESSIONS:
        raise ConfigurationError(
            f"compression is {compression!r}; allowed are {COMPRESSIONS}"
        )
    if not features:
        raise ConfigurationError("features is empty; name at least one feature")
    text = os.fspath(pattern)
    paths = [p for p in matching_files(pattern) if not p.name.endswith(SUFFIX)]
    if not paths:
        raise DataError(f"no file matches {text}")
    if len({path.parent for path in paths}) > 1:
        raise DataError(
            f"{text} matches files of several directories; a set lies in one, so "
            "index each by itself"
        )
    files = []
    for path in paths:
        count = _count_sound_records(str(path), compression)
        fault = describe_fault(path, count, compression)
        fault = fault or _describe_content_fault(path, features, compression)
        if fault:
            raise DataError(fault)
        files.append(RecordFile(path.name, count, path.stat().st_size))
    directory = paths[0].parent
    index = RecordIndex(directory, name, dict(features), tuple(files), compression)
    index.save()
    return index
