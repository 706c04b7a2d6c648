"""What readers of a set with an index do alike, before and after its files."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

import tensorflow as tf

from tfdp.data.hosts import seeds_of_program
from tfdp.data.index import RecordIndex, find_index, require_container
from tfdp.data.pipeline import batches_of, check_batching, check_positive, count_batches
from tfdp.errors import ConfigurationError

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


# Which files, or which records, a host reads when each reads its own.


@dataclasses.dataclass(frozen=True)
class HostShare:
    """What one host reads.

    Args:
      index: the files that it opens.
      hosts, host: of their records it keeps those whose number, counted through all
        of them, is `host` modulo `hosts`.
      batch_size: samples of a batch.
      most_examples: what the host keeps that keeps the most.
    """

    index: RecordIndex
    hosts: int
    host: int
    batch_size: int
    most_examples: int

    @property
    def examples(self) -> int:
        """How many records it keeps."""
        return (self.index.examples - self.host + self.hosts - 1) // self.hosts

    def batches(self, drop_remainder: bool) -> int:
        """The batches of an epoch; none where there are some for other hosts only.

        Raises:
          ConfigurationError: no host has one.
        """
        count_batches(self.most_examples, self.batch_size, drop_remainder)
        return batches_of(self.examples, self.batch_size, drop_remainder)


def share_of_host(
    index: RecordIndex,
    global_batch_size: int,
    context: tf.distribute.InputContext | None,
    deterministic: bool,
) -> HostShare:
    """The share of the host that `context` is of; everything where it is None.

    By file where there are as many files as hosts or more, else by record.

    Raises:
      ConfigurationError: the batch does not divide among the replicas, or records are
        to be shared in an order that is another one on each host.
    """
    if context is None:
        return HostShare(index, 1, 0, global_batch_size, index.examples)
    hosts, host = context.num_input_pipelines, context.input_pipeline_id
    replicas = context.num_replicas_in_sync
    if global_batch_size % replicas:
        raise ConfigurationError(
            f"global_batch_size is {global_batch_size}, and each of {replicas} "
            "replicas reads a batch of its own: allowed is a number that they divide, "
            "such as "
            f"{-(-global_batch_size // replicas) * replicas}"
        )
    batch_size = global_batch_size // replicas
    if len(index.files) >= hosts:
        shares = [
            dataclasses.replace(index, files=index.files[each::hosts])
            for each in range(hosts)
        ]
        own, most = shares[host], max(share.examples for share in shares)
        share = HostShare(own, 1, 0, batch_size, most)
        what = f"{len(own.files)} of {len(index.files)} files"
    elif deterministic:
        most = -(-index.examples // hosts)
        share = HostShare(index, hosts, host, batch_size, most)
        what = f"all files and keeps one record in {hosts}: more hosts than files"
    else:
        raise ConfigurationError(
            f"{hosts} hosts share the records of {len(index.files)} files, for which "
            "all must read them in one order: deterministic=False is allowed with as "
            "many files as hosts or more"
        )
    print(
        f"tfdp: host {host} of {hosts} reads {what} of {index.name!r} "
        f"({share.examples} of {index.examples} examples)",
        file=sys.stderr,
    )
    return share
