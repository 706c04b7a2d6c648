"""Measures a case on several processes: a group per arm, in turns.

All groups live at once; an idle one waits on its connection and takes no core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from benchmarks.bench.processes.arms import GROUP_ARMS
from benchmarks.bench.processes.group import Group
from benchmarks.bench.request import Request
from benchmarks.bench.results import ArmResult, CaseResult
from tfdp.errors import CollectiveError
from tfdp.tools.measuring.in_turn import turns
from tfdp.tools.measuring.two_hosts import TwoHosts


def measure_groups(
    request: Request, timeout_seconds: float, *, hosts: TwoHosts | None = None
) -> tuple[CaseResult | None, dict[str, str]]:
    """Runs every arm of a case in its own processes, `hosts` or here.

    The arms share `timeout_seconds` equally. Returns the result, None if no arm gave
    one; and by arm the reason why it failed.
    """
    left_out = {
        arm: f"{arm}: {reason}"
        for arm in request.arm_names
        if (
            reason := GROUP_ARMS[arm].why_left_out(
                1 if GROUP_ARMS[arm].is_flat else request.devices
            )
        )
    }
    names = [arm for arm in request.arm_names if arm not in left_out]
    load_before = os.getloadavg()[0]
    groups, failed = _take_turns(request, names, timeout_seconds, hosts)
    measured = [arm for arm in names if arm not in failed]
    if not measured:
        return None, failed
    result = request.result(
        groups[measured[0]].answers[0]["subject"],
        {arm: _result_of(groups[arm]) for arm in measured},
        left_out,
        {
            "workers": request.workers,
            "devices_per_worker": request.devices,
            "one_core_each": len(os.sched_getaffinity(0)) >= request.workers,
            "load_before_and_after": [load_before, os.getloadavg()[0]],
        },
    )
    return result, failed


def _result_of(group: Group) -> ArmResult:
    found = group.figures
    sent = {"sent_bytes_per_call": found.sent_bytes} if found.sent_bytes else {}
    workers = [answer["facts"] for answer in group.answers]
    one_process = GROUP_ARMS[group.arm].one_process
    return ArmResult(
        tuple(found.seconds),
        group.answers[0]["items_per_call"],
        {"workers": workers, "one_process": one_process, **sent},
    )


def _take_turns(
    request: Request,
    names: Sequence[str],
    timeout_seconds: float,
    hosts: TwoHosts | None,
) -> tuple[dict[str, Group], dict[str, str]]:
    """Starts the processes of all arms, and gives each its turns; why arms failed."""
    groups: dict[str, Group] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for arm in names:
            group = Group(request, arm, timeout_seconds / len(names), hosts)
            stack.callback(group.close)
            groups[arm] = group
            try:
                group.start()
            except CollectiveError as error:
                failed[arm] = str(error)
                group.close()
        for arm in turns(names, request.repeats):
            if arm not in failed:
                try:
                    groups[arm].turn()
                except (CollectiveError, OSError) as error:
                    failed[arm] = str(error)
                    # It may busy-wait in a collective while others are timed.
                    groups[arm].close()
    return groups, failed
