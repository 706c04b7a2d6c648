"""Two hosts on one machine: network namespaces joined by a link of limited rate."""

import contextlib
import os
import shutil
import subprocess

ADDRESSES = ("10.77.31.1", "10.77.31.2")


def why_not():
    """Why namespaces cannot be made here; None where they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (iproute2)"
    name = f"tfdp-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this kernel or container allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


class TwoHosts:
    """The two namespaces.

    Args:
      rate: what `tc` takes, as "100mbit".
    """

    def __init__(self, rate):
        self.names = [f"tfdp{os.getpid()}-{host}" for host in (0, 1)]
        self.links = [f"tf{os.getpid()}v{host}" for host in (0, 1)]
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run(
            *("ip", "link", "add", self.links[0], "netns", self.names[0]),
            *("type", "veth", "peer", "name", self.links[1], "netns", self.names[1]),
        )
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run(
                *("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf"),
                *("rate", rate, "burst", "256kb", "latency", "50ms"),
            )

    def command(self, host, *words):
        """`words`, to be run on `host`."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def sent_bytes(self, host):
        """What `host` has put on the link since it exists."""
        path = f"/sys/class/net/{self.links[host]}/statistics/tx_bytes"
        done = subprocess.run(
            self.command(host, "cat", path), check=True, capture_output=True, text=True
        )
        return int(done.stdout)

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def two_hosts(rate):
    """The hosts, taken away again at the end."""
    hosts = TwoHosts(rate)
    try:
        yield hosts
    finally:
        hosts.remove()
