"""Shared by the readers of indexed sets: argument checks, host shares, shuffling."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks import check_whole
from tfdp.data.hosts import seeds_of_program
from tfdp.data.index import RecordIndex, find_index, require_container
from tfdp.data.pipeline import MOST, batches_of, check_batching, count_batches
from tfdp.errors import ConfigurationError

# The default bound of the shuffle buffer in host memory.
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
    """The part of a set that this host reads; checks all arguments of the reader."""
    check_batching(global_batch_size, seed, variable_length, shuffle_buffer_examples)
    check_whole("cycle_length", cycle_length, 1, MOST)
    index = find_index(source)
    require_container(index, container)
    if as_supervised is not None and not isinstance(as_supervised, (tuple, list)):
        raise ConfigurationError(
            "as_supervised must be a tuple of names such as ('image', 'label'). "
            f"Received: {as_supervised!r}."
        )
    unknown = sorted(set(as_supervised or ()) - set(index.features))
    if unknown:
        raise ConfigurationError(
            f"as_supervised names {unknown}; the set holds {sorted(index.features)}"
        )
    return share_of_host(index, global_batch_size, input_context, deterministic)


def own_records(
    records: tf.data.Dataset,
    share: HostShare,
    shuffle: bool,
    seed: int,
    shuffle_buffer_examples: int | None,
) -> tf.data.Dataset:
    """This host's records, shuffled if `shuffle`."""
    if share.hosts > 1:
        records = records.shard(share.hosts, share.host)
    if not shuffle:
        return records
    index = share.index
    bytes_per_example = max(1, index.size_bytes // max(1, index.examples))
    most = max(1, min(index.examples, SHUFFLE_BUFFER_BYTES // bytes_per_example))
    return mixed(records, shuffle_buffer_examples or most, seed)


def mixed(dataset: tf.data.Dataset, most_at_a_time: int, seed: int) -> tf.data.Dataset:
    """Shuffled differently in every epoch, determined by the seeds."""
    with seeds_of_program():
        return dataset.shuffle(most_at_a_time, seed=seed)


@dataclasses.dataclass(frozen=True)
class HostShare:
    """One host's records: of its files, those numbered `host` modulo `hosts`."""

    index: RecordIndex  # of the files that it opens
    hosts: int
    host: int
    batch_size: int
    most_examples: int  # the largest number of records that any host keeps

    @property
    def examples(self) -> int:
        return (self.index.examples - self.host + self.hosts - 1) // self.hosts

    def batches(self, drop_remainder: bool) -> int:
        """The batches of an epoch, which may be 0; an error if it is 0 on all hosts."""
        count_batches(self.most_examples, self.batch_size, drop_remainder)
        return batches_of(self.examples, self.batch_size, drop_remainder)


def share_of_host(
    index: RecordIndex,
    global_batch_size: int,
    context: tf.distribute.InputContext | None,
    deterministic: bool,
) -> HostShare:
    """The share of `context`'s host; everything if `context` is None.

    By file where there are at least as many files as hosts, else by record.
    """
    if context is None:
        return HostShare(index, 1, 0, global_batch_size, index.examples)
    hosts, host = context.num_input_pipelines, context.input_pipeline_id
    replicas = context.num_replicas_in_sync
    if global_batch_size % replicas:
        raise ConfigurationError(
            f"global_batch_size is {global_batch_size}, and each of {replicas} "
            "replicas reads a batch of its own: allowed is a number that they divide, "
            f"such as {-(-global_batch_size // replicas) * replicas}"
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
            f"{hosts} hosts share the records of {len(index.files)} files, to be read "
            "in one order: deterministic=False needs at least one file per host"
        )
    print(
        f"tfdp: host {host} of {hosts} reads {what} of {index.name!r} "
        f"({share.examples} of {index.examples} examples)",
        file=sys.stderr,
    )
    return share
