"""Two simulated hosts: network namespaces joined by a link of limited rate.

They use the kernel's TCP over a pair of virtual cards, whose sending side a token
bucket (`tc ... tbf`) limits. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from tfdp.errors import ConfigurationError, DeviceError

ADDRESSES = ("10.77.31.1", "10.77.31.2")
TOOLS = ("ip", "tc")
RATE = re.compile(r"(\d+(\.\d+)?)(bit|kbit|mbit|gbit|tbit)")


def check_rate(rate: str) -> None:
    """Rejects rates that `tc` would reject or misread, such as "nan"."""
    found = RATE.fullmatch(rate)
    if found is None or float(found[1]) == 0:
        raise ConfigurationError(
            "The rate of a link is a number above 0 and a unit, such as 100mbit or "
            f"1gbit (bit, kbit, mbit, gbit, tbit per second). Received: {rate!r}."
        )


def why_no_hosts() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"there is no `{tool}` on PATH (the package iproute2)"
    name = f"tfdp-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this kernel or container allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


class TwoHosts:
    """The two namespaces; `rate` of the link, each way, as `tc` takes it: "100mbit"."""

    def __init__(self, rate: str):
        self.names = [f"tfdp{os.getpid()}-{host}" for host in (0, 1)]
        self.cards = [f"tf{os.getpid()}v{host}" for host in (0, 1)]
        try:
            self._make(rate)
        except BaseException:
            self.remove()
            raise

    def _make(self, rate: str) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(
            *("ip", "link", "add", self.cards[0], "netns", self.names[0]),
            *("type", "veth", "peer", "name", self.cards[1], "netns", self.names[1]),
        )
        for name, card, address in zip(self.names, self.cards, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", card)
            _run("ip", "-n", name, "link", "set", card, "up")
            _run(
                *("tc", "-n", name, "qdisc", "add", "dev", card, "root", "tbf"),
                *("rate", rate, "burst", "256kb", "latency", "50ms"),
            )

    def command(self, host: int, *words: str) -> list[str]:
        """`words`, as a command on `host`."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def sent_bytes(self, host: int) -> int:
        """Bytes that `host` has put on the link."""
        path = f"/sys/class/net/{self.cards[host]}/statistics/tx_bytes"
        return int(_run(*self.command(host, "cat", path)))

    def cut(self) -> None:
        """Cuts the link: packets are lost without an error."""
        _run("ip", "-n", self.names[1], "link", "set", self.cards[1], "down")

    def join(self) -> None:
        """Restores the link between the two hosts."""
        _run("ip", "-n", self.names[1], "link", "set", self.cards[1], "up")

    def remove(self) -> None:
        """Deletes the namespaces, and with them the link."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[TwoHosts]:
    """Two hosts, deleted at the end; DeviceError if they cannot be created here."""
    check_rate(rate)
    reason = why_no_hosts()
    if reason:
        raise DeviceError(
            f"Two hosts with a link of {rate} cannot be made here: {reason}. They are "
            "network namespaces: run as root on Linux, with iproute2 (ip, tc), in a "
            "container that may create them (NET_ADMIN, SYS_ADMIN)."
        )
    hosts: TwoHosts | None = None
    try:
        hosts = TwoHosts(rate)
        yield hosts
    except subprocess.CalledProcessError as error:
        raise DeviceError(
            f"A link of {rate} cannot be made here: `{' '.join(error.cmd)}` says "
            f"{error.stderr.strip()!r}."
        ) from error
    finally:
        if hosts is not None:
            hosts.remove()


def _run(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout
