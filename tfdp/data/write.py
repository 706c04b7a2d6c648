"""Writes a set of TFRecord files atomically: all of it appears, or nothing."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private.batch_stages import holds_batches_of_rows
from tfdp.checks import check_one_of, check_whole
from tfdp.data.encoding import encode_example
from tfdp.data.features import FeatureSpec, check_example, infer_features
from tfdp.data.framing import digest_of_ends, scan_records
from tfdp.data.index import COMPRESSIONS, RecordFile, RecordIndex
from tfdp.data.places import Place, place_of
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import remove_leftovers, sync_file, sync_folder, temporary_name
from tfdp.files.checked_json import is_plain_name
from tfdp.progress_bar import progress_bar

# An update of the progress bar takes longer than a small record.
EXAMPLES_PER_ADVANCE = 256


def write_tfrecords(
    examples: Any,
    directory: str | os.PathLike[str],
    *,
    num_shards: int,
    name: str = "train",
    feature_names: Sequence[str] | None = None,
    features: Mapping[str, FeatureSpec] | None = None,
    compression: str = "",
) -> RecordIndex:
    """Writes examples to sharded TFRecord files, with an index of their content.

    Example i goes to file i modulo `num_shards`, called `name-00000-of-00008.tfrecord`
    and so on. Files are written under temporary names: an interrupted run leaves the
    previous set or, during the renaming, a set without an index, which no reader
    accepts. Replaces an older set of the same name, and removes leftovers.

    Args:
      examples: A dict of arrays whose first axis counts the examples; a tuple of such
        arrays, named by `feature_names`; an iterable of dicts of arrays, numbers, bytes
        or text; or an unbatched `tf.data.Dataset` of dicts or tuples.
      directory: Output folder, created if missing; a URL that `tf.io.gfile` opens, such
        as `gs://bucket/folder`, works, too.
      num_shards: The number of files, from 1. Some 100 MB in each reads fast.
      name: The set's name, the start of every file's name.
      feature_names: The names of a tuple's parts, in order.
      features: Name to `FeatureSpec` for what the first example cannot show, such
        as a length that varies: `{"tokens": FeatureSpec((None,), "int64")}`.
      compression: "", "GZIP" or "ZLIB": smaller files, but slower to read.

    Returns:
      The index, with the number of examples and the bytes of each file.

    Raises:
      ConfigurationError: An argument is out of range.
      DataError: An example differs from the first one, there are fewer examples than
        files, or a dataset is batched and `features` does not declare its content.

    Example:
      >>> import numpy as np, tempfile
      >>> import tfdp.data
      >>> index = tfdp.data.write_tfrecords(
      ...     {"image": np.zeros((10, 8, 8), np.uint8), "label": np.arange(10)},
      ...     tempfile.mkdtemp(), num_shards=4)
      >>> [file.examples for file in index.files]
      [3, 3, 2, 2]
    """
    _check_arguments(num_shards, name, compression)
    _refuse_batches(examples, features or {}, feature_names)
    stream, declared = _example_stream(examples, feature_names)
    first = next(stream, None)
    if first is None:
        raise DataError("there are no examples to write; a set holds at least one")
    spec = infer_features(first, {**declared, **(features or {})})
    folder = place_of(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the directory cannot be made ({error}): {str(directory)[:300]!r}"
        ) from error
    remove_leftovers(folder)
    final: list[Place] = [
        folder / f"{name}-{shard:05d}-of-{num_shards:05d}.tfrecord"
        for shard in range(num_shards)
    ]
    temporary = [path.with_name(temporary_name(path.name)) for path in final]
    try:
        with progress_bar("writing records", _length_of(examples)) as advance:
            counts = _write_shards(
                itertools.chain([first], stream), spec, temporary, compression, advance
            )
        files = tuple(
            _record_file(path.name, count, part, compression)
            for path, part, count in zip(final, temporary, counts, strict=True)
        )
        index = RecordIndex(folder, name, spec, files, compression)
        _publish(index, temporary)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return index


def _length_of(examples: Any) -> int:
    """The number of examples; 0: unknown."""
    if isinstance(examples, tf.data.Dataset):
        return max(0, int(examples.cardinality()))
    columns = examples.values() if isinstance(examples, Mapping) else examples
    if isinstance(columns, tuple) or isinstance(examples, Mapping):
        columns = list(columns)
        return len(columns[0]) if columns and hasattr(columns[0], "__len__") else 0
    return len(examples) if hasattr(examples, "__len__") else 0


def _record_file(name: str, count: int, part: Place, compression: str) -> RecordFile:
    """The index entry of a file just written, read back from it."""
    framing = scan_records(part, compression)
    if framing.records != count:
        raise DataError(
            f"{name} holds {framing.records} records though {count} were written; "
            "check for a failing disk or mount"
        )
    size_bytes = part.stat().st_size
    return RecordFile(name, count, size_bytes, framing.digest, digest_of_ends(part))


def _check_arguments(num_shards: int, name: str, compression: str) -> None:
    check_whole("num_shards", num_shards, 1, 99_999)
    longest = f"{name}-00000-of-00000.tfrecord"
    is_odd = not name or name.startswith(".") or any(sign in name for sign in "*?[")
    if is_odd or not is_plain_name(longest):
        raise ConfigurationError(
            f"name is {name[:300]!r}; it begins file names, so it may not be empty, "
            "begin with a dot, hold / \\ * ? [ : or be longer than 231 bytes"
        )
    check_one_of("compression", compression, COMPRESSIONS)


def _refuse_batches(
    examples: Any, features: Mapping[str, FeatureSpec], names: Sequence[str] | None
) -> None:
    """Raises a `DataError` for a batched dataset unless `features` declares it."""
    if not isinstance(examples, tf.data.Dataset) or not holds_batches_of_rows(examples):
        return
    spec = examples.element_spec
    names = list(spec) if isinstance(spec, Mapping) else names or [""]
    if not set(names) <= set(features):
        raise DataError(
            f"examples is a batched dataset (its elements are {spec}), and each record "
            "would hold a whole batch. Leave .batch(...) out, or pass "
            "dataset.unbatch(). Where such rows are one example, as a series in time, "
            "name all of its features in features={name: FeatureSpec(shape, dtype)}."
        )


def _example_stream(
    examples: Any, feature_names: Sequence[str] | None
) -> tuple[Iterator[Any], dict[str, FeatureSpec]]:
    """The examples, and the features that the source declares."""
    if isinstance(examples, tf.data.Dataset):
        return _dataset_stream(examples, feature_names)
    first = examples[0] if isinstance(examples, tuple) and examples else {}
    if not isinstance(first, Mapping):
        names = _names_for(len(examples), feature_names)
        return _column_stream(dict(zip(names, examples, strict=True))), {}
    if isinstance(examples, Mapping):
        return _column_stream(examples), {}
    if not isinstance(examples, Iterable):
        raise ConfigurationError(
            "examples must be a dict or tuple of arrays, an iterable of dicts, or a "
            f"tf.data.Dataset. Received: a {type(examples).__name__}."
        )
    return iter(examples), {}


def _names_for(parts: int, feature_names: Sequence[str] | None) -> Sequence[str]:
    if feature_names is None or len(feature_names) != parts:
        raise ConfigurationError(
            f"examples are tuples of {parts} parts and feature_names is "
            f"{feature_names!r}; name each part, as feature_names=('image', 'label')"
        )
    return feature_names


def _column_stream(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    # Keep lists: their items may differ in length.
    sequences = {
        name: column if isinstance(column, list | tuple) else np.atleast_1d(column)
        for name, column in columns.items()
    }
    lengths = {name: len(sequence) for name, sequence in sequences.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"the arrays hold {lengths} examples; all must have equal first axes"
        )
    count = max(lengths.values(), default=0)
    return ({name: s[i] for name, s in sequences.items()} for i in range(count))


def _dataset_stream(
    dataset: tf.data.Dataset, feature_names: Sequence[str] | None
) -> tuple[Iterator[Any], dict[str, FeatureSpec]]:
    spec = dataset.element_spec
    if isinstance(spec, tuple):
        names = _names_for(len(spec), feature_names)
        spec = dict(zip(names, spec, strict=True))
        dataset = dataset.map(lambda *parts: dict(zip(names, parts, strict=True)))
    if not isinstance(spec, Mapping):
        raise DataError(
            f"the dataset's elements are {type(spec).__name__}; allowed are dicts, and "
            "tuples with feature_names"
        )
    declared = {}
    for name, part in spec.items():
        if not isinstance(part, tf.TensorSpec) or part.shape.rank is None:
            raise DataError(
                f"feature {name!r} of the dataset is {part}; allowed are dense tensors "
                "of known rank"
            )
        declared[name] = FeatureSpec(tuple(part.shape), part.dtype.name)
    return dataset.as_numpy_iterator(), declared


def _write_shards(
    examples: Iterable[Any],
    features: Mapping[str, FeatureSpec],
    paths: Sequence[Place],
    compression: str,
    advance: Callable[[float], None],
) -> list[int]:
    counts = [0] * len(paths)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(tf.io.TFRecordWriter(str(path), compression))
            for path in paths
        ]
        for number, example in enumerate(examples):
            shard = number % len(paths)
            arrays = check_example(example, features, number)
            writers[shard].write(encode_example(arrays, features))
            counts[shard] += 1
            if number % EXAMPLES_PER_ADVANCE == 0:
                advance(EXAMPLES_PER_ADVANCE)
    if counts[-1] == 0:
        raise DataError(
            f"there are {sum(counts)} examples for num_shards={len(paths)} files; "
            "every file holds at least one, so use fewer files"
        )
    return counts


def _publish(index: RecordIndex, temporary: Sequence[Place]) -> None:
    previous = _files_of(index)
    for part in temporary:
        if isinstance(part, Path):
            sync_file(part)
    # Until the new index is written, a reader finds no index, hence no mix of two sets.
    # The syncs keep that order on disk.
    index.path.unlink(missing_ok=True)
    sync_folder(index.directory)  # does nothing for a URL
    for part, file in zip(temporary, index.files, strict=True):
        part.replace(index.file_path(file))  # type: ignore[arg-type]
    sync_folder(index.directory)
    index.save()
    for stale in previous - {file.name for file in index.files}:
        (index.directory / stale).unlink(missing_ok=True)


def _files_of(index: RecordIndex) -> set[str]:
    """The previous set's files that this function wrote; other tools' files stay."""
    if not index.path.is_file():
        return set()
    try:
        names = {file.name for file in RecordIndex.load(index.path).files}
    except DataError:
        return set()
    own = re.compile(rf"{re.escape(index.name)}-\d{{5}}-of-\d{{5}}\.tfrecord")
    return {name for name in names if own.fullmatch(name)}
