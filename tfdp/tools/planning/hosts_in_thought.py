"""One host among others that are not there: its step can be traced, and not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.cluster import Cluster
from tfdp.errors import ConfigurationError
from tfdp.exchange.host_group import HostGroup
from tfdp.hosts.host_link import MOST_GATHERED_BYTES, HostLink, Packed, Ranges
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding
from tfdp.strategies.multi_host import MultiHostDataParallelStrategy

__all__ = ["HostOfMany"]


class HostOfMany(MultiHostDataParallelStrategy):
    """The first host's strategy, for graphs that are looked at and never run.

    It is a `MultiHostDataParallelStrategy` that has met nobody: what a step would
    exchange stands in its graph, as on a host that trains.

    Args:
      devices: of this host's replicas.
      hosts: how many there are, at least 2.
      communication: as the strategy takes it.
      sharding: what is sharded, and by whom.

    Raises:
      ConfigurationError: as the strategy; for `Communication(min_hosts=...)`, since
        hosts that train apart are hosts alone; and for `engine="tensorflow"`, whose
        collectives between hosts can be traced only where they have met.
    """

    # Memory is counted by shapes, on which a host that trains would not rely.
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
                "train apart between their meetings: plan one of them, hosts=1, and "
                "add what sync= keeps, one or two more sets of weights."
            )
        if communication is not None and communication.engine == "tensorflow":
            raise ConfigurationError(
                "Communication(engine='tensorflow') between hosts cannot be planned "
                "before they have met. Plan with engine='sockets'."
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
        self._others = HostGroup(_NoLink(self.cluster.workers))
        self._group = self._others
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
            self._others, devices, communication, cross_device_ops, draws_per_replica
        )

    def from_chief(self, value: np.ndarray, label: str = "value") -> np.ndarray:
        """Its own: it is the chief."""
        return value


class _NoLink(HostLink):
    """To hosts that are not there: nothing crosses it, and nobody is waited for."""

    name = "sockets"

    def __init__(self, workers: int):
        super().__init__(0, workers, 1.0)
        self.hosts = ["localhost"] * workers

    def close(self) -> None:
        """Nobody has to hear it."""

    def on_failure(self, listener: Callable[[str], None]) -> None:
        """Nobody is lost."""

    def news(self) -> str | None:
        """None."""
        return None

    def sent_bytes(self, channel: str | None = None) -> int:
        """None."""
        return 0

    def exchange_seconds(self, channel: str) -> float:
        """None."""
        return 0.0

    # What a model asks for while it is built: nobody looks at the numbers.

    def sum(
        self,
        arrays: Sequence[np.ndarray],
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
        packed: Packed = (),
    ) -> list[np.ndarray]:
        """Its own."""
        return list(arrays)

    def reduce_scatter(
        self,
        arrays: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        wire_dtype: str | None = None,
    ) -> list[np.ndarray]:
        """Its own ranges."""
        return [
            array[slice(*of_array[self.rank])]
            for array, of_array in zip(arrays, ranges, strict=True)
        ]

    def all_gather(
        self,
        pieces: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        channel: str = "step",
    ) -> list[np.ndarray]:
        """Zeros beside its own."""
        wholes = []
        for piece, of_array in zip(pieces, ranges, strict=True):
            whole = np.zeros(of_array[-1][1], piece.dtype)
            whole[slice(*of_array[self.rank])] = piece
            wholes.append(whole)
        return wholes

    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        """Its own."""
        return rows

    def gather(
        self,
        blob: bytes,
        label: str,
        channel: str = "host",
        most_bytes: int = MOST_GATHERED_BYTES,
    ) -> list[bytes]:
        """As many of its own."""
        return [blob] * self.workers

    def gather_memory(self, memory: np.ndarray, label: str) -> list[memoryview]:
        """As many of its own."""
        return [memory.data] * self.workers

    def _nothing(self, *arguments: Any, **options: Any) -> Any:
        raise ConfigurationError(
            "A step that is planned asked other hosts for a word before it ran, which "
            "none of tfdp's does. Plan with hosts=1, and please report this model."
        )

    share_note = without_note = leave_note = wait_for_notes = _nothing
    loop_of_steps = start = _nothing
    on_note = give_up = _nothing
