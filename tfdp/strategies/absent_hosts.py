"""A strategy of hosts that are not there, whose steps are traced and never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.cluster import Cluster
from tfdp.errors import ConfigurationError
from tfdp.exchange.host_group import HostGroup
from tfdp.hosts.host_link import HostLink, Ranges
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding
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
        if communication is not None and communication.min_hosts is not None:
            raise ConfigurationError(
                f"Communication(min_hosts={communication.min_hosts}) is for hosts that "
                "train independently between synchronizations: plan one of them, "
                "hosts=1, and add one or two sets of weights, which sync= keeps."
            )
        if communication is not None and communication.engine == "tensorflow":
            raise ConfigurationError(
                "Communication(engine='tensorflow') between hosts cannot be planned: "
                "it needs connected hosts. Plan with engine='sockets'."
            )
        self._planned_devices = list(devices)
        super().__init__(
            Cluster(workers=hosts, rank=0, coordinator=None),
            devices_per_host=len(devices),
            communication=communication,
            shard=sharding,
        )

    def _own_devices(
        self, communication: Communication, sharding: Sharding
    ) -> list[str]:
        self._absent = HostGroup(_AbsentPeers(self.cluster.workers))
        self._group = self._absent
        return self._planned_devices

    def _make_extended(
        self,
        devices: tuple[str, ...],
        communication: Communication,
        cross_device_ops: tf.distribute.CrossDeviceOps,
        draws_per_replica: bool,
    ) -> Any:
        self._refuse_idle_shards(devices, communication)
        return self._extended_over(
            self._absent, devices, communication, cross_device_ops, draws_per_replica
        )

    def from_chief(self, value: np.ndarray, label: str = "value") -> np.ndarray:
        return value


class _AbsentPeers(HostLink):
    """A transport without peers: every collective returns local data or zeros."""

    name = "sockets"

    def __init__(self, workers: int):
        super().__init__(0, workers, 1.0)
        self.hosts = ["localhost"] * workers

    def sent_bytes(self, channel: str | None = None) -> int:
        return 0

    def exchange_seconds(self, channel: str) -> float:
        return 0.0

    def sum(self, arrays: Any, *arguments: Any, **options: Any) -> list[np.ndarray]:
        return list(arrays)

    def reduce_scatter(
        self, arrays: Any, ranges: Ranges, *arguments: Any, **options: Any
    ) -> list[np.ndarray]:
        return [
            array[slice(*of_array[self.rank])]
            for array, of_array in zip(arrays, ranges, strict=True)
        ]

    def all_gather(
        self, pieces: Any, ranges: Ranges, *arguments: Any, **options: Any
    ) -> list[np.ndarray]:
        wholes = []
        for piece, of_array in zip(pieces, ranges, strict=True):
            whole = np.zeros(of_array[-1][1], piece.dtype)
            whole[slice(*of_array[self.rank])] = piece
            wholes.append(whole)
        return wholes

    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        return rows

    def gather(self, blob: bytes, *arguments: Any, **options: Any) -> list[bytes]:
        return [blob] * self.workers

    def gather_memory(self, memory: np.ndarray, label: str) -> list[memoryview]:
        return [memory.data] * self.workers

    def _ignored(self, *arguments: Any, **options: Any) -> Any:
        return None

    close = on_failure = news = announce = _ignored

    def _refused(self, *arguments: Any, **options: Any) -> Any:
        raise ConfigurationError(
            "The model communicated with other hosts before its step ran, which "
            "planning cannot do. Plan with hosts=1, and please report this model."
        )

    share_note = without_note = leave_note = wait_for_notes = _refused
    loop_of_steps = start = on_note = give_up = _refused
