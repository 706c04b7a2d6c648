"""Reads any TensorFlow Datasets builder as global batches."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.data.hosts import seeds_of_program
from tfdp.data.indexed_sets import mixed
from tfdp.data.pipeline import (
    batch_examples,
    check_batching,
    count_batches,
    finish_batches,
    select_features,
)
from tfdp.data.places import place_of
from tfdp.errors import ConfigurationError, DataError, MissingDependencyError

_DEFAULT_BUFFER_EXAMPLES = 10_000
_INTERLEAVE_FILES = 16


def from_tfds(
    builder_or_name: Any,
    split: str,
    global_batch_size: int,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    shuffle_buffer_examples: int | None = None,
    drop_remainder: bool = False,
    repeat: bool = False,
    as_supervised: bool = False,
    transform: Callable[..., Any] | None = None,
    variable_length: str = "ragged",
    deterministic: bool = True,
) -> tf.data.Dataset:
    """Reads a TensorFlow Datasets builder as global batches, ready for `model.fit`.

    Args:
      builder_or_name: A builder; the directory of a prepared dataset, which holds
        `dataset_info.json`; or a name such as "mnist" or "mnist:3.0.1" of a dataset
        prepared in `data_dir`.
      split: A split or a slice of one: "train", "train[:80%]", "test".
      global_batch_size: Samples of all replicas together in one step, from 1.
      data_dir: The directory of prepared datasets, for a name; may be `gs://`. By
        default `~/tensorflow_datasets`.
      download: Whether to download and prepare a dataset that is not prepared.
      shuffle: Whether to shuffle, differently in every epoch. With False a dataset that
        was prepared in an order (`disable_shuffling=True`) keeps it.
      seed: Determines the order: the same seed gives the same epochs.
      shuffle_buffer_examples: How many examples are shuffled at a time. By default
        10,000, or the whole split if it is smaller.
      drop_remainder: Whether to drop a last batch that is not full.
      repeat: Whether the dataset has no end.
      as_supervised: Whether a batch is the builder's (input, target) tuple.
      transform: Applied to each example before batching, in parallel.
      variable_length: "ragged" or "pad", for features whose length varies.
      deterministic: False lets a slow file be overtaken.

    Returns:
      A `tf.data.Dataset` of batches whose number is known (`len(dataset)`).

    Raises:
      MissingDependencyError: tensorflow-datasets is not installed.
      ConfigurationError: An argument is out of range, or there is no such split.
      DataError: The dataset is missing, not prepared, or in a format that TensorFlow
        cannot read.
    """
    check_batching(global_batch_size, seed, variable_length, shuffle_buffer_examples)
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise MissingDependencyError(
            f"tfdp.data.from_tfds needs tensorflow-datasets ({error}): pip install "
            "'tfdp[tfds]'"
        ) from error
    builder = _find_builder(tfds, builder_or_name, data_dir, download)
    count = _count_examples(builder.info, split)
    batches_per_epoch = count_batches(count, global_batch_size, drop_remainder)
    # An order of its own (`disable_shuffling=True`) stays if files are read in turn.
    keeps_order = builder.info.disable_shuffling and not shuffle
    read_config = tfds.ReadConfig(
        shuffle_seed=seed,
        shuffle_reshuffle_each_iteration=True,
        # A cache would freeze the first epoch's order of files.
        try_autocache=False,
        # The library's defaults depend on the machine's number of cores.
        interleave_cycle_length=1 if keeps_order else _INTERLEAVE_FILES,
        enable_ordering_guard=False,
    )
    try:
        with seeds_of_program(), _without_words_on_order():
            examples = builder.as_dataset(
                split=split,
                shuffle_files=shuffle,
                as_supervised=as_supervised,
                read_config=read_config,
            )
    except (ValueError, NotImplementedError, AssertionError, OSError) as error:
        raise DataError(
            f"{builder.info.full_name} cannot be read as a tf.data.Dataset: {error}"
        ) from error
    if shuffle:
        buffer_examples = shuffle_buffer_examples or _DEFAULT_BUFFER_EXAMPLES
        examples = mixed(examples, min(count, buffer_examples), seed)
    examples = select_features(examples, None, transform)
    batches = batch_examples(
        examples, global_batch_size, drop_remainder, variable_length
    )
    return finish_batches(
        batches, batches_per_epoch, repeat=repeat, deterministic=deterministic
    )


@contextlib.contextmanager
def _without_words_on_order() -> Iterator[None]:
    """Leaves out the library's warning that an order is lost: `shuffle` asks for it."""

    def is_other(record: logging.LogRecord) -> bool:
        return "ordered dataset" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _count_examples(info: Any, split: str) -> int:
    try:
        count: int = info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            f"split {split!r} of {info.full_name}: {error}; there are "
            f"{sorted(info.splits)}"
        ) from error
    if count == 0:
        raise DataError(f"split {split!r} of {info.full_name} is empty")
    return count


def _find_builder(
    tfds: Any,
    builder_or_name: Any,
    data_dir: str | os.PathLike[str] | None,
    download: bool,
) -> Any:
    if not isinstance(builder_or_name, str | os.PathLike):
        builder = builder_or_name
        if not hasattr(builder, "as_dataset"):
            raise ConfigurationError(
                "builder_or_name must be a tensorflow_datasets builder, a prepared "
                f"dataset's directory, or a name. Received: a {type(builder).__name__}."
            )
    elif place_of(builder_or_name).is_dir():
        if not (place_of(builder_or_name) / "dataset_info.json").is_file():
            raise DataError(
                f"{builder_or_name} holds no dataset_info.json; give the directory of "
                "one version, such as ~/tensorflow_datasets/mnist/3.0.1"
            )
        builder = tfds.builder_from_directory(os.fspath(builder_or_name))
    else:
        builder = _builder_by_name(tfds, os.fspath(builder_or_name), data_dir, download)
    if not builder.is_prepared():
        if not download:
            raise DataError(
                f"{builder.info.full_name} is not prepared in {builder.data_dir}; call "
                "its download_and_prepare(), or pass download=True"
            )
        try:
            builder.download_and_prepare()
        except ImportError as error:
            raise MissingDependencyError(
                f"preparing {builder.info.full_name} needs a package that is not "
                f"installed: {error}"
            ) from error
    return builder


def _builder_by_name(
    tfds: Any, name: str, data_dir: str | os.PathLike[str] | None, download: bool
) -> Any:
    # `tfds.builder` contacts a server for an unprepared dataset; this never does.
    from tensorflow_datasets.core import read_only_builder

    directory = None if data_dir is None else os.fspath(data_dir)
    try:
        if download:
            return tfds.builder(name, data_dir=directory)
        return read_only_builder.builder_from_files(name, data_dir=directory)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        place = directory or "~/tensorflow_datasets"
        raise DataError(
            f"no prepared dataset {name!r} in {place}: give its directory or its "
            f"data_dir, or pass download=True. ({str(error).splitlines()[0]})"
        ) from error
