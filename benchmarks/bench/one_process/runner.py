"""Runs cases, each in a worker process, and collects a report."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.bench.processes.runner import measure_groups
from benchmarks.bench.request import Request
from benchmarks.bench.results import CaseResult
from tfdp.cluster.machine import describe_machine, installed_versions
from tfdp.progress_bar import progress_bar
from tfdp.tools.processes.children import ProcessFailed, ask_child

WORKER = "benchmarks.bench.one_process.worker"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case, or an arm of it, without figures, and the last lines of its worker."""

    case: str
    devices: int
    reason: str
    arm: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """All results of one command, with what is needed to repeat it."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    results: tuple[CaseResult, ...]
    failures: tuple[Failure, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return {
            **vars(self),
            "results": [result.to_json() for result in self.results],
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
        }


def run_requests(
    requests: Sequence[Request],
    *,
    command: str,
    timeout_seconds: float,
    on_result: Callable[[CaseResult | Failure], None] = lambda outcome: None,
) -> Report:
    """Runs each request in fresh processes, one after the other.

    A failed case does not stop the others, nor does a failed arm that has processes of
    its own. `on_result` is called as soon as a case is done.
    """
    results, failures = [], []
    for request in requests:
        with progress_bar(f"measuring {request.case.name}", 0):
            outcomes = _run(request, timeout_seconds)
        for outcome in outcomes:
            on_result(outcome)
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                results.append(outcome)
    return Report(
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(),
        versions=installed_versions(),
        results=tuple(results),
        failures=tuple(failures),
    )


def _run(request: Request, timeout_seconds: float) -> list[CaseResult | Failure]:
    if request.workers == 1:
        return [_run_worker(request, timeout_seconds)]
    result, failed = measure_groups(request, timeout_seconds)
    outcomes: list[CaseResult | Failure] = [
        Failure(request.case.name, request.workers * request.devices, reason, arm)
        for arm, reason in failed.items()
    ]
    return outcomes if result is None else [*outcomes, result]


def _run_worker(request: Request, timeout_seconds: float) -> CaseResult | Failure:
    try:
        result = ask_child(WORKER, dataclasses.asdict(request), timeout_seconds)
    except ProcessFailed as error:
        return Failure(request.case.name, request.devices, str(error))
    return CaseResult.from_json(result)
