"""The `tfdp bench` command."""

from __future__ import annotations

import argparse
import shlex
import sys

from tfdp.bench.cases import CASES, SUITES, Case, select_cases
from tfdp.bench.first_step.command import run_first_step
from tfdp.bench.memory.command import MEMORY_SUITE, run_memory
from tfdp.bench.one_process.arms import ARMS
from tfdp.bench.one_process.runner import Failure, run_requests
from tfdp.bench.processes.arms import GROUP_ARMS
from tfdp.bench.request import Request
from tfdp.bench.results import CaseResult
from tfdp.bench.table import (
    format_cases,
    format_failure,
    format_heading,
    format_result,
)
from tfdp.checks import integer_from
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import refuse_bad_places, write_json_for

__all__ = ["add_arguments", "run"]

COMPRESSION_SUITE = "compression"
CHECKPOINT_SUITE = "checkpoint"
LINKS_SUITE = "links"
PREDICTION_SUITE = "prediction"
FIRST_STEP_SUITE = "first-step"
RUN_ALONE = (
    *(COMPRESSION_SUITE, CHECKPOINT_SUITE, LINKS_SUITE, PREDICTION_SUITE),
    FIRST_STEP_SUITE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp bench`."""
    _add_what_is_measured(parser)
    _add_where_it_is_measured(parser)
    _add_how_it_is_measured(parser)


def _add_what_is_measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suite",
        nargs="?",
        choices=(*SUITES, MEMORY_SUITE, *RUN_ALONE),
        help="allreduce: sums of gradient lists; train: training steps; network: both "
        "over a link of limited rate (root); epoch: short epochs of fit, with their "
        "input set up and taken down; execution: several steps in one call; "
        "memory: bytes per replica at every shard stage; "
        "compression: what each method costs and saves; checkpoint: how fast a "
        "training is written and read; links: small sums of 2 to 64 light processes; "
        "prediction: steps and sums beside what the simulator predicts; "
        "first-step: fit until its first step is done; "
        "default: the first two",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--case", nargs="+", choices=CASES, metavar="CASE", help="only these cases"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=dict.fromkeys([*ARMS, *GROUP_ARMS]),
        metavar="ARM",
        default=(),
        help=f"compare these instead of a case's own: {', '.join(ARMS)}; with "
        f"--workers: {', '.join(GROUP_ARMS)}",
    )


def _add_where_it_is_measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        nargs="+",
        type=integer_from(1),
        metavar="N",
        default=[2],
        help="numbers of replicas to run each case on (default: 2)",
    )
    parser.add_argument(
        "--workers",
        type=integer_from(1),
        metavar="W",
        default=1,
        help="measure the arms of several processes, with W of them, one core each",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=integer_from(1),
        metavar="D",
        default=1,
        help="with --workers: logical CPUs of each process (default: 1)",
    )
    parser.add_argument(
        "--device-type",
        choices=("cpu", "gpu"),
        default="cpu",
        help="logical CPUs of this machine, or its first GPUs (default: cpu)",
    )


def _add_how_it_is_measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats",
        type=integer_from(1),
        metavar="R",
        help="figures per arm (default: 20)",
    )
    parser.add_argument(
        "--intra-op-threads",
        type=integer_from(1),
        metavar="T",
        default=1,
        help="threads of one TensorFlow op, for all arms alike (default: 1)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny subjects, 2 repeats: shows that it runs, tells no speed",
    )
    parser.add_argument("--json", metavar="PATH", help="also write all figures here")
    parser.add_argument(
        "--plot", metavar="PATH", help="with links: also draw them here, as HTML"
    )
    parser.add_argument(
        "--link-rates",
        nargs="+",
        metavar="RATE",
        help="with prediction: links between two processes, loopback or a rate such as "
        "1gbit, which needs root (default: loopback)",
    )
    parser.add_argument(
        "--timeout-seconds",
        type=integer_from(1),
        metavar="S",
        default=900,
        help="stop a case that takes longer (default: 900)",
    )


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp bench`; returns the exit code.

    1 when a case failed, 2 when what was asked for cannot be, or could not be written.
    """
    try:
        return _run(options)
    except ConfigurationError as error:
        print(f"tfdp bench: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.plot and (options.suite != LINKS_SUITE or options.list):
        print("--plot: only `tfdp bench links` draws a picture", file=sys.stderr)
        return 2
    if options.link_rates and options.suite != PREDICTION_SUITE:
        print("--link-rates: only `tfdp bench prediction` takes it", file=sys.stderr)
        return 2
    if not options.list:
        refuse_bad_places({"--json": options.json, "--plot": options.plot})
    if options.suite in (MEMORY_SUITE, *RUN_ALONE):
        if options.list:
            print(f"{options.suite}: no cases to choose from; it runs as a whole")
            return 0
        return _run_alone(options)
    cases = select_cases(options.suite, options.case)
    if not cases:
        print(
            f"None of {', '.join(options.case)} is in the suite {options.suite!r}. "
            "See: tfdp bench --list",
            file=sys.stderr,
        )
        return 2
    if options.list:
        print(format_cases(cases))
        return 0
    problem = _find_problem(options, cases)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    requests = [request for case in cases for request in _requests(options, case)]
    report = run_requests(
        requests,
        command=shlex.join(["tfdp", *sys.argv[1:]]),
        timeout_seconds=options.timeout_seconds,
        on_result=_show,
    )
    if options.json:
        write_json_for("--json", options.json, report.to_json())
    print(format_heading(report))
    return 1 if report.failures else 0


def _run_alone(options: argparse.Namespace) -> int:
    """One of the suites that are no tables of cases."""
    if options.suite == LINKS_SUITE:
        return _run_links(options)
    if options.suite == PREDICTION_SUITE:
        return _run_prediction(options)
    if options.suite == FIRST_STEP_SUITE:
        return run_first_step(
            options.devices,
            repeats=options.repeats or (1 if options.quick else 3),
            quick=options.quick,
            json_path=options.json,
            timeout_seconds=options.timeout_seconds,
        )
    if options.suite == MEMORY_SUITE:
        return run_memory(
            options.devices,
            quick=options.quick,
            json_path=options.json,
            timeout_seconds=options.timeout_seconds,
        )
    if options.suite == COMPRESSION_SUITE:
        # Only here: lists and help load no TensorFlow.
        from tfdp.bench.compression.command import run_compression

        return run_compression(
            repeats=options.repeats or (2 if options.quick else 20),
            quick=options.quick,
            json_path=options.json,
        )
    from tfdp.bench.checkpoint.command import run_checkpoint

    return run_checkpoint(
        repeats=options.repeats or (2 if options.quick else 5),
        quick=options.quick,
        json_path=options.json,
    )


def _run_links(options: argparse.Namespace) -> int:
    from tfdp.bench.links.command import run_links

    return run_links(
        repeats=options.repeats or (2 if options.quick else 20),
        quick=options.quick,
        json_path=options.json,
        plot_path=options.plot,
        timeout_seconds=options.timeout_seconds,
    )


def _run_prediction(options: argparse.Namespace) -> int:
    from tfdp.bench.prediction.command import run_prediction

    return run_prediction(
        options.link_rates,
        repeats=options.repeats or (2 if options.quick else 9),
        quick=options.quick,
        json_path=options.json,
        timeout_seconds=options.timeout_seconds,
    )


def _requests(options: argparse.Namespace, case: Case) -> list[Request]:
    """What is asked of `case`: once for each number of devices."""
    workers, numbers = options.workers, options.devices
    if case.link is not None:
        workers, numbers = 2, [case.link.devices_per_host]
    elif workers > 1:
        numbers = [options.devices_per_worker]
    return [
        Request(
            case_name=case.name,
            devices=devices,
            workers=workers,
            repeats=options.repeats or (2 if options.quick else 20),
            arms=tuple(options.arms),
            quick=options.quick,
            device_type=options.device_type,
            intra_op_threads=options.intra_op_threads,
        )
        for devices in numbers
    ]


def _find_problem(options: argparse.Namespace, cases: list[Case]) -> str | None:
    """What is wrong with options that do not fit together."""
    links = [case.name for case in cases if case.link]
    if links and (options.workers > 2 or options.devices_per_worker > 1):
        return f"{links[0]}: two hosts with their devices; leave out --workers"
    alone = [case.name for case in cases if case.work in ("epoch", "execution")]
    if alone and options.workers > 1:
        return f"{alone[0]}: in one process only; leave out --workers"
    if options.workers == 1 and not links:
        wrong = [arm for arm in options.arms if arm not in ARMS]
        return f"--arms {' '.join(wrong)}: only with --workers" if wrong else None
    if options.device_type != "cpu":
        return "--workers compares processes on CPUs: take --device-type cpu"
    for arm in options.arms:
        for case in cases:
            if arm not in GROUP_ARMS or case.work not in GROUP_ARMS[arm].works:
                return f"--arms {arm}: no arm of {case.name} with --workers"
    return None


def _show(outcome: CaseResult | Failure) -> None:
    if isinstance(outcome, Failure):
        print(format_failure(outcome), end="\n\n", file=sys.stderr, flush=True)
    else:
        print(format_result(outcome), end="\n\n", flush=True)
