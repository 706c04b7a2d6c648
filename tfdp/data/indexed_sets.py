"""What readers of a set with an index do alike, before and after its files."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from tfdp.data.host_share import HostShare, share_of_host
from tfdp.data.index import RecordIndex, find_index, require_container
from tfdp.data.pipeline import check_batching, check_positive
from tfdp.data.seeds import seeds_of_program
from tfdp.errors import ConfigurationError

__all__ = ["mixed", "open_share", "own_records"]

# The most that the shuffle buffer takes of a host's memory when nothing is asked.
SHUFFLE_BUFFER_BYTES = 256 * 1024 * 1024


def open_share(
    source: str | os.PathLike[str] | RecordIndex,
    container: str,
    global_batch_size: int,
    *,
    seed: int,
    variable_length: str,
    cycle_length: int,
    shuffle_buffer_examples: int | None,
    as_supervised: Sequence[str] | None,
    input_context: tf.distribute.InputContext | None,
    deterministic: bool,
) -> HostShare:
    """What this host reads of a set, once all that was asked for is possible.

    Args:
      container: which kind of files the set has to hold; see `RecordIndex`.
      Others: see `read_tfrecords`.

    Raises:
      ConfigurationError: an argument is out of range, or of another kind of files.
      DataError: there is no such set.
    """
    check_batching(global_batch_size, seed, variable_length, shuffle_buffer_examples)
    check_positive("cycle_length", cycle_length)
    index = find_index(source)
    require_container(index, container)
    _check_names(index, as_supervised)
    return share_of_host(index, global_batch_size, input_context, deterministic)


def _check_names(index: RecordIndex, as_supervised: Sequence[str] | None) -> None:
    if isinstance(as_supervised, str):
        raise ConfigurationError(
            "as_supervised must be a tuple of names such as ('image', 'label'). "
            f"Received: {as_supervised!r}."
        )
    unknown = sorted(set(as_supervised or ()) - set(index.features))
    if unknown:
        raise ConfigurationError(
            f"as_supervised names {unknown}; the set holds {sorted(index.features)}"
        )


def own_records(
    records: tf.data.Dataset,
    share: HostShare,
    shuffle: bool,
    seed: int,
    shuffle_buffer_examples: int | None,
) -> tf.data.Dataset:
    """Those of all records that this host keeps, mixed where that is asked for."""
    if share.hosts > 1:
        records = records.shard(share.hosts, share.host)
    if not shuffle:
        return records
    return mixed(records, shuffle_buffer_examples or _buffer_for(share.index), seed)


def mixed(dataset: tf.data.Dataset, most_at_a_time: int, seed: int) -> tf.data.Dataset:
    """Another order in every epoch, which follows from the seeds."""
    with seeds_of_program():
        return dataset.shuffle(most_at_a_time, seed=seed)


def _buffer_for(index: RecordIndex) -> int:
    bytes_per_example = max(1, index.size_bytes // max(1, index.examples))
    return max(1, min(index.examples, SHUFFLE_BUFFER_BYTES // bytes_per_example))
