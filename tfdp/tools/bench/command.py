"""The `tfdp bench` command."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial

from tfdp.checks import integer_from
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_path, write_json_for
from tfdp.tools.bench.cases import (
    CASES,
    SCRIPTS,
    STOCK_DEFAULT,
    SUITES,
    Case,
    select_cases,
)
from tfdp.tools.bench.one_process.arms import ARMS
from tfdp.tools.bench.one_process.runner import Failure, Report, run_requests
from tfdp.tools.bench.processes.arms import GROUP_ARMS
from tfdp.tools.bench.request import Request
from tfdp.tools.bench.results import (
    CaseResult,
    Spread,
    efficiency,
    relative_speed,
    spread,
)
from tfdp.tools.report.text import format_table

FAILED = 2  # the exit code for invalid options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp bench`."""
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
    known = _name_among(SUITES)
    add("suite", nargs="?", choices=SUITES, type=known, help=suites)
    add("--list", action="store_true", help="list the cases and stop")
    add = partial(add, nargs="+")
    known, only = _name_among(CASES), "only these cases"
    add("--case", choices=CASES, type=known, metavar="CASE", help=only)
    arms = dict.fromkeys([*ARMS, *GROUP_ARMS])
    instead = (
        f"compare these instead of a case's own: {', '.join(ARMS)}; with --workers: "
        f"{', '.join(GROUP_ARMS)}"
    )
    known = _name_among(arms)
    add("--arms", choices=arms, type=known, metavar="ARM", default=(), help=instead)


def _name_among(known: Collection[str]) -> Callable[[str], str]:
    """Points to the script that measures a name that is not `known`."""

    def checked(name: str) -> str:
        for start, script in SCRIPTS.items():
            if name.startswith(start) and name not in known:
                raise argparse.ArgumentTypeError(
                    f"tfdp bench does not measure {name!r}: a script does, in tfdp's "
                    f"repository. There run: python -m benchmarks.{script} --help"
                )
        return name

    return checked


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp bench`; returns 1 if a case failed. Invalid options raise."""
    cases = select_cases(options.suite, options.case)
    if not cases:
        raise ConfigurationError(
            f"none of {', '.join(options.case)} is in the suite {options.suite!r}. "
            "See: tfdp bench --list"
        )
    if options.list:
        print(format_cases(cases))
        return 0
    check_output_path("--json", options.json)
    _check_options(options, cases)
    report = run_requests(
        [request for case in cases for request in _requests(options, case)],
        command=shlex.join(["tfdp", *sys.argv[1:]]),
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


def format_cases(cases: Sequence[Case]) -> str:
    """The table that `--list` prints."""
    rows = [("case", "what it measures", "arms")]
    rows += [(case.name, case.description, ", ".join(case.arms)) for case in cases]
    return format_table(rows)


def format_heading(report: Report) -> str:
    """Machine, versions and command that the figures belong to."""
    machine = report.machine
    memory = machine["memory_bytes"]
    memory_text = f", {memory / 2**30:.0f} GiB" if memory else ""
    versions = ", ".join(f"{name} {text}" for name, text in report.versions.items())
    return "\n".join(
        [
            f"machine   {machine['processor']}, {machine['usable_cores']} usable "
            f"cores{memory_text}, {machine['system']}",
            f"versions  {versions}",
            f"command   {report.command}",
            f"date      {report.date}",
        ]
    )


def format_result(result: CaseResult) -> str:
    """One case: a line per arm with its median, spread and ratios.

    Brackets hold the quartiles.
    """
    settings = result.settings
    if "local_batch" in result.subject:
        unit = "images/s"
        figures = {n: spread(arm.items_per_second) for n, arm in result.arms.items()}
    else:
        unit = "ms"
        figures = {
            n: spread([1000 * seconds for seconds in arm.seconds])
            for n, arm in result.arms.items()
        }
    wanted = [STOCK_DEFAULT, result.best_stock, *settings.get("reference_arms", ())]
    references = [name for name in dict.fromkeys(wanted) if name in result.arms]
    ratio_titles = [f"times as fast as {reference}" for reference in references]
    efficiencies = efficiency(result)
    if efficiencies:
        ratio_titles.append("efficiency")
    is_counted = any("sent_bytes_per_call" in arm.facts for arm in result.arms.values())
    if is_counted:
        ratio_titles.append("MB sent per host")
    rows = [("arm", unit, "min .. max", *ratio_titles)]
    for name, figure in figures.items():
        ratios = [_ratio(result, name, reference) for reference in references]
        if efficiencies:
            own = efficiencies.get(name)
            text = _with_quartiles(spread(own), "{:.2f}".format) if own else ""
            ratios.append(text)
        if is_counted:
            sent = result.arms[name].facts["sent_bytes_per_call"]
            ratios.append(_number(max(sent) / 1e6))
        middle = _with_quartiles(figure, _number)
        span = f"{_number(figure.minimum)} .. {_number(figure.maximum)}"
        rows.append((name, middle, span, *ratios))
    notes = [f"left out: {reason}" for reason in result.left_out.values()]
    if "load_before_and_after" in settings:
        before, after = settings["load_before_and_after"]
        notes.append(f"load of the machine before {before:.1f}, after {after:.1f}")
    return "\n".join([_title(result), format_table(rows), *notes])


def format_failure(failure: Failure) -> str:
    """A case, or an arm of it, without figures."""
    arm = f", {failure.arm}" if failure.arm else ""
    return f"{failure.case}{arm}, {failure.devices} devices: FAILED: {failure.reason}"


def _title(result: CaseResult) -> str:
    subject, settings = result.subject, result.settings
    sizes = f"{subject['parameters']:,} parameters"
    if "tensors" in subject:
        megabytes = subject["bytes_per_replica"] / 1e6
        sizes = f"{subject['tensors']} tensors, {sizes}, {megabytes:.4g} MB a replica"
    workers = f" in {settings['workers']} processes" if "workers" in settings else ""
    if "link_rate" in settings:
        workers = f" on {settings['workers']} hosts, a link of {settings['link_rate']}"
    return (
        f"{result.case}, {result.devices} {settings['device_type'].upper()} devices"
        f"{workers}: "
        f"{subject['name']}, {sizes}; median of {settings['repeats']} repeats of "
        f"{settings['calls_per_repeat']} calls"
    )


def _ratio(result: CaseResult, name: str, reference: str) -> str:
    if name == reference:
        return "1"
    ratio = spread(relative_speed(result.arms[name], result.arms[reference]))
    return _with_quartiles(ratio, "{:.2f}".format)


def _with_quartiles(figure: Spread, show: Callable[[float], str]) -> str:
    quartiles = f"({show(figure.lower_quartile)} .. {show(figure.upper_quartile)})"
    return f"{show(figure.median)} {quartiles}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
