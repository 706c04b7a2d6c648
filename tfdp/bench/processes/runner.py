"""Measures a case on several processes: a group of them per arm, all alive, in turns.

An idle group waits on its connection and takes no core.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from tfdp.bench.one_process.interleave import turns
from tfdp.bench.processes.arms import GROUP_ARMS
from tfdp.bench.processes.group import Group
from tfdp.bench.processes.two_hosts import TwoHosts, two_hosts
from tfdp.bench.request import Request
from tfdp.bench.results import ArmResult, CaseResult
from tfdp.errors import CollectiveError

__all__ = ["measure_groups"]


def measure_groups(
    request: Request, timeout_seconds: float
) -> tuple[CaseResult | None, dict[str, str]]:
    """Runs every arm of a case, each in processes of its own.

    Args:
      request: what to measure; `workers` is at least 2.
      timeout_seconds: for all arms together; each may take an equal part of it.

    Raises:
      DeviceError: when the case wants hosts of its own, and none can be made.

    Returns:
      The result, None when no arm gave one; and by arm the reason why it failed.
    """
    left_out = {
        arm: f"{arm}: {reason}"
        for arm in request.arm_names
        if (reason := _why_left_out(arm, request.devices))
    }
    names = [arm for arm in request.arm_names if arm not in left_out]
    load_before = os.getloadavg()[0]
    answers: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        link = request.case.link
        hosts = stack.enter_context(two_hosts(link.rate)) if link else None
        groups: dict[str, Group] = {}
        for arm in names:
            group = Group(request, arm, timeout_seconds / len(names), hosts)
            stack.callback(group.close)
            groups[arm] = group
            try:
                answers[arm] = group.start()
            except CollectiveError as error:
                failed[arm] = str(error)
                group.close()
        for arm in turns(names, request.repeats):
            if arm not in failed:
                try:
                    before = _sent_bytes(hosts)
                    seconds.setdefault(arm, []).append(groups[arm].turn())
                    # One more call than is timed; see `time_in_turn`.
                    share = (_sent_bytes(hosts) - before) / (request.calls + 1)
                    sent.setdefault(arm, []).append(share)
                except (CollectiveError, OSError) as error:
                    failed[arm] = str(error)
                    # It may spin in a collective, beside the arms that are timed.
                    groups[arm].close()
    measured = [arm for arm in names if arm not in failed]
    if not measured:
        return None, failed
    result = CaseResult(
        case=request.case_name,
        suite=request.case.suite,
        devices=request.workers * request.devices,
        subject=answers[measured[0]][0]["subject"],
        settings={
            **request.settings(),
            "workers": request.workers,
            "devices_per_worker": request.devices,
            "one_core_each": len(os.sched_getaffinity(0)) >= request.workers,
            "load_before_and_after": [load_before, os.getloadavg()[0]],
            "reference_arms": _reference_arms(request),
            **({"link_rate": request.case.link.rate} if request.case.link else {}),
        },
        arms={
            arm: ArmResult(
                tuple(seconds[arm]),
                answers[arm][0]["items_per_call"],
                {
                    "workers": [answer["facts"] for answer in answers[arm]],
                    **({"sent_bytes_per_call": sent[arm]} if request.case.link else {}),
                },
            )
            for arm in measured
        },
        left_out=left_out,
    )
    return result, failed


def _why_left_out(arm: str, devices_per_worker: int) -> str | None:
    row = GROUP_ARMS[arm]
    return row.why_left_out(1 if row.is_flat else devices_per_worker)


def _reference_arms(request: Request) -> list[str]:
    """Arms that the others are compared with, beside the stock ones."""
    return [request.arm_names[0]] if request.case.link else ["torch-gloo"]


def _sent_bytes(hosts: TwoHosts | None) -> float:
    """What a host has sent until now, the mean of both."""
    if hosts is None:
        return 0.0
    return sum(hosts.sent_bytes(host) for host in (0, 1)) / 2
