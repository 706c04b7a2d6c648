"""The placement of replicas: hosts, devices within a host, and the groups they form.

Ranks are host-major: host 0 holds ranks 0..D-1, host 1 holds D..2D-1 and so on. A
topology is plain data: plans for 64 hosts can be made and tested on a laptop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError


class Groups(tuple[tuple[int, ...], ...]):
    """A partition of ranks, which count from 0: replicas exchange within their group.

    The first of a group is its root, and its order is that of shards and gathers.
    Raises `ConfigurationError` unless each rank is in one group.

    >>> groups = Groups([(0, 2), (1, 3)])
    >>> groups.of(3), groups.place_of(3)
    ((1, 3), 1)
    """

    def __new__(cls, groups: Iterable[Iterable[int]]) -> Groups:
        made = super().__new__(cls, map(tuple, groups))
        ranks = sorted(itertools.chain(*made))
        if not all(made) or ranks != list(range(len(ranks))):
            raise ConfigurationError(
                "Each rank from 0 on must be in one group, and no group be empty. "
                f"Received: {tuple(made)!r}."
            )
        return made

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `rank`."""
        return next(group for group in self if rank in group)

    def place_of(self, rank: int) -> int:
        """The index of `rank` in its group."""
        return self.of(rank).index(rank)

    def inside(self, ranks: Sequence[int]) -> Groups | None:
        """The groups of `ranks`, which count from 0 in them; None: a group has others.

        >>> Groups([(0, 1), (2, 3), (4, 5)]).inside([2, 3])
        ((0, 1),)
        """
        own = [group for group in self if not set(group).isdisjoint(ranks)]
        if any(rank not in ranks for group in own for rank in group):
            return None
        return Groups(map(ranks.index, group) for group in own)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts x devices, host-major; both at least 1, the same number on all hosts.

    >>> topology = Topology(hosts=2, devices_per_host=2)
    >>> topology.within_hosts, topology.across_hosts
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    hosts: int = 1
    devices_per_host: int = 1

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            value = getattr(self, name)
            if not is_whole(value, least=1):
                raise ConfigurationError(
                    f"Topology.{name} must be an integer of at least 1. "
                    f"Received: {value!r}."
                )

    @property
    def num_replicas(self) -> int:
        """The number of replicas on all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def is_two_level(self) -> bool:
        """Whether there are several hosts with several devices each."""
        return self.hosts > 1 and self.devices_per_host > 1

    @functools.cached_property
    def everyone(self) -> Groups:
        """All ranks, in one group."""
        return Groups([range(self.num_replicas)])

    @functools.cached_property
    def within_hosts(self) -> Groups:
        """The ranks of each host. A rank's place is its device's number on its host."""
        size = self.devices_per_host
        return Groups(
            range(host * size, (host + 1) * size) for host in range(self.hosts)
        )

    @functools.cached_property
    def across_hosts(self) -> Groups:
        """The ranks of one device number on all hosts. A rank's place is its host."""
        size = self.devices_per_host
        return Groups(range(device, self.num_replicas, size) for device in range(size))

    def places_on_each_host(self, groups: Groups) -> Groups | None:
        """The devices on a host of each of `groups`; None: hosts have different ones.

        >>> Topology(2, 4).places_on_each_host(Groups([(0, 1, 4, 5), (2, 3, 6, 7)]))
        ((0, 1), (2, 3))
        """
        size = self.devices_per_host
        places = [
            [sorted(rank % size for rank in group if rank in here) for group in groups]
            for here in self.within_hosts
        ]
        has_all = sum(map(len, groups)) == self.num_replicas
        is_alike = has_all and all(of_host == places[0] for of_host in places)
        return Groups(places[0]) if is_alike else None

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        devices = "device" if self.devices_per_host == 1 else "devices"
        return f"{hosts} x {self.devices_per_host} {devices}"
