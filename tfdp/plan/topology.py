"""The placement of replicas: hosts, devices within a host, and the groups they form.

Ranks are host-major: host 0 holds ranks 0..D-1, host 1 holds D..2D-1 and so on. A
topology is plain data: plans for 64 hosts can be made and tested on a laptop.
"""

from __future__ import annotations

import dataclasses

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts x devices, host-major; both at least 1, the same number on all hosts.

    >>> topology = Topology(hosts=2, devices_per_host=2)
    >>> topology.within_host_groups
    ((0, 1), (2, 3))
    >>> topology.across_host_groups
    ((0, 2), (1, 3))
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

    def host_of(self, rank: int) -> int:
        """The host that holds `rank`."""
        return rank // self.devices_per_host

    def local_rank_of(self, rank: int) -> int:
        """The index of `rank` within its host."""
        return rank % self.devices_per_host

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank, in order."""
        return tuple(range(self.num_replicas))

    @property
    def within_host_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        size = self.devices_per_host
        return tuple(
            tuple(range(host * size, (host + 1) * size)) for host in range(self.hosts)
        )

    @property
    def across_host_groups(self) -> tuple[tuple[int, ...], ...]:
        """The peers of each local rank, on all hosts."""
        return tuple(
            tuple(range(local, self.num_replicas, self.devices_per_host))
            for local in range(self.devices_per_host)
        )

    def within_host_group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the host of `rank`, itself included."""
        return self.within_host_groups[self.host_of(rank)]

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        devices = "device" if self.devices_per_host == 1 else "devices"
        return f"{hosts} x {self.devices_per_host} {devices}"
