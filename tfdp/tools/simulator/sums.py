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

Gradients in fewer bytes (`tfdp.tools.simulator.lossy`) are added within a host as
two_level, or in_process, does; then a host encodes, sends and decodes.

The r bytes of rows that each replica has of a table are handed to one of a host, added
and handed back; then each host sends what it has to all others:

    rows               2 g r / R_i + g a_i + (M-1) g r / R_e + (M-1) a_e

or, where they are added and the whole table costs less, the table. One replica adds
those of its host by their places, u bytes of each replica before any are added, and
each host those of all hosts: g u / A and M g r / A more. How many of these differ is
not known.

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
from tfdp.tools.simulator.lossy import Lossy
from tfdp.tools.simulator.machine import Machine

ALGORITHMS = (
    "ring",
    "two_level",
    "halving_doubling",
    "recursive_doubling",
    "tree",
    "in_process",
    "sockets",
)
WITHIN, BETWEEN, CODING = "within", "between", "coding"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a sum, on one level of links.

    Args:
      level: "within", "between" or, of what is made small, "coding"; what is on one
        level is so in turn.
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
    lossy: Lossy | None = None,
) -> list[Stage]:
    """The parts of a sum, in their order; none on a single replica.

    Args:
      size_bytes, topology, machine, algorithm: as `sum_seconds`.
      part: 1 for a sum, 1/2 for a gather or a scatter.
      tensors: that the bytes are made of.
      lossy: how hosts send fewer bytes; None: they do not.

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
    is_small = lossy is not None and topology.hosts > 1
    if algorithm == "ring" and not is_small:
        return [_flat_ring(size_bytes, topology, machine, part)]
    stages = []
    if topology.devices_per_host > 1:
        seconds = part * _within(size_bytes, topology, machine, algorithm, tensors)
        share = machine.within_host.compute_share
        stages.append(Stage(WITHIN, seconds + machine.launch_seconds, share))
    if lossy is not None and is_small:
        hosts = topology.hosts
        return [*stages, *_small(size_bytes, hosts, machine, part, lossy, tensors)]
    if topology.hosts > 1:
        seconds = part * _between(size_bytes, topology.hosts, machine, algorithm)
        share = machine.between_hosts.compute_share
        stages.append(Stage(BETWEEN, seconds + machine.launch_seconds, share))
    return stages


def row_stages(
    row_bytes: float,
    table_bytes: float,
    adds_rows: bool,
    topology: Topology,
    machine: Machine,
    algorithm: str,
    unadded_bytes: float = 0,
) -> list[Stage]:
    """The parts of an exchange of rows of a table; none on a single replica.

    Args:
      row_bytes: that each replica has, with their places.
      table_bytes: of the whole table.
      adds_rows: whether hosts add rows of one place, and may send the whole table.
      topology, machine, algorithm: as `sum_seconds`.
      unadded_bytes: of a replica's rows before those of one place are added; 0: as many
        as row_bytes.

    Raises:
      ConfigurationError: as `sum_seconds`.
    """
    devices, hosts = topology.devices_per_host, topology.hosts
    within, between = machine.within_host, machine.between_hosts
    stages = []
    if devices > 1:
        seconds = 2 * devices * row_bytes / within.rate
        seconds += devices * within.latency_seconds + machine.launch_seconds
        stages.append(Stage(WITHIN, seconds, within.compute_share))
    rate = machine.row_bytes_per_second if adds_rows else None
    if rate and devices * hosts > 1:
        seconds = devices * (unadded_bytes or row_bytes) / rate
        stages.append(Stage(WITHIN, seconds, within.compute_share))
    if hosts > 1:
        gathered = (hosts - 1) * devices * row_bytes
        if adds_rows and gathered > 2 * table_bytes * (hosts - 1) / hosts:
            whole = exchange_stages(table_bytes, Topology(hosts, 1), machine, algorithm)
            return [*stages, *whole]
        seconds = gathered / between.rate + (hosts - 1) * between.latency_seconds
        seconds += machine.launch_seconds
        stages.append(Stage(BETWEEN, seconds, between.compute_share))
        if rate:
            seconds = hosts * devices * row_bytes / rate
            stages.append(Stage(WITHIN, seconds, within.compute_share))
    return stages


def _small(
    size_bytes: float,
    hosts: int,
    machine: Machine,
    part: float,
    lossy: Lossy,
    tensors: int,
) -> list[Stage]:
    """Encoded, sent and decoded by each host."""
    link = machine.between_hosts
    half = part * lossy.coding_seconds(size_bytes, tensors) / 2
    seconds = part * lossy.sent_bytes(size_bytes, hosts) / link.rate
    seconds += part * lossy.rounds(hosts) * link.latency_seconds
    seconds += machine.launch_seconds
    return [
        Stage(CODING, half, lossy.compute_share),
        Stage(BETWEEN, seconds, link.compute_share),
        Stage(CODING, half, lossy.compute_share),
    ]


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
