"""Times arms in one arrangement of processes and replicas, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from tfdp.tools.bench.cases import CASES
from tfdp.tools.bench.one_process.interleave import turns
from tfdp.tools.bench.processes.arms import NO_SUMS
from tfdp.tools.bench.processes.group import Figures, Group
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


def measure_place(
    wanted: Sequence[tuple[str, Request]],
    timeout_seconds: float,
    hosts: TwoHosts | None = None,
) -> list[Figures]:
    """The figures of some arms (with equal repeats); all live at once and take turns.

    `hosts`: where the processes run; None: here. Raises CollectiveError if a process
    ends or takes longer than the timeout for everything.
    """
    groups: dict[str, Group] = {}
    with contextlib.ExitStack() as stack:
        for number, (arm, request) in enumerate(wanted):
            network = hosts if request.workers > 1 else None
            group = Group(request, arm, timeout_seconds, network)
            stack.callback(group.close)
            group.start()
            groups[str(number)] = group
        for name in turns(list(groups), wanted[0][1].repeats):
            groups[name].turn()
    return [group.figures for group in groups.values()]
