"""Writes results as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.bench.cases import STOCK_DEFAULT, Case
from benchmarks.bench.one_process.runner import Failure, Report
from benchmarks.bench.results import (
    CaseResult,
    Spread,
    efficiency,
    relative_speed,
    spread,
)
from tfdp.tools.report.text import format_table


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
