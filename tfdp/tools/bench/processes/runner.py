"""Measures a case on several processes: a group of them per arm, all alive, in turns.

An idle group waits on its connection and takes no core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.errors import CollectiveError
from tfdp.tools.bench.one_process.interleave import turns
from tfdp.tools.bench.processes.arms import GROUP_ARMS, GroupArm
from tfdp.tools.bench.processes.group import Group
from tfdp.tools.bench.processes.two_hosts import TwoHosts
from tfdp.tools.bench.request import Request
from tfdp.tools.bench.results import ArmResult, CaseResult


def measure_groups(
    request: Request,
    timeout_seconds: float,
    *,
    hosts: TwoHosts | None = None,
    arms: Mapping[str, GroupArm] = GROUP_ARMS,
) -> tuple[CaseResult | None, dict[str, str]]:
    """Runs every arm of a case, each in processes of its own.

    Args:
      request: what to measure; `workers` is at least 2.
      timeout_seconds: for all arms together; each may take an equal part of it.
      hosts: where the processes live; None: here.
      arms: by name.

    Returns:
      The result, None when no arm gave one; and by arm the reason why it failed.
    """
    left_out = {
        arm: f"{arm}: {reason}"
        for arm in request.arm_names
        if (reason := _why_left_out(arms[arm], request.devices))
    }
    names = [arm for arm in request.arm_names if arm not in left_out]
    load_before = os.getloadavg()[0]
    figures = _take_turns(request, names, timeout_seconds, hosts, arms)
    measured = [arm for arm in names if arm not in figures.failed]
    if not measured:
        return None, figures.failed
    result = CaseResult(
        case=request.case.name,
        suite=request.case.suite,
        devices=request.workers * request.devices,
        subject=figures.answers[measured[0]][0]["subject"],
        settings={
            **request.settings(),
            "workers": request.workers,
            "devices_per_worker": request.devices,
            "one_core_each": len(os.sched_getaffinity(0)) >= request.workers,
            "load_before_and_after": [load_before, os.getloadavg()[0]],
        },
        arms={arm: figures.result_of(arm, arms[arm]) for arm in measured},
        left_out=left_out,
    )
    return result, figures.failed


@dataclasses.dataclass
class _Figures:
    """What the arms gave, by their names.

    Args:
      answers: what each process of the arm said when it was ready.
      seconds: of each turn.
      sent: bytes of a call that a host sent; of hosts of their own.
      failed: why an arm has no part any more.
    """

    answers: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    sent: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def result_of(self, arm: str, row: GroupArm) -> ArmResult:
        """The figures of one arm."""
        sent = {"sent_bytes_per_call": self.sent[arm]} if arm in self.sent else {}
        workers = [answer["facts"] for answer in self.answers[arm]]
        return ArmResult(
            tuple(self.seconds[arm]),
            self.answers[arm][0]["items_per_call"],
            {"workers": workers, "one_process": row.one_process, **sent},
        )


def _take_turns(
    request: Request,
    names: Sequence[str],
    timeout_seconds: float,
    hosts: TwoHosts | None,
    arms: Mapping[str, GroupArm],
) -> _Figures:
    """Starts the processes of all arms, and gives one arm after the other a turn."""
    figures = _Figures()
    with contextlib.ExitStack() as stack:
        groups: dict[str, Group] = {}
        for arm in names:
            group = Group(request, arm, timeout_seconds / len(names), hosts, arms)
            stack.callback(group.close)
            groups[arm] = group
            try:
                figures.answers[arm] = group.start()
            except CollectiveError as error:
                figures.failed[arm] = str(error)
                group.close()
        for arm in turns(names, request.repeats):
            if arm not in figures.failed:
                try:
                    before = _sent_bytes(hosts)
                    figures.seconds.setdefault(arm, []).append(groups[arm].turn())
                    if hosts is not None:
                        # One more call than is timed; see `time_in_turn`.
                        share = (_sent_bytes(hosts) - before) / (request.calls + 1)
                        figures.sent.setdefault(arm, []).append(share)
                except (CollectiveError, OSError) as error:
                    figures.failed[arm] = str(error)
                    # It may spin in a collective, beside the arms that are timed.
                    groups[arm].close()
    return figures


def _why_left_out(row: GroupArm, devices_per_worker: int) -> str | None:
    return row.why_left_out(1 if row.is_flat else devices_per_worker)


def _sent_bytes(hosts: TwoHosts | None) -> float:
    """What a host has sent until now, the mean of both."""
    if hosts is None:
        return 0.0
    return sum(hosts.sent_bytes(host) for host in (0, 1)) / 2
