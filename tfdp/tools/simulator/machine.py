"""Devices, hosts and what joins them."""

from __future__ import annotations

import dataclasses
import math

from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of links: within a host, or between hosts.

    Args:
      latency_seconds: of a short message, above 0.
      bytes_per_second: nominal, of one connection each way; above 0.
      connections: concurrent ones of a host (or, within a host, of a device).
      reached: share of the nominal rate that a sum achieves, above 0 and at most 1.
      compute_share: of a replica's compute that a sum takes: 0 where a card does
        everything, 1 where the same cores add.
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
        """Achieved all-reduce bandwidth over all connections, bytes/s."""
        return self.bytes_per_second * self.connections * self.reached


@dataclasses.dataclass(frozen=True)
class Machine:
    """A cluster of identical hosts.

    Args:
      within_host, between_hosts: links of devices, and of hosts.
      flops_per_second: that a device achieves in a training step; None if only measured
        times are used.
      launch_seconds: from a full bucket to the start of its sum; above 0.
      row_bytes_per_second: of table rows that one replica sums by index; None: unknown,
        takes no time.
      source: of the numbers.
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


#: No quantity of a training exceeds this, in seconds, bytes, FLOPs or devices.
MOST = 1e24
#: No quantity but 0 is smaller: quotients stay finite.
LEAST = 1e-24


def positive(owner: str, name: str, value: object) -> None:
    """Raises ConfigurationError unless `value` is a number from 1e-24 to 1e24."""
    if not _is_finite(value) or value < LEAST:  # type: ignore[operator]
        _reject(owner, name, "a number above 0", value)


def at_least_zero(owner: str, name: str, value: object) -> None:
    """Raises ConfigurationError unless `value` is a number from 0 to 1e24."""
    if not _is_finite(value) or value < 0:  # type: ignore[operator]
        _reject(owner, name, "a number of at least 0", value)


def share(owner: str, name: str, value: object) -> None:
    """Raises ConfigurationError unless `value` is a number from 0 to 1."""
    if not _is_finite(value) or not 0 <= value <= 1:  # type: ignore[operator]
        _reject(owner, name, "a number from 0 to 1", value)


def whole(
    owner: str, name: str, value: object, least: int = 1, most: float = MOST
) -> None:
    """Raises ConfigurationError unless `value` is an integer in that range."""
    if not is_whole(value, least=least, most=most):
        upper = "" if most == MOST else f" and at most {most:,.0f}"
        _reject(owner, name, f"a whole number of at least {least}{upper}", value)


def _is_finite(value: object) -> bool:
    # An integer may be too large for a float.
    return is_number(value) and abs(value) <= MOST and math.isfinite(value)


def _reject(owner: str, name: str, allowed: str, value: object) -> None:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    is_bounded = "from" in allowed or "at most" in allowed
    limit = "" if is_bounded else f" (at most {MOST:g})"
    place = f"{owner}: " if owner else ""
    raise ConfigurationError(
        f"{place}{name} must be {allowed}{limit}. Received: {shown}."
    )
