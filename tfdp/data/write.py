"""Writes a set of TFRecord files in one step: all of it appears, or nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.data.encoding import encode_example
from tfdp.data.features import FeatureSpec, check_example, infer_features
from tfdp.data.index import COMPRESSIONS, SUFFIX, RecordFile, RecordIndex
from tfdp.data.places import Place, place_of
from tfdp.errors import ConfigurationError, DataError

__all__ = ["write_tfrecords"]


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
    """Writes examples to sharded TFRecord files and an index of what they hold.

    The files are `name-00000-of-00008.tfrecord` and so on; example i goes to file
    i modulo `num_shards`. The index `name.index.json` holds the counts and the
    feature spec. Everything is first written under temporary names: a run that is
    cut short leaves the set that was there before, or, for the moment of renaming,
    a set without an index, which no reader takes. An older set of the same name is
    replaced.

    Args:
      examples: A dict of arrays whose first axis counts the examples; a tuple of
        such arrays, named by `feature_names`; an iterable of dicts of arrays,
        numbers, bytes or text; or an unbatched `tf.data.Dataset` of dicts or
        tuples.
      directory: Where the files go; it is made when it does not exist. A URL that
        `tf.io.gfile` opens, such as `gs://bucket/folder`, is one, too.
      num_shards: The number of files, from 1. Some 100 MB in each reads fast.
      name: The set's name, the start of every file's name.
      feature_names: The names of a tuple's parts, in order.
      features: Name to `FeatureSpec` for what the first example cannot show, such
        as a length that varies: `{"tokens": FeatureSpec((None,), "int64")}`.
      compression: "", "GZIP" or "ZLIB". Compressed files are smaller and cost
        time to read.

    Returns:
      The index, with the number of examples and the bytes of each file.

    Raises:
      ConfigurationError: An argument is out of range.
      DataError: An example is not like the first one (its number is named), or
        there are fewer examples than files.

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
    stream, declared = _example_stream(examples, feature_names)
    first = next(stream, None)
    if first is None:
        raise DataError("there are no examples to write; a set holds at least one")
    spec = infer_features(first, {**declared, **(features or {})})
    directory = place_of(directory)
    directory.mkdir(parents=True, exist_ok=True)
    final: list[Place] = [
        directory / f"{name}-{shard:05d}-of-{num_shards:05d}.tfrecord"
        for shard in range(num_shards)
    ]
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in final]
    try:
        counts = _write_shards(
            itertools.chain([first], stream), spec, temporary, compression
        )
        files = tuple(
            RecordFile(path.name, count, part.stat().st_size)
            for path, part, count in zip(final, temporary, counts, strict=True)
        )
        index = RecordIndex(directory, name, spec, files, compression)
        _publish(index, temporary)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return index


def _check_arguments(num_shards: int, name: str, compression: str) -> None:
    if not isinstance(num_shards, int) or not 1 <= num_shards <= 99_999:
        raise ConfigurationError(
            f"num_shards is {num_shards!r}; allowed is a whole number from 1 to 99999"
        )
    if not name or name.startswith(".") or any(sign in name for sign in "/\\*?["):
        raise ConfigurationError(
            f"name is {name!r}; it begins file names, so it may not be empty, begin "
            "with a dot, or hold / \\ * ? ["
        )
    if compression not in COMPRESSIONS:
        raise ConfigurationError(
            f"compression is {compression!r}; allowed are {COMPRESSIONS}"
        )


def _example_stream(
    examples: Any, feature_names: Sequence[str] | None
) -> tuple[Iterator[Any], dict[str, FeatureSpec]]:
    """One example after the other, and the features that the source declares."""
    if isinstance(examples, tf.data.Dataset):
        return _dataset_stream(examples, feature_names)
    if (
        isinstance(examples, tuple)
        and examples
        and not isinstance(examples[0], Mapping)
    ):
        names = _names_for(len(examples), feature_names)
        return _column_stream(dict(zip(names, examples, strict=True))), {}
    if isinstance(examples, Mapping):
        return _column_stream(examples), {}
    if not isinstance(examples, Iterable):
        raise ConfigurationError(
            f"examples is a {type(examples).__name__}; allowed are a dict or tuple of "
            "arrays, an iterable of dicts, and a tf.data.Dataset"
        )
    return iter(examples), {}


def _names_for(parts: int, feature_names: Sequence[str] | None) -> Sequence[str]:
    if feature_names is None or len(feature_names) != parts:
        raise ConfigurationError(
            f"examples are tuples of {parts} parts and feature_names is "
            f"{feature_names!r}; name each part, such as feature_names="
            "('image', 'label')"
        )
    return feature_names


def _column_stream(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    # A list stays one: its items may differ in length.
    sequences = {
        name: column if isinstance(column, list | tuple) else np.atleast_1d(column)
        for name, column in columns.items()
    }
    lengths = {name: len(sequence) for name, sequence in sequences.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"the arrays hold {lengths} examples; each has as many along its first axis"
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
    if counts[-1] == 0:
        raise DataError(
            f"there are {sum(counts)} examples for num_shards={len(paths)} files; "
            "every file holds at least one, so ask for fewer"
        )
    return counts


def _publish(index: RecordIndex, temporary: Sequence[Place]) -> None:
    """Puts a complete set in the place of the one before it."""
    previous = _files_of(index.path)
    # From here until the new index is there, a reader finds no index, hence no mix
    # of two sets.
    index.path.unlink(missing_ok=True)
    for part, file in zip(temporary, index.files, strict=True):
        part.replace(index.file_path(file))  # type: ignore[arg-type]
    index.save()
    for stale in previous - {file.name for file in index.files}:
        (index.directory / stale).unlink(missing_ok=True)


def _files_of(index_path: Place) -> set[str]:
    if not index_path.name.endswith(SUFFIX) or not index_path.is_file():
        return set()
    try:
        return {file.name for file in RecordIndex.load(index_path).files}
    except DataError:
        # An index that cannot be read claims no files.
        return set()
