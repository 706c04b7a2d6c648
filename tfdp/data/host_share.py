"""Which files, or which records, a host reads when each reads its own."""

from __future__ import annotations

import dataclasses
import sys

import tensorflow as tf

from tfdp.data.index import RecordIndex
from tfdp.data.pipeline import batches_of, count_batches
from tfdp.errors import ConfigurationError

__all__ = ["HostShare", "share_of_host"]


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
