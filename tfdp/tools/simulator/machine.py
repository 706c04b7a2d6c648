"""Devices, hosts and what joins them."""

from __future__ import annotations

import dataclasses

from tfdp.tools.simulator.checked import positive, share, whole

__all__ = ["Link", "Machine"]


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of links: within a host, or between hosts.

    Args:
      latency_seconds: until a short message is there, above 0.
      bytes_per_second: each way, of one connection, as its maker says; above 0.
      connections: of a host (or, within one, of a device) that carry at once.
      reached: the part of that rate that a sum gets, above 0 and at most 1.
      compute_share: of a replica's computing that stands still while a sum is on its
        way, from 0 to 1: 0 where a card does it all, 1 where the same cores add.
    """

    latency_seconds: float
    bytes_per_second: float
    connections: int = 1
    reached: float = 1.0
    compute_share: float = 0.0

    def __post_init__(self) -> None:
        positive("Link", "latency_seconds", self.latency_seconds)
        positive("Link", "bytes_per_second", self.bytes_per_second)
        whole("Link", "connections", self.connections, 1, 1024)
        positive("Link", "reached", self.reached)
        share("Link", "reached", self.reached)
        share("Link", "compute_share", self.compute_share)

    @property
    def rate(self) -> float:
        """Bytes a second that a sum gets of all connections together."""
        return self.bytes_per_second * self.connections * self.reached


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hosts that are all alike.

    Args:
      name: for people.
      devices_per_host: of each, at least 1.
      within_host: what joins the devices of a host.
      between_hosts: what joins hosts.
      flops_per_second: that a device reaches in a training step, above 0; None where
        only measured times are used.
      launch_seconds: until a sum begins, once its bucket is full; above 0.
      row_bytes_per_second: of rows of a table that one of its replicas adds up by their
        places, above 0; None where that is not known, and takes no time.
      source: where the numbers are from.
    """

    name: str
    devices_per_host: int
    within_host: Link
    between_hosts: Link
    flops_per_second: float | None = None
    launch_seconds: float = 1e-6
    source: str = ""
    row_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        whole("Machine", "devices_per_host", self.devices_per_host, 1, 1 << 20)
        if self.flops_per_second is not None:
            positive("Machine", "flops_per_second", self.flops_per_second)
        positive("Machine", "launch_seconds", self.launch_seconds)
        if self.row_bytes_per_second is not None:
            positive("Machine", "row_bytes_per_second", self.row_bytes_per_second)
