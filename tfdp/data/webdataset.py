"""Reads WebDataset tar files as global batches, by the rules of `read_tfrecords`.

    files -> shuffled -> interleaved samples -> shuffled -> transformed -> batches

tar has no checksums of content, so the index has one for each sample: a damaged sample
is found and named when it is read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp.data.features import FeatureSpec
from tfdp.data.framing import digest_of_ends
from tfdp.data.index import RecordFile, RecordIndex, files_to_index
from tfdp.data.indexed_sets import mixed, open_share, own_records
from tfdp.data.pipeline import batch_examples, finish_batches, select_features
from tfdp.data.places import Place, place_of
from tfdp.data.tar_samples import KEY, TarFault, checksum_of_sample, tar_samples
from tfdp.data.verify import check_before_reading, map_files
from tfdp.errors import DataError

_REMEDY = "restore the file, or index the set again (tfdp.data.index_webdataset)"


def index_webdataset(pattern: str | os.PathLike[str], *, name: str) -> RecordIndex:
    """Writes the index that `read_webdataset` needs for tar files in WebDataset's form.

    Args:
      pattern: A pattern of file names in one directory, such as
        `/data/imagenet/train-*.tar` or `gs://bucket/train-*.tar`; also `.tar.gz`.
      name: The set's name: the index is `name.index.json` next to the files.

    Returns:
      The index, with a checksum of each sample; its features are the file endings in
      a sample, in small letters, as byte strings, and `__key__`. As for the package
      webdataset, `__name__/` at the top and files without an ending are no samples.

    Raises:
      ConfigurationError: `name` is not allowed.
      DataError: No file matches, one is damaged, samples differ in their features, or
        the files of a sample exceed 1 GiB together.

    Cost: reads each file once, with at most 16 MiB of a sample in memory per processor.
    """
    directory, unread = files_to_index(
        pattern, name, lambda path: ".tar" in path.name, " with .tar in its name"
    )
    first_key, features = _first_sample(directory / unread[0].name)
    files = map_files(
        "indexing samples",
        unread,
        lambda file: _indexed(directory / file.name, file, features, first_key),
    )
    specs = {feature: FeatureSpec((), "string") for feature in features}
    index = RecordIndex(directory, name, specs, tuple(files), container="tar")
    index.save()
    return index


def _first_sample(path: Place) -> tuple[str, tuple[str, ...]]:
    """The key and the features of a file's first sample."""
    try:
        for sample in tar_samples(path, keeps=False):
            return _key_of(sample), tuple(sorted(sample))
    except TarFault as fault:
        raise DataError(f"{path}, {fault}") from fault
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    raise DataError(f"{path} holds no samples")


def _key_of(sample: Mapping[str, Any]) -> str:
    key: str = sample[KEY].decode("utf-8", "replace")
    return repr(key)


def _indexed(
    path: Place, file: RecordFile, features: Sequence[str], first_key: str
) -> RecordFile:
    checksums: list[str] = []
    try:
        for number, sample in enumerate(tar_samples(path, keeps=False)):
            if tuple(sorted(sample)) != tuple(features):
                raise DataError(
                    f"{path}, sample {number} ({_key_of(sample)}) has "
                    f"{_named(sample)}; all must have what the first one of the set "
                    f"({first_key}) has, {_named(features)}"
                )
            checksums.append(checksum_of_sample(sample))
    except TarFault as fault:
        raise DataError(f"{path}, {fault}") from fault
    ends = digest_of_ends(path)
    return RecordFile(
        file.name, len(checksums), file.size_bytes, "", ends, "".join(checksums)
    )


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

    As `read_tfrecords`: several hosts see the batches of one, every sample comes once
    per epoch, and the seed determines the order.

    Args:
      source: What `index_webdataset` returned; or a directory, a set's path or a
        pattern of file names, as for `read_tfrecords`. The index is required.
      global_batch_size: Samples of all replicas together in one step, from 1.
      as_supervised: Names of the features of a tuple, such as ("jpg", "cls"). By
        default a sample is a dict, with `__key__` among its features.
      transform: Applied to each sample before batching, in parallel. Features are byte
        strings: decode them here (`tf.io.decode_jpeg`, `tf.strings.to_number`).
      shuffle: See `read_tfrecords`, also for all that follows.
      seed: See there.
      shuffle_buffer_examples: See there.
      drop_remainder: See there.
      repeat: See there.
      variable_length: See there.
      cycle_length: See there.
      input_context: See there.

    Returns:
      A `tf.data.Dataset` of batches whose number is known (`len(dataset)`).

    Raises:
      ConfigurationError: An argument is out of range.
      DataError: No file or index, or a file is missing or differs from its index in
        size, beginning or end.
      tf.errors.InvalidArgumentError: While iterating: a sample is damaged, missing or
        differs from the index. The message holds a `DataError` with file, number, key.

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
        path = index.file_path(file)
        describe = functools.partial(_describe_fault, path, file)
        check_before_reading(path, file, describe)
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


def _describe_fault(path: Place, file: RecordFile) -> str | None:
    if not path.is_file():
        return f"{path} is missing; {_REMEDY}"
    for _ in _checked_samples(path, file):  # raises at the first that differs
        pass
    return None


def _checked_samples(path: Place, file: RecordFile) -> Iterator[dict[str, bytes]]:
    """The samples that the index promises; a `DataError` names the first to differ."""
    number = 0
    promise = f"the index promises {file.examples} samples; {_REMEDY}"
    try:
        for sample in tar_samples(path):
            promised = file.checksums[8 * number : 8 * number + 8]
            if checksum_of_sample(sample) != promised:
                what = "is not the one of the index" if promised else "is one too many"
                raise DataError(
                    f"{path}, sample {number} (counted from 0), {_key_of(sample)}, "
                    f"{what}; {promise}"
                )
            yield sample
            number += 1
        if number < file.examples:
            raise TarFault(number, "the file ends before it")
    except TarFault as fault:
        raise DataError(f"{path}, {fault}; {promise}") from fault
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {_REMEDY}") from error


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

    signature = tuple(tf.TensorSpec((), tf.string) for _ in features)
    samples = files.interleave(
        lambda path: tf.data.Dataset.from_generator(
            rows, args=(path,), output_signature=signature
        ),
        cycle_length=min(cycle_length, len(by_path)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    return samples.map(lambda *row: dict(zip(features, row, strict=True)))
