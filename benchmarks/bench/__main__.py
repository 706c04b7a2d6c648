"""Compares tfdp with TensorFlow's strategies: `python -m benchmarks.bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from benchmarks.bench.cases import CASES, SUITES, Case, select_cases
from benchmarks.bench.one_process.arms import ARMS
from benchmarks.bench.one_process.runner import Failure, run_requests
from benchmarks.bench.processes.arms import GROUP_ARMS
from benchmarks.bench.request import Request
from benchmarks.bench.results import CaseResult
from benchmarks.bench.tables import (
    format_cases,
    format_failure,
    format_heading,
    format_result,
)
from benchmarks.shared import run_script
from tfdp.checks import integer_from
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import write_json_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    _add_subject_options(parser)
    add, count = parser.add_argument, partial(parser.add_argument, type=integer_from(1))
    replicas = "numbers of replicas to run each case on (default: 2)"
    count("--devices", nargs="+", metavar="N", default=[2], help=replicas)
    workers = "measure the arms of several processes, with W of them, one core each"
    count("--workers", metavar="W", default=1, help=workers)
    each = "with --workers: logical CPUs of each process (default: 1)"
    count("--devices-per-worker", metavar="D", default=1, help=each)
    kinds = "logical CPUs of this machine, or its first GPUs (default: cpu)"
    add("--device-type", choices=("cpu", "gpu"), default="cpu", help=kinds)
    count("--repeats", metavar="R", help="figures per arm (default: 20)")
    threads = "threads of one TensorFlow op, the same for all arms (default: 1)"
    count("--intra-op-threads", metavar="T", default=1, help=threads)
    quick = "tiny subjects, 2 repeats: a smoke test, not a measurement"
    add("--quick", action="store_true", help=quick)
    add("--json", metavar="PATH", help="also write all figures here")
    limit = "stop a case that takes longer (default: 900)"
    count("--timeout-seconds", metavar="S", default=900, help=limit)


def _add_subject_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    suites = (
        "allreduce: sums of gradient lists; train: training steps; execution: several "
        "steps in one call; default: the first two"
    )
    add("suite", nargs="?", choices=SUITES, help=suites)
    add("--list", action="store_true", help="list the cases and stop")
    add = partial(add, nargs="+")
    add("--case", choices=CASES, metavar="CASE", help="only these cases")
    arms = dict.fromkeys([*ARMS, *GROUP_ARMS])
    instead = (
        f"compare these instead of a case's own: {', '.join(ARMS)}; with --workers: "
        f"{', '.join(GROUP_ARMS)}"
    )
    add("--arms", choices=arms, metavar="ARM", default=(), help=instead)


def run(options: argparse.Namespace) -> int:
    """Returns 1 if a case failed. Invalid options raise."""
    cases = select_cases(options.suite, options.case)
    if not cases:
        raise ConfigurationError(
            f"none of {', '.join(options.case)} is in the suite {options.suite!r}. "
            "See: python -m benchmarks.bench --list"
        )
    if options.list:
        print(format_cases(cases))
        return 0
    _check_options(options, cases)
    report = run_requests(
        [request for case in cases for request in _requests(options, case)],
        command=shlex.join(["python", "-m", "benchmarks.bench", *sys.argv[1:]]),
        timeout_seconds=options.timeout_seconds,
        on_result=_show,
    )
    if options.json:
        write_json_for("--json", options.json, report.to_json())
    print(format_heading(report))
    return 1 if report.failures else 0


def _requests(options: argparse.Namespace, case: Case) -> list[Request]:
    """One request for each number of devices."""
    several = options.workers > 1
    return [
        Request(
            case,
            devices=devices,
            workers=options.workers,
            repeats=options.repeats or (2 if options.quick else 20),
            arms=tuple(options.arms),
            quick=options.quick,
            device_type=options.device_type,
            intra_op_threads=options.intra_op_threads,
        )
        for devices in ([options.devices_per_worker] if several else options.devices)
    ]


def _check_options(options: argparse.Namespace, cases: list[Case]) -> None:
    if options.workers == 1:
        wrong = [arm for arm in options.arms if arm not in ARMS]
        if wrong:
            raise ConfigurationError(f"--arms {' '.join(wrong)}: only with --workers")
        return
    if options.device_type != "cpu":
        raise ConfigurationError(
            "--workers compares processes on CPUs: take --device-type cpu"
        )
    for case in cases:
        if case.suite == "execution":
            raise ConfigurationError(
                f"{case.name}: in one process only; leave out --workers"
            )
        for arm in options.arms:
            if arm not in GROUP_ARMS or case.suite not in GROUP_ARMS[arm].works:
                raise ConfigurationError(
                    f"--arms {arm}: no arm of {case.name} with --workers"
                )


def _show(outcome: CaseResult | Failure) -> None:
    if isinstance(outcome, Failure):
        print(format_failure(outcome), end="\n\n", file=sys.stderr, flush=True)
    else:
        print(format_result(outcome), end="\n\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=(__doc__ or "").partition(":")[0]
    )
    add_arguments(parser)
    run_script(parser, run)
