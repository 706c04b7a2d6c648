"""A strategy of hosts that are not there, whose steps are traced and never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.cluster import Cluster
from tfdp.errors import ConfigurationError
from tfdp.exchange.host_group import HostGroup
from tfdp.hosts.host_link import HostLink
from tfdp.plan.communication import Communication
from tfdp.plan.options import PLAN, Given, fields_of, refuse_options
from tfdp.plan.shards import Sharding
from tfdp.strategies.devices import find_devices
from tfdp.strategies.multi_host import MultiHostDataParallelStrategy


class AbsentHosts(MultiHostDataParallelStrategy):
    """Strategy of host 0 of several absent hosts: its graphs are inspected, never run.

    They contain the exchanges of a real step. `Communication(min_hosts=...)` is refused
    since such hosts train independently, `engine="tensorflow"` since its collectives
    can be traced only between connected hosts.
    """

    # Memory is counted by shapes; a real host must not rely on equal shapes.
    _hosts_are_alike = True

    def __init__(
        self,
        devices: Sequence[str],
        hosts: int,
        communication: Communication | None,
        sharding: Sharding,
    ):
        communication = communication or Communication()
        refuse_options(Given(PLAN, hosts, fields_of(communication)))
        self._planned_devices = find_devices(devices)
        super().__init__(
            Cluster(workers=hosts, rank=0, coordinator=None),
            communication=communication,
            shard=sharding,
        )

    def connect(self, communication: Communication) -> tuple[str, ...]:
        link: Any = _AbsentPeers(self.cluster.workers)
        self._group = HostGroup(link)
        return self._planned_devices

    def from_chief(self, value: np.ndarray, label: str = "value") -> np.ndarray:
        return value


class _AbsentPeers:
    """A link in graphs that never run: who takes part, and no exchange."""

    name, rank, step_channels = "sockets", 0, HostLink.step_channels

    def __init__(self, workers: int):
        self.workers, self.hosts = workers, ["localhost"] * workers

    def close(self) -> None:
        """Does nothing: no link is open."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError(
            f"The model communicated with other hosts ({name}) before its step ran, "
            "which planning cannot do. Plan with hosts=1, and please report this model."
        )
