"""Verifies TFRecord files against their index and finds the first bad record.

TensorFlow's own message for a damaged file gives a byte offset and no file name.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import tensorflow as tf

from tfdp.checks import check_one_of
from tfdp.data.encoding import decode_examples
from tfdp.data.features import FeatureSpec
from tfdp.data.framing import FramingFault, digest_of_ends, scan_records
from tfdp.data.index import (
    COMPRESSIONS,
    SUFFIX,
    RecordFile,
    RecordIndex,
    files_to_index,
    find_index,
    require_container,
)
from tfdp.data.places import Place, place_of
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import PREFIX
from tfdp.progress_bar import progress_bar

_RECORDS_PER_READ = 1024
_NAMES_SHOWN = 30
GZIP_MAGIC = b"\x1f\x8b\x08"
_REMEDY = "restore the file or write the set again"


def _read_error(records: tf.data.Dataset, after_records: int) -> str | None:
    """TensorFlow's error for the record after some sound ones; None at the end."""
    try:
        next(iter(records.skip(after_records)), None)
    except tf.errors.OpError as error:
        found = re.search(r"(corrupted|truncated) record at (\d+)", error.message)
        return f"{found[1]} record at byte {found[2]}" if found else error.message
    return None


def describe_fault(path: Place, file: RecordFile, compression: str = "") -> str | None:
    """Describes the first difference from the index, with its record; None: nothing."""
    damage, digest = _damage(path, file, compression)
    return damage or _describe_stranger(path, file, digest)


def _describe_stranger(path: Place, file: RecordFile, digest: str) -> str | None:
    if not file.records_digest or digest == file.records_digest:
        return None
    return (
        f"{path} holds {file.examples} sound records, but not those, or not in the "
        "order, of which its index has a checksum: it is another file of this set, or "
        f"belongs to another set; {_REMEDY}"
    )


def _damage(path: Place, file: RecordFile, compression: str) -> tuple[str | None, str]:
    """A fault of the file by itself, and the digest of its records."""
    if not path.is_file():
        return f"{path} is missing; {_REMEDY}", ""
    promise = f"the index promises {file.examples} records; {_REMEDY}"
    digest = ""
    try:
        digest = scan_records(path, compression, check_lengths=True).digest
    except FramingFault as fault:
        if fault.is_claim:
            # TensorFlow must not read it: it would allocate the claimed length.
            return _at(path, fault.record, fault.reason, promise), ""
    except OSError as error:
        return f"{path} cannot be read ({error}); {_REMEDY}", ""
    records = tf.data.TFRecordDataset(str(path), compression_type=compression)
    # `ignore_errors` ends a file at its first damaged record.
    chunks = records.ignore_errors().batch(_RECORDS_PER_READ)
    sound = sum(len(chunk) for chunk in chunks.as_numpy_iterator())
    if error_text := _read_error(records, sound):
        return _at(path, sound, error_text, promise), ""
    if sound < file.examples:
        return _at(path, sound, "the file ends before it", promise), ""
    if sound > file.examples:
        return f"{path} holds {sound} records; {promise}", ""
    return None, digest


def _at(path: Place, record: int, what: str, promise: str) -> str:
    return f"{path}, record {record} (counted from 0): {what}; {promise}"


def check_before_reading(
    path: Place, file: RecordFile, describe: Callable[[], str | None]
) -> None:
    """Raises a `DataError` unless size and ends match the index: a cheap check.

    `describe` says what differs from the index; None: nothing.
    """
    try:
        if path.is_file() and path.stat().st_size == file.size_bytes:
            if file.ends_digest in ("", digest_of_ends(path)):
                return
        fault = describe()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    raise DataError(
        fault
        or f"{path} has not the {file.size_bytes} bytes that the index says, or its "
        "first or last bytes are others, though what it holds is whole: it belongs to "
        f"another set; {_REMEDY}"
    )


class FileCheck:
    """Compares each file of a set with the index when a reader opens it.

    Cost: reads a local file once before TensorFlow does, which then finds it in memory.
    Of remote files only size, ends, counts and records' own checksums are checked.
    """

    def __init__(self, index: RecordIndex):
        self._index = index
        self._files = {str(index.file_path(file)): file for file in index.files}
        self._seen: dict[str, tuple[int, int]] = {}

    def __call__(self, path: str) -> None:
        place, file = place_of(path), self._files[path]
        if not isinstance(place, Path):
            return
        try:
            found = place.stat()
            version = found.st_size, found.st_mtime_ns
            if self._seen.get(path) == version:
                return
            framing = scan_records(place, self._index.compression)
            is_same = file.records_digest in ("", framing.digest)
            if is_same and framing.records == file.examples:
                self._seen[path] = version
                return
        except (OSError, FramingFault):
            pass  # `fail` describes it more exactly
        self.fail(path)

    def fail(self, path: str) -> NoReturn:
        """Raises the `DataError` for a file that could not be read as promised."""
        place, file = place_of(path), self._files[path]
        raise DataError(
            describe_fault(place, file, self._index.compression)
            or f"{path} could not be read to its end, and now it can; check for a "
            "failing disk or mount"
        )


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
      source: An index, a directory, a set's path or a pattern, as for `read_tfrecords`.

    Returns:
      The index, if every file is sound.

    Raises:
      DataError: Some are not: a line for each, with the number of its first bad record.

    Cost: reads each file twice, several in parallel, about as long as an epoch takes; a
    file that is not sound is then read record by record.
    """
    index = find_index(source)
    require_container(index, "tfrecord")

    def fault_of(file: RecordFile) -> str | None:
        path = index.file_path(file)
        try:
            # A matching digest vouches for the lengths, which were checked at indexing.
            framing = scan_records(
                path, index.compression, check_lengths=not file.records_digest
            )
            is_same = file.records_digest in ("", framing.digest)
            is_sound = is_same and framing.records == file.examples
        except (FramingFault, OSError, DataError, tf.errors.OpError):
            is_sound = False
        if is_sound and is_parsed(path, file, index.features, index.compression):
            return None
        fault, digest = _damage(path, file, index.compression)
        if fault is None:
            fault = _describe_content_fault(path, index.features, index.compression)
        return fault or _describe_stranger(path, file, digest)

    found = map_files("verifying records", index.files, fault_of)
    faults = [fault for fault in found if fault is not None]
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

    Args:
      pattern: A pattern of file names in one directory, such as
        `/data/imagenet/train-*` or `gs://bucket/imagenet/train-*`.
      features: Name to `FeatureSpec` of the features to read; a record may hold
        more. Encoded images are `FeatureSpec((), "string")`.
      name: The set's name: the index is `name.index.json` next to the files.
      compression: "", "GZIP" or "ZLIB".

    Raises:
      ConfigurationError: `compression`, `features` or `name` is not allowed.
      DataError: No file matches, or one is damaged or holds something else, or no
        record holds one of the features.

    Cost: reads every file twice, to count its records and to parse each one.
    """
    check_one_of("compression", compression, COMPRESSIONS)
    if not features:
        raise ConfigurationError("features is empty; name at least one feature")
    pairs = features.items() if isinstance(features, Mapping) else [(features, None)]
    for feature, spec in pairs:
        if not isinstance(feature, str) or not isinstance(spec, FeatureSpec):
            raise ConfigurationError(
                'features are names with a FeatureSpec each, as {"label": FeatureSpec('
                f'(), "int64")}}. Received: {feature!r}: {spec!r}.'
            )
    directory, unread = files_to_index(
        pattern,
        name,
        lambda path: not path.name.endswith(SUFFIX) and PREFIX not in path.name,
    )

    def indexed(unindexed: RecordFile) -> RecordFile:
        path = directory / unindexed.name
        file = _file_as_found(path, compression)
        # Without a digest the file is damaged.
        if file.records_digest and is_parsed(path, file, features, compression):
            return file
        fault = describe_fault(path, file, compression)
        fault = fault or _describe_content_fault(path, features, compression)
        if fault and not compression:
            with path.open("rb") as opened:
                if opened.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
                    fault = (
                        f"{path} is packed by gzip: index it with compression='GZIP'."
                    )
        if fault:
            raise DataError(fault)
        return file

    files = map_files("indexing records", unread, indexed)
    if not any(file.examples for file in files):
        raise DataError(f"The files of {pattern} hold no records: nothing to index.")
    index = RecordIndex(directory, name, dict(features), tuple(files), compression)
    _check_held(index, pattern)
    index.save()
    return index


def _check_held(index: RecordIndex, pattern: str | os.PathLike[str]) -> None:
    """Raises a `DataError` for a feature that no record holds.

    TensorFlow reads a feature of varying length as empty where a record lacks it, so a
    misspelt name is no error to it. Reads until all of them were found.
    """
    missing = {name for name, spec in index.features.items() if spec.varies}
    held: set[str] = set()
    in_lists: set[str] = set()
    for file in index.files:
        path = str(index.file_path(file))
        records = tf.data.TFRecordDataset(path, compression_type=index.compression)
        for record in records.as_numpy_iterator():
            if not missing:
                return
            # An Example's features are a SequenceExample's context.
            example = tf.train.SequenceExample.FromString(record)
            held.update(example.context.feature)
            in_lists.update(example.feature_lists.feature_list)
            missing -= held
    if not missing:
        return
    message = (
        f"no record of {pattern} holds {_named(missing)}; records hold "
        f"{_named(held) or 'no features'}."
    )
    if in_lists:
        message += (
            f" They are SequenceExamples, whose lists ({_named(in_lists)}) cannot be "
            "read: write tf.train.Example records (tfdp.data.write_tfrecords)."
        )
    raise DataError(message)


def _named(names: set[str]) -> str:
    shown = sorted(names)[:_NAMES_SHOWN]
    return ", ".join(map(repr, shown)) + (", ..." if len(names) > len(shown) else "")


def _file_as_found(path: Place, compression: str) -> RecordFile:
    """The index entry of a file; of the part before the damage, if it is damaged."""
    size_bytes = path.stat().st_size
    try:
        framing = scan_records(path, compression, check_lengths=True)
    except FramingFault as fault:
        return RecordFile(path.name, fault.record, size_bytes)
    ends = digest_of_ends(path)
    return RecordFile(path.name, framing.records, size_bytes, framing.digest, ends)


# Records are parsed in batches of this size: many small records, few large ones.
BATCH_BYTES = 2**20
MOST_BATCH_EXAMPLES = 1024

Found = TypeVar("Found")


def is_parsed(
    path: Place, file: RecordFile, features: Mapping[str, FeatureSpec], compression: str
) -> bool:
    """Whether TensorFlow parses all records of a file whose framing is sound."""
    records = tf.data.TFRecordDataset(str(path), compression_type=compression)
    # Examples of varying lengths parse one at a time only.
    if not any(spec.varies for spec in features.values()):
        bytes_per_example = max(1, file.size_bytes // max(1, file.examples))
        records = records.batch(
            min(MOST_BATCH_EXAMPLES, 1 + BATCH_BYTES // bytes_per_example)
        )
    parsed = records.map(
        lambda part: (tf.size(part, tf.int64), decode_examples(part, features)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    try:
        total = parsed.reduce(tf.constant(0, tf.int64), lambda seen, new: seen + new[0])
    except (OSError, DataError, tf.errors.OpError):
        return False
    return int(total) == file.examples


def map_files(
    label: str, files: Sequence[RecordFile], act: Callable[[RecordFile], Found]
) -> list[Found]:
    """Calls `act` on each file in threads, with a progress bar; results in order."""
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
