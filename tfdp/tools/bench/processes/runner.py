"""Measures a case on several processes: a group per arm, in turns.

All groups live at once; an idle one waits on its connection and takes no core.
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
    """Runs every arm of a case in its own processes, `hosts` or here.

    The arms share `timeout_seconds` equally. Returns the result, None if no arm gave
    one; and by arm the reason why it failed.
    """
    left_out = {
        arm: f"{arm}: {reason}"
        for arm in request.arm_names
        if (
            reason := arms[arm].why_left_out(
                1 if arms[arm].is_flat else request.devices
            )
        )
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
    """The results of arms, by their names.

    `answers`: what each process sent when it was ready; `sent`: bytes per call of a
    host, with `hosts` only; `failed`: why an arm is no longer measured.
    """

    answers: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    sent: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def result_of(self, arm: str, row: GroupArm) -> ArmResult:
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
    """Starts the processes of all arms, and gives each arm its turns."""
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
                        # One untimed call more; see `time_in_turn`.
                        share = (_sent_bytes(hosts) - before) / (request.calls + 1)
                        figures.sent.setdefault(arm, []).append(share)
                except (CollectiveError, OSError) as error:
                    figures.failed[arm] = str(error)
                    # It may busy-wait in a collective while others are timed.
                    groups[arm].close()
    return figures


def _sent_bytes(hosts: TwoHosts | None) -> float:
    """Bytes a host has sent so far, the mean of both."""
    if hosts is None:
        return 0.0
    return sum(hosts.sent_bytes(host) for host in (0, 1)) / 2
