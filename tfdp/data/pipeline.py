"""Stages after the source that all readers share: batch, repeat, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.checks import check_one_of, check_whole, is_whole
from tfdp.errors import ConfigurationError

VARIABLE_LENGTHS = ("ragged", "pad")
MOST = 2**63 - 1  # tf.data counts in int64


def check_batching(
    global_batch_size: int,
    seed: int,
    variable_length: str = "ragged",
    shuffle_buffer_examples: int | None = None,
) -> None:
    """Raises a `ConfigurationError` for an argument that is out of range."""
    why = ": the samples of all replicas together in one step"
    check_whole("global_batch_size", global_batch_size, 1, MOST, why)
    if shuffle_buffer_examples is not None:
        check_whole("shuffle_buffer_examples", shuffle_buffer_examples, 1, MOST)
    if not is_whole(seed):
        raise ConfigurationError(
            "seed must be an integer. Every host needs the same one, or their parts of "
            f"a batch overlap; there is no random default. Received: {seed!r}."
        )
    check_one_of("variable_length", variable_length, VARIABLE_LENGTHS)


def batches_of(examples: int, batch_size: int, drop_remainder: bool) -> int:
    """The number of batches in one epoch."""
    return examples // batch_size if drop_remainder else -(-examples // batch_size)


def count_batches(examples: int, global_batch_size: int, drop_remainder: bool) -> int:
    """The number of batches (`batches_of`); a `ConfigurationError` if it is 0."""
    batches = batches_of(examples, global_batch_size, drop_remainder)
    if batches == 0:
        if not examples:
            raise ConfigurationError(
                "there are no examples: no batch can be made. Did a pattern, as of "
                "select(), match no file?"
            )
        raise ConfigurationError(
            f"a batch has {global_batch_size} rows and there are {examples} examples: "
            "no batch is left. Use a smaller batch, or drop_remainder=False"
        )
    return batches


def select_features(
    examples: tf.data.Dataset,
    as_supervised: Sequence[str] | None,
    transform: Callable[..., Any] | None,
) -> tf.data.Dataset:
    """Dicts to tuples, if named; then the user's function, in parallel."""
    if as_supervised is not None:
        names = tuple(as_supervised)
        examples = examples.map(lambda parts: tuple(parts[name] for name in names))
    if transform is not None:
        if not callable(transform):
            raise ConfigurationError(
                "transform must be None or a function of an example's features. "
                f"Received: {transform!r}."
            )
        examples = examples.map(transform, num_parallel_calls=tf.data.AUTOTUNE)
    return examples


def batch_examples(
    examples: tf.data.Dataset,
    global_batch_size: int,
    drop_remainder: bool,
    variable_length: str,
) -> tf.data.Dataset:
    """Batches, ragged (or zero-padded, with "pad") where lengths vary."""
    shapes = [spec.shape for spec in tf.nest.flatten(examples.element_spec)]
    if all(shape.is_fully_defined() for shape in shapes):
        return examples.batch(
            global_batch_size,
            drop_remainder=drop_remainder,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    if variable_length == "pad":
        return examples.padded_batch(global_batch_size, drop_remainder=drop_remainder)
    return examples.ragged_batch(global_batch_size, drop_remainder=drop_remainder)


def finish_batches(
    batches: tf.data.Dataset,
    batches_per_epoch: int,
    *,
    repeat: bool,
    deterministic: bool,
) -> tf.data.Dataset:
    """Fixes the number of batches, repeats them, prefetches, and sets the options."""
    batches = batches.apply(tf.data.experimental.assert_cardinality(batches_per_epoch))
    if repeat:
        batches = batches.repeat()
    options = tf.data.Options()
    options.deterministic = deterministic
    # On several hosts each reads all files and keeps its slice of every global batch.
    # Sharding by file would give hosts different numbers of steps: a hang in a
    # reduction that one host never enters.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)
