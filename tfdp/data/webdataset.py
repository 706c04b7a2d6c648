"""Reads WebDataset tar files as global batches, by the rules of `read_tfrecords`.

    files -> shuffled -> interleaved samples -> shuffled -> transformed -> batches

tar has no checksums of what it holds, so the index beside the files has one for each
sample: damage is found when a sample is read, and named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp.data.features import FeatureSpec
from tfdp.data.framing import digest_of_ends
from tfdp.data.index import RecordFile, RecordIndex, files_to_index
from tfdp.data.indexed_sets import mixed, open_share, own_records
from tfdp.data.pipeline import (
    batch_examples,
    finish_batches,
    select_features,
)
from tfdp.data.places import Place, place_of
from tfdp.data.tar_samples import KEY, TarFault, checksum_of_sample, tar_samples
from tfdp.data.verify import in_turn
from tfdp.errors import DataError

_REMEDY = "restore the file, or index the set again (tfdp.data.index_webdataset)"


def index_webdataset(pattern: str | os.PathLike[str], *, name: str) -> RecordIndex:
    """Writes the index that `read_webdataset` needs of tar files in WebDataset's form.

    Reads every file once, to count its samples, to see that all have the same features,
    and to take a checksum of each.

    Args:
      pattern: A pattern of file names in one directory, such as
        `/data/imagenet/train-*.tar` or `gs://bucket/train-*.tar`; packed ones
        (`.tar.gz`) are read, too.
      name: The set's name: the index is `name.index.json` beside the files.

    Returns:
      The index; its features are the endings of the files in a sample, as strings of
      bytes, and `__key__`.

    Raises:
      ConfigurationError: `name` is not allowed.
      DataError: No file matches, or one is damaged, or its samples are unlike, or the
        files of a sample have more than 1 GiB together.

    Cost: each file is read once, and a sample at most 16 MiB long is in memory for each
    processor; of a longer one that much, and the rest passes by.
    """
    directory, unread = files_to_index(
        pattern, name, lambda path: ".tar" in path.name, " with .tar in its name"
    )
    features = _features_of(directory / unread[0].name)
    files = in_turn(
        "indexing samples",
        unread,
        lambda file: _indexed(directory / file.name, file, features),
    )
    specs = {feature: FeatureSpec((), "string") for feature in features}
    index = RecordIndex(directory, name, specs, tuple(files), container="tar")
    index.save()
    return index


def _features_of(path: Place) -> tuple[str, ...]:
    """The features of the first sample, sorted."""
    try:
        for sample in tar_samples(path, keeps=False):
            return tuple(sorted(sample))
    except TarFault as fault:
        raise DataError(_at(path, fault.sample, fault.reason)) from fault
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    raise DataError(f"{path} holds no samples")


def _indexed(path: Place, file: RecordFile, features: Sequence[str]) -> RecordFile:
    checksums: list[str] = []
    try:
        for number, sample in enumerate(tar_samples(path, keeps=False)):
            if tuple(sorted(sample)) != tuple(features):
                key = sample[KEY].decode("utf-8", "replace")
                raise DataError(
                    f"{path}, sample {number} ({key!r}) has {_named(sample)}; the "
                    f"first one of the set has {_named(features)}, and all must have "
                    "the same"
                )
            checksums.append(checksum_of_sample(sample))
    except TarFault as fault:
        raise DataError(_at(path, fault.sample, fault.reason)) from fault
    ends = digest_of_ends(path)
    return RecordFile(
        file.name, len(checksums), file.size_bytes, "", ends, "".join(checksums)
    )


def _at(path: Place, sample: int, what: str) -> str:
    return f"{path}, sample {sample} (counted from 0): {what}"


def _named(features: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(sorted(set(features) - {KEY})) or "nothing"


def read_webdataset(
    source: str | os.PathLike[str] | RecordIndex,
    global_batch_size: int,
    *,
    as_supervised: Sequence[str] | None = None,
    transform: Callable[..., Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    shuffle_buffer_examples: int | None = None,
    drop_remainder: bool = False,
    repeat: bool = False,
    variable_length: str = "ragged",
    cycle_length: int = 16,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Reads tar files in WebDataset's form as global batches, ready for `model.fit`.

    The strategy splits each global batch over its replicas. On several hosts each one
    reads every file and keeps its slice of every batch; with `input_context` each reads
    its own files only. Of an epoch the number of batches is known, every sample comes
    once, and the order follows from the seed.

    Args:
      source: What `index_webdataset` returned; or a directory, a set's path or a
        pattern of file names, as for `read_tfrecords`. The index is required.
      global_batch_size: Samples of all replicas together in one step, from 1.
      as_supervised: Names of the features that make up a tuple, such as ("jpg",
        "cls"). By default a sample is a dict, with `__key__` among its features.
      transform: Applied to each sample before batching, in parallel. Features are
        strings of bytes as they lie in the file: decode them here
        (`tf.io.decode_jpeg`, `tf.strings.to_number`).
      shuffle: see `read_tfrecords`, also for all that follows.
      seed: see there.
      shuffle_buffer_examples: see there.
      drop_remainder: see there.
      repeat: see there.
      variable_length: see there.
      cycle_length: see there.
      input_context: see there.

    Returns:
      A `tf.data.Dataset` of batches whose number is known (`len(dataset)`).

    Raises:
      ConfigurationError: An argument is out of range.
      DataError: No file, no index, or a file is missing, or its size, its beginning or
        its end are not what its index says.
      tf.errors.InvalidArgumentError: While iterating: a sample is damaged, missing or
        another one than the index says. The message holds a `DataError` with the file,
        the sample's number and its key.

    Cost: samples pass through Python one by one, some 50 microseconds each.

    Source: the form is that of the package webdataset, which is not needed.

    Example:
      >>> import io, pathlib, tarfile, tempfile
      >>> import tfdp.data
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> with tarfile.open(folder / "train-0.tar", "w") as archive:
      ...     for number in range(5):
      ...         member = tarfile.TarInfo(f"{number:04}.cls")
      ...         member.size = 1
      ...         archive.addfile(member, io.BytesIO(str(number).encode()))
      >>> index = tfdp.data.index_webdataset(folder / "*.tar", name="train")
      >>> batches = tfdp.data.read_webdataset(index, 2, as_supervised=("cls",))
      >>> sorted(int(x) for (batch,) in batches for x in batch.numpy())
      [0, 1, 2, 3, 4]
    """
    share = open_share(
        source,
        "tar",
        global_batch_size,
        seed=seed,
        variable_length=variable_length,
        cycle_length=cycle_length,
        shuffle_buffer_examples=shuffle_buffer_examples,
        as_supervised=as_supervised,
        input_context=input_context,
        deterministic=True,
    )
    index = share.index
    for file in index.files:
        _check_before_reading(index.file_path(file), file)
    batches = share.batches(drop_remainder)

    samples = _interleaved(index, shuffle, seed, cycle_length)
    samples = own_records(samples, share, shuffle, seed, shuffle_buffer_examples)
    examples = select_features(samples, as_supervised, transform)
    return finish_batches(
        batch_examples(examples, share.batch_size, drop_remainder, variable_length),
        batches,
        repeat=repeat,
        deterministic=True,
    )


def _check_before_reading(path: Place, file: RecordFile) -> None:
    try:
        if not path.is_file():
            raise DataError(f"{path} is missing; {_REMEDY}")
        is_same = path.stat().st_size == file.size_bytes
        if is_same and digest_of_ends(path) == file.ends_digest:
            return
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    # It is another one; which sample says so is worth a look.
    for _ in _checked_samples(path, file):
        pass
    raise DataError(
        f"{path} has not the {file.size_bytes} bytes that the index says, or other "
        f"ones at its beginning or end, though its samples are sound; {_REMEDY}"
    )


def _checked_samples(path: Place, file: RecordFile) -> Iterator[dict[str, bytes]]:
    """The samples that the index promises; a `DataError` names the first other one."""
    number = 0
    promise = f"the index promises {file.examples} samples; {_REMEDY}"
    try:
        for sample in tar_samples(path):
            promised = file.checksums[8 * number : 8 * number + 8]
            if checksum_of_sample(sample) != promised:
                key = sample[KEY].decode("utf-8", "replace")
                what = "is not the one of the index" if promised else "is one too many"
                raise DataError(
                    f"{path}, sample {number} (counted from 0), {key!r}, {what}; "
                    f"{promise}"
                )
            yield sample
            number += 1
    except TarFault as fault:
        what = _at(path, fault.sample, fault.reason)
        raise DataError(f"{what}; {promise}") from fault
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    if number < file.examples:
        what = _at(path, number, "the file ends before it")
        raise DataError(f"{what}; {promise}")


def _interleaved(
    index: RecordIndex, shuffle: bool, seed: int, cycle_length: int
) -> tf.data.Dataset:
    by_path = {str(index.file_path(file)): file for file in index.files}
    features = list(index.features)
    files = tf.data.Dataset.from_tensor_slices(list(by_path))
    if shuffle:
        files = mixed(files, len(by_path), seed)

    def rows(path: bytes) -> Iterator[tuple[bytes, ...]]:
        text = path.decode()
        for sample in _checked_samples(place_of(text), by_path[text]):
            yield tuple(sample[feature] for feature in features)

    def samples_of(path: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            rows,
            args=(path,),
            output_signature=tuple(tf.TensorSpec((), tf.string) for _ in features),
        )

    samples = files.interleave(
        samples_of,
        cycle_length=min(cycle_length, len(by_path)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    return samples.map(lambda *row: dict(zip(features, row, strict=True)))
