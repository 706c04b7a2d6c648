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


# Numbers that a simulation is given, refused at the door when they mean nothing.


#: Above this no quantity of a training lies, in seconds, bytes, FLOPs or devices.
MOST = 1e24
#: Below this none but 0 does: what is divided by it stays finite.
LEAST = 1e-24


def positive(owner: str, name: str, value: object) -> None:
    """Refuses what is no number from 1e-24 to 1e24.

    Raises:
      ConfigurationError: naming the field and what came.
    """
    if not _is_finite(value) or value < LEAST:  # type: ignore[operator]
        _refuse(owner, name, "a number above 0", value)


def at_least_zero(owner: str, name: str, value: object) -> None:
    """Refuses what is no finite number from 0 to 1e24."""
    if not _is_finite(value) or value < 0:  # type: ignore[operator]
        _refuse(owner, name, "a number of at least 0", value)


def share(owner: str, name: str, value: object) -> None:
    """Refuses what is no number from 0 to 1."""
    if not _is_finite(value) or not 0 <= value <= 1:  # type: ignore[operator]
        _refuse(owner, name, "a number from 0 to 1", value)


def whole(
    owner: str, name: str, value: object, least: int = 1, most: float = MOST
) -> None:
    """Refuses what is no whole number from `least` to `most`."""
    if not is_whole(value, least=least, most=most):
        upper = "" if most == MOST else f" and at most {most:,.0f}"
        _refuse(owner, name, f"a whole number of at least {least}{upper}", value)


def _is_finite(value: object) -> bool:
    # A whole number may be too large to be a float at all.
    return is_number(value) and abs(value) <= MOST and math.isfinite(value)


def _refuse(owner: str, name: str, allowed: str, value: object) -> None:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    is_bounded = "from" in allowed or "at most" in allowed
    limit = "" if is_bounded else f" (at most {MOST:g})"
    raise ConfigurationError(
        f"{owner}: {name} must be {allowed}{limit}. Received: {shown}."
    )
