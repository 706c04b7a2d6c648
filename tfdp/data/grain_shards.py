"""Whether each host's `grain.DataLoader` reads a shard of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tfdp._private.grain_inputs import grain_input_of, shards_of
from tfdp.data.same_batches import new_dataset_name
from tfdp.errors import ConfigurationError
from tfdp.hosts.host_link import HostLink

__all__ = ["has_own_shard", "is_own_shard"]


def has_own_shard(adapter: Any, link: HostLink) -> bool:
    """Whether the hosts' batches are the parts of global ones, not these themselves.

    Says, on worker 0, when every host reads everything.

    Args:
      adapter: Keras' data adapter of what is read; None: no Keras loop reads it.
      link: tells the hosts from each other.

    Raises:
      ConfigurationError: on all hosts, when a loader has shards that are not those of
        these hosts.

    Cost: of a grain input, one word to the others.
    """
    source = grain_input_of(adapter)
    if source is None:
        return False
    index, count = shards_of(source)
    key = f"{new_dataset_name()}, shards of grain"
    notes = link.share_note(key, f"{index} of {count}")
    found = {rank: note.split(" of ") for rank, note in sorted(notes.items())}
    own = [
        is_shard_of(int(shard), int(shards), rank, link.workers)
        for rank, (shard, shards) in found.items()
    ]
    if any(one != own[0] for one in own):
        raise ConfigurationError(_refusal(notes, link.workers))
    if not own[0] and link.rank == 0:
        own_shard = f"grain.sharding.ShardOptions(rank, {link.workers})"
        print(
            f"tfdp: each of {link.workers} hosts reads all of the grain input and "
            "takes its rows of every batch. A grain.DataLoader reads a shard on each "
            f"host with shard_options={own_shard}, and then batches of its own rows",
            file=sys.stderr,
        )
    return own[0]


def is_own_shard(adapter: Any, rank: int, hosts: int) -> bool:
    """As `has_own_shard`, by what this host knows alone.

    Raises:
      ConfigurationError: the loader has shards that are not those of these hosts.
    """
    source = grain_input_of(adapter)
    return source is not None and is_shard_of(*shards_of(source), rank, hosts)


def is_shard_of(index: int, count: int, rank: int, hosts: int) -> bool:
    """Whether a host reads its shard; false: it reads everything.

    Raises:
      ConfigurationError: it does neither.

    >>> is_shard_of(1, 2, rank=1, hosts=2), is_shard_of(0, 1, rank=1, hosts=2)
    (True, False)
    """
    if (index, count) not in ((rank, hosts), (0, 1)):
        raise ConfigurationError(_refusal({rank: f"{index} of {count}"}, hosts))
    return count > 1


def _refusal(notes: Mapping[int, str], hosts: int) -> str:
    found = ", ".join(f"{note} on worker {r}" for r, note in sorted(notes.items()))
    return (
        f"The grain.DataLoader reads shard {found}. Allowed is all of it on all "
        "workers, shard_options=grain.sharding.NoSharding(), or on the worker of each "
        f"rank shard_options=grain.sharding.ShardOptions(rank, {hosts})."
    )
