"""Cost of an all-reduce of n bytes on hosts and devices, by algorithm.

docs/notes/predicted-steps.md ("The seconds of a sum") has the formulas.

In process nothing is packed: each tensor is summed separately, with ops on each
replica. There the link's rate is that of memory: all replicas' data is read and the sum
is written, in chunks that stay in a cache between additions.

Compressed gradients (`lossy.py`) are summed within a host as in two_level or
in_process; then each host encodes, sends and decodes.

Rows of a table are gathered on one replica of the host, summed and returned; then each
host sends its rows to all others, or the whole table, where rows are summed and that
costs less. One replica sums its host's rows by index, and each host those of all hosts;
how many indices are distinct is unknown.

A gather or scatter is half an all-reduce. If the number of hosts is no power of 2,
halving and doubling have one more step before and after, with all bytes.

Sources: Patarasuk and Yuan (2009), ring; Thakur, Rabenseifner and Gropp (2005),
doubling and halving; Sanders, Speck and Traeff (2009), two trees; NCCL's tuning.cc,
latencies of a ring over hosts.
"""

from __future__ import annotations

import dataclasses
import math

from tfdp.checks import check_one_of
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
class ExchangePart:
    """A part of an exchange, on one level of links ("within", "between" or "coding").

    Stages of a level do not overlap; `compute_share` of the replicas' compute is taken.
    """

    level: str
    seconds: float
    compute_share: float


def exchange_stages(
    size_bytes: float,
    topology: Topology,
    machine: Machine,
    algorithm: str,
    part: float = 1.0,
    tensors: int = 1,
    lossy: Lossy | None = None,
) -> list[ExchangePart]:
    """The stages of an exchange, in order; none on a single replica.

    `size_bytes` are those of each replica's `tensors` together; `part` is 1 for an
    all-reduce and 1/2 for a gather or a scatter. Raises ConfigurationError for an
    unknown algorithm, or one that cannot run there.
    """
    check_one_of("algorithm", algorithm, ALGORITHMS)
    if algorithm == "in_process" and topology.hosts > 1:
        raise ConfigurationError(
            f"algorithm 'in_process' adds on one host. Received: {topology}; take "
            f"'sockets', or another one of {', '.join(ALGORITHMS)}."
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
        stages.append(ExchangePart(WITHIN, seconds + machine.launch_seconds, share))
    if lossy is not None and is_small:
        hosts, link = topology.hosts, machine.between_hosts
        half = part * lossy.coding_seconds(size_bytes, tensors) / 2
        seconds = part * lossy.sent_bytes(size_bytes, hosts) / link.rate
        seconds += part * lossy.rounds(hosts) * link.latency_seconds
        sent = ExchangePart(
            BETWEEN, seconds + machine.launch_seconds, link.compute_share
        )
        coding = ExchangePart(CODING, half, lossy.compute_share)
        return [*stages, coding, sent, coding]
    if topology.hosts > 1:
        seconds = part * _between(size_bytes, topology.hosts, machine, algorithm)
        share = machine.between_hosts.compute_share
        stages.append(ExchangePart(BETWEEN, seconds + machine.launch_seconds, share))
    return stages


def row_stages(
    row_bytes: float,
    table_bytes: float,
    adds_rows: bool,
    topology: Topology,
    machine: Machine,
    algorithm: str,
    unadded_bytes: float = 0,
) -> list[ExchangePart]:
    """The stages of an exchange of table rows; as `exchange_stages`.

    Each replica has `row_bytes` of rows with their indices (`unadded_bytes` before
    equal indices are summed; 0: the same). With `adds_rows` hosts sum rows of one
    index, and may send the whole table.
    """
    devices, hosts = topology.devices_per_host, topology.hosts
    within, between = machine.within_host, machine.between_hosts
    stages = []
    if devices > 1:
        seconds = 2 * devices * row_bytes / within.rate
        seconds += devices * within.latency_seconds + machine.launch_seconds
        stages.append(ExchangePart(WITHIN, seconds, within.compute_share))
    rate = machine.row_bytes_per_second if adds_rows else None
    if rate and devices * hosts > 1:
        seconds = devices * (unadded_bytes or row_bytes) / rate
        stages.append(ExchangePart(WITHIN, seconds, within.compute_share))
    if hosts > 1:
        gathered = (hosts - 1) * devices * row_bytes
        if adds_rows and gathered > 2 * table_bytes * (hosts - 1) / hosts:
            whole = exchange_stages(table_bytes, Topology(hosts, 1), machine, algorithm)
            return [*stages, *whole]
        seconds = gathered / between.rate + (hosts - 1) * between.latency_seconds
        seconds += machine.launch_seconds
        stages.append(ExchangePart(BETWEEN, seconds, between.compute_share))
        if rate:
            seconds = hosts * devices * row_bytes / rate
            stages.append(ExchangePart(WITHIN, seconds, within.compute_share))
    return stages


def _flat_ring(
    size_bytes: float, topology: Topology, machine: Machine, part: float
) -> ExchangePart:
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
    return ExchangePart(BETWEEN if hosts > 1 else WITHIN, total, slower.compute_share)


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
        # Between hosts the tree's bytes pass through the devices anyway.
        alone = size_bytes / link.rate if topology.hosts == 1 else 0.0
        return latencies + alone
    return latencies + 2 * size_bytes * (devices - 1) / devices / link.rate


def moved_in_process(devices: int) -> int:
    """Bytes of memory read and written per byte of a sum."""
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
    # Hosts beyond the power of 2 send theirs to a neighbour and receive the sum.
    rest = 0.0
    if hosts & (hosts - 1):
        steps -= 1
        rest = 2 * (link.latency_seconds + size_bytes / link.rate)
        power = 1 << steps
        least_sent = 2 * size_bytes * (power - 1) / power / link.rate
    if algorithm == "recursive_doubling":
        return steps * (link.latency_seconds + size_bytes / link.rate) + rest
    return 2 * steps * link.latency_seconds + least_sent + rest
