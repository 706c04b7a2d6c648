"""Times arms in one arrangement of processes and replicas, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp.tools.bench.cases import CASES
from tfdp.tools.bench.one_process.interleave import turns
from tfdp.tools.bench.processes.arms import NO_SUMS
from tfdp.tools.bench.processes.group import Group
from tfdp.tools.bench.processes.two_hosts import TwoHosts
from tfdp.tools.bench.request import Request


@dataclasses.dataclass(frozen=True)
class Place:
    """An arrangement: processes of this machine, and replicas of each.

    >>> str(Place(2, 1)), Place(1, 4).arm, Place(2, 2).without_sums
    ('2x1', 'tfdp-in-process', 'tfdp-sockets-no-sums')
    """

    processes: int
    replicas: int

    @property
    def arm(self) -> str:
        return "tfdp-in-process" if self.processes == 1 else "tfdp-sockets"

    @property
    def without_sums(self) -> str:
        """The same arm without any exchange."""
        return f"{self.arm}{NO_SUMS}"

    def request(self, case: str, subject: str, repeats: int, quick: bool) -> Request:
        return Request(
            CASES[case],
            devices=self.replicas,
            workers=self.processes,
            repeats=repeats,
            quick=quick,
            subject=subject,
        )

    def __str__(self) -> str:
        return f"{self.processes}x{self.replicas}"


@dataclasses.dataclass
class Figures:
    """Of one arm, by repeat: seconds of a call, and processor seconds of all processes.

    `facts`: what process 0 reported when it was ready.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    processor_seconds: list[float] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def measure_place(
    wanted: Sequence[tuple[str, Request]],
    timeout_seconds: float,
    hosts: TwoHosts | None = None,
) -> list[Figures]:
    """The figures of some arms (with equal repeats); all live at once and take turns.

    `hosts`: where the processes run; None: here. Raises CollectiveError if a process
    ends or takes longer than the timeout for everything.
    """
    found = [Figures() for _ in wanted]
    with contextlib.ExitStack() as stack:
        groups = []
        for figures, (arm, request) in zip(found, wanted, strict=True):
            network = hosts if request.workers > 1 else None
            group = Group(request, arm, timeout_seconds, network)
            stack.callback(group.close)
            figures.facts = group.start()[0]["facts"]
            groups.append(group)
        numbers = [str(number) for number in range(len(groups))]
        for name in turns(numbers, wanted[0][1].repeats):
            group, figures = groups[int(name)], found[int(name)]
            figures.seconds.append(group.turn())
            figures.processor_seconds.append(group.processor_seconds)
    return found
