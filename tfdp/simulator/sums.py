"""What a sum of n bytes costs on hosts and devices, by the algorithm.

With a latency a and a rate R of a link, p replicas on M hosts of g devices, `_i` within
a host and `_e` between hosts, all rates of a host's connections together:

    ring               max(2 n (p-1)/p / R_i, 2 n (p-1)/p / R_e)
                       + (2 (p-1) - 2 (M-1)) a_i + 2 (M-1) a_e
    two_level          2 n (g-1)/g / R_i + 2 (g-1) a_i
                       + 2 n (M-1)/M / R_e + 2 (M-1) a_e
    halving_doubling   within as two_level; 2 n (M-1)/M / R_e + 2 log2(M) a_e
    recursive_doubling within as two_level; log2(M) (n / R_e + a_e)
    tree               n-byte pipeline up and down, two trees of half the bytes:
                       2 n / R_e + 2 (g-1) a_i + 2 log2(M) a_e, n / R_i where M = 1
    in_process         one host: (g+1) n / R_i + g t a_i: the replicas add, all together
    sockets            within as in_process, then the way of `tfdp.plan.sum_ways`

In process nothing is packed: each of t tensors is a sum of its own, with operations on
each replica. R_i is a rate of
memory there: what all replicas hold is read and the sum is written, in pieces that stay
in a cache from one addition to the next.

A gather or a scatter of n bytes is half a sum: half of the bytes, half of the steps.
Where the number of hosts is no power of 2 the halvings and doublings have a step before
and after, with all bytes.

Sources: Patarasuk and Yuan (2009) for the ring; Thakur, Rabenseifner and Gropp (2005)
for doubling and halving; Sanders, Speck and Traeff (2009) for two trees; the latencies
of a ring over hosts are added as in NCCL's tuning.cc.
"""

from __future__ import annotations

import dataclasses
import math

from tfdp.errors import ConfigurationError
from tfdp.plan.sum_ways import LinkSpeed, SumWays
from tfdp.plan.topology import Topology
from tfdp.simulator.machine import Machine

__all__ = [
    "ALGORITHMS",
    "Stage",
    "exchange_stages",
    "moved_in_process",
    "sum_seconds",
]

ALGORITHMS = (
    "ring",
    "two_level",
    "halving_doubling",
    "recursive_doubling",
    "tree",
    "in_process",
    "sockets",
)
WITHIN, BETWEEN = "within", "between"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a sum, on one level of links.

    Args:
      level: "within" or "between"; what travels on one level does so in turn.
      seconds: how long it takes alone.
      compute_share: of the replicas' computing that stands still meanwhile.
    """

    level: str
    seconds: float
    compute_share: float


def sum_seconds(
    size_bytes: float, topology: Topology, machine: Machine, algorithm: str
) -> float:
    """How long a sum of `size_bytes` takes alone, its launch included.

    Args:
      size_bytes: of each replica's tensors together.
      topology: hosts and devices.
      machine: their links.
      algorithm: one of ALGORITHMS.

    Raises:
      ConfigurationError: there is no such algorithm, or it cannot act there.
    """
    return sum(
        stage.seconds
        for stage in exchange_stages(size_bytes, topology, machine, algorithm)
    )


def exchange_stages(
    size_bytes: float,
    topology: Topology,
    machine: Machine,
    algorithm: str,
    part: float = 1.0,
    tensors: int = 1,
) -> list[Stage]:
    """The parts of a sum, in their order; none on a single replica.

    Args:
      size_bytes, topology, machine, algorithm: as `sum_seconds`.
      part: 1 for a sum, 1/2 for a gather or a scatter.
      tensors: that the bytes are made of.

    Raises:
      ConfigurationError: as `sum_seconds`.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}. Received: "
            f"{algorithm!r}."
        )
    if algorithm == "in_process" and topology.hosts > 1:
        raise ConfigurationError(
            "algorithm 'in_process' adds on one host. Received: "
            f"{topology}; take 'sockets', or another one of "
            f"{', '.join(ALGORITHMS)}."
        )
    if topology.num_replicas == 1:
        return []
    if algorithm == "ring":
        return [_flat_ring(size_bytes, topology, machine, part)]
    stages = []
    if topology.devices_per_host > 1:
        seconds = part * _within(size_bytes, topology, machine, algorithm, tensors)
        share = machine.within_host.compute_share
        stages.append(Stage(WITHIN, seconds + machine.launch_seconds, share))
    if topology.hosts > 1:
        seconds = part * _between(size_bytes, topology.hosts, machine, algorithm)
        share = machine.between_hosts.compute_share
        stages.append(Stage(BETWEEN, seconds + machine.launch_seconds, share))
    return stages


def _flat_ring(
    size_bytes: float, topology: Topology, machine: Machine, part: float
) -> Stage:
    replicas, hosts = topology.num_replicas, topology.hosts
    within, between = machine.within_host, machine.between_hosts
    sent = 2 * size_bytes * (replicas - 1) / replicas
    hops_between = 2 * (hosts - 1)
    hops_within = 2 * (replicas - 1) - hops_between
    seconds = hops_within * within.latency_seconds
    seconds += hops_between * between.latency_seconds
    over_links = [sent / between.rate] if hosts > 1 else []
    if topology.devices_per_host > 1:
        over_links.append(sent / within.rate)
    slower = between if hosts > 1 else within
    total = part * (seconds + max(over_links)) + machine.launch_seconds
    return Stage(BETWEEN if hosts > 1 else WITHIN, total, slower.compute_share)


def _within(
    size_bytes: float,
    topology: Topology,
    machine: Machine,
    algorithm: str,
    tensors: int,
) -> float:
    link, devices = machine.within_host, topology.devices_per_host
    if algorithm in ("in_process", "sockets"):
        moved_bytes = moved_in_process(devices) * size_bytes
        return moved_bytes / link.rate + devices * tensors * link.latency_seconds
    latencies = 2 * (devices - 1) * link.latency_seconds
    if algorithm == "tree":
        # Between hosts the bytes of the tree go through the devices on their way.
        alone = size_bytes / link.rate if topology.hosts == 1 else 0.0
        return latencies + alone
    return latencies + 2 * size_bytes * (devices - 1) / devices / link.rate


def moved_in_process(devices: int) -> int:
    """For each byte of a sum, what is read and written of the memory of a host."""
    return devices + 1


def _between(size_bytes: float, hosts: int, machine: Machine, algorithm: str) -> float:
    link = machine.between_hosts
    if algorithm == "sockets":
        ways = SumWays(hosts, LinkSpeed(link.latency_seconds, link.rate))
        return ways.seconds(ways.choose(round(size_bytes)), round(size_bytes))
    steps = math.ceil(math.log2(hosts))
    least_sent = 2 * size_bytes * (hosts - 1) / hosts / link.rate
    if algorithm == "two_level":
        return 2 * (hosts - 1) * link.latency_seconds + least_sent
    if algorithm == "tree":
        return 2 * steps * link.latency_seconds + 2 * size_bytes / link.rate
    # Those beyond the power of 2 hand theirs to a neighbour, and get the sum back.
    rest = 0.0
    if hosts & (hosts - 1):
        steps -= 1
        rest = 2 * (link.latency_seconds + size_bytes / link.rate)
        power = 1 << steps
        least_sent = 2 * size_bytes * (power - 1) / power / link.rate
    if algorithm == "recursive_doubling":
        return steps * (link.latency_seconds + size_bytes / link.rate) + rest
    return 2 * steps * link.latency_seconds + least_sent + rest
