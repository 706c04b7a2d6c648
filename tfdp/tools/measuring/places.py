"""Times sums and steps in one arrangement of processes and replicas, in turns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

from tfdp.cluster.addresses import LOOPBACK, free_port
from tfdp.cluster.job_key import JOB_KEY, make_job_key
from tfdp.cluster.machine import usable_cores
from tfdp.errors import CollectiveError
from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.tools.measuring.two_hosts import ADDRESSES, TwoHosts
from tfdp.tools.processes.children import Child, ProcessFailed, ask_children

PROCESS = "tfdp.tools.measuring.process"


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """An arrangement: processes of this machine, and replicas of each.

    >>> str(Arrangement(2, 1))
    '2x1'
    """

    processes: int
    replicas: int

    def __str__(self) -> str:
        return f"{self.processes}x{self.replicas}"


@dataclasses.dataclass(frozen=True)
class Work:
    """One thing to time.

    Args:
      kind: sums of a set of gradients, or training steps of a model.
      subject: a key of `GRADIENT_SETS`, or of `MODELS`.
      calls: sums or steps of one figure.
    """

    kind: Literal["sums", "steps", "steps without sums"]
    subject: str
    calls: int


@dataclasses.dataclass
class Figures:
    """Seconds and processor seconds of a call, one figure per repeat.

    `profile`: of a model whose steps were timed without sums, with its `local_batch`.
    """

    seconds: list[float]
    processor_seconds: list[float]
    profile: dict[str, Any] | None = None


def measure_place(
    place: Arrangement,
    wanted: Sequence[Work],
    repeats: int,
    timeout_seconds: float,
    hosts: TwoHosts | None = None,
) -> list[Figures]:
    """The figures of each work; all live in the same processes and take turns.

    `hosts`: where two processes run; None: here. Raises CollectiveError if a process
    fails or takes longer than the timeout for everything.
    """
    request = {
        "place": dataclasses.asdict(place),
        "wanted": [dataclasses.asdict(work) for work in wanted],
        "repeats": repeats,
        "timeout_seconds": timeout_seconds,
    }
    children = _children(place, hosts)
    try:
        answers = ask_children(PROCESS, request, timeout_seconds, children)
    except ProcessFailed as error:
        raise CollectiveError(f"{place} cannot be measured: {error}") from None
    return [_join(of_processes) for of_processes in zip(*answers, strict=True)]


def _children(place: Arrangement, hosts: TwoHosts | None) -> list[Child]:
    address, key = ADDRESSES[0] if hosts else LOOPBACK, make_job_key()
    coordinator = f"{address}:{free_port()}"
    children = []
    for rank in range(place.processes):
        variables = cluster_variables(
            place.processes, rank, coordinator, place.replicas
        )
        environment = local_environment(
            os.environ,
            {**variables, JOB_KEY: key},
            workers=place.processes,
            rank=rank,
            cores=usable_cores(),
        )
        starter = hosts.command(rank) if hosts else ()
        children.append(Child(environment, starter))
    return children


def _join(of_processes: Sequence[dict[str, Any]]) -> Figures:
    """Seconds of the slowest process, and processor seconds of all together."""
    seconds = zip(*(each["seconds"] for each in of_processes), strict=True)
    busy = zip(*(each["processor_seconds"] for each in of_processes), strict=True)
    profile = of_processes[0]["profile"]
    return Figures([*map(max, seconds)], [*map(sum, busy)], profile)
