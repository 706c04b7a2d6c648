"""Compares ways to train in several processes, also over a link of limited rate.

Sums and training steps, as `bench --workers` measures them, with arms that it does not
have: see `worker_arms.py`. With a link the processes live on two hosts on this
machine: network namespaces joined by a pair of virtual cards, which needs root and
iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys

from benchmarks.bench.cases import CASES, Case
from benchmarks.bench.processes.runner import measure_groups
from benchmarks.bench.request import Request
from benchmarks.bench.tables import format_result
from benchmarks.shared import make_parser, run_script, write_report
from benchmarks.worker_arms import ARMS
from tfdp.errors import ConfigurationError
from tfdp.tools.measuring.two_hosts import two_hosts

TWO_LEVEL_ARMS = ("tfdp-sockets-flat", "tfdp-sockets", "torch-gloo-flat")
OVERLAP_ARMS = (
    "tfdp-sockets-no-overlap",
    "tfdp-sockets",
    "tfdp-sockets-small-buckets",
    "tfdp-sockets-bfloat16",
    "torch-gloo",
)
COMPRESSED_SUM_ARMS = ("tfdp-sockets", "tfdp-sockets-bfloat16", "tfdp-sockets-int8")
COMPRESSED_TRAINING_ARMS = (
    *COMPRESSED_SUM_ARMS,
    "tfdp-sockets-sign",
    "tfdp-sockets-top-k",
    "tfdp-sockets-power-sgd",
    "torch-gloo",
    "torch-gloo-float16",
    "torch-gloo-power-sgd",
)
SUM_ARMS = ("stock-multi-worker", "tfdp-sockets", "tfdp-mpi", "tfdp-tensorflow")
TRAINING_ARMS = ("one-process", "no-exchange", *SUM_ARMS, "torch-one-process")


@dataclasses.dataclass(frozen=True)
class Row:
    """What is measured.

    Args:
      case: with its arms.
      devices: replicas of each process.
      rate: of the link between the two hosts, as `tc` takes it; None: no hosts.
    """

    case: Case
    devices: int = 1
    rate: str | None = None


def _here(name: str, arms: tuple[str, ...]) -> Row:
    return Row(dataclasses.replace(CASES[name], arms=(*arms, "torch-gloo")))


def _over_link(
    what: str,
    rate: str,
    subjects: tuple[str, str],
    arms: tuple[str, ...],
    *,
    calls: int = 1,
    devices: int = 2,
    suite: str = "allreduce",
) -> Row:
    return Row(Case(f"{what}-{rate}", suite, *subjects, arms, calls, ""), devices, rate)


_over_link_in_training = functools.partial(_over_link, suite="train")
CNN, MLP, WORDS = (
    ("cnn-1m", "cnn-tiny"),
    ("mlp-20m", "mlp-tiny"),
    ("words-13m", "words-tiny"),
)
_ROWS = [
    _here("allreduce-resnet50", SUM_ARMS),
    _here("allreduce-bert-base", SUM_ARMS),
    _here("train-mlp", (*TRAINING_ARMS, "tfdp-sockets-no-overlap")),
    _here("train-cnn", (*TRAINING_ARMS, "tfdp-sockets-no-overlap")),
    _here("train-words", TRAINING_ARMS),
    _over_link("network-allreduce", "100mbit", ("cnn-1m", "tiny"), TWO_LEVEL_ARMS),
    _over_link("network-allreduce", "1gbit", ("resnet50", "tiny"), TWO_LEVEL_ARMS),
    _over_link_in_training(
        "network-train-cnn", "1gbit", CNN, OVERLAP_ARMS, calls=8, devices=1
    ),
    _over_link_in_training(
        "network-train-mlp", "1gbit", MLP, OVERLAP_ARMS, calls=2, devices=1
    ),
    _over_link_in_training(
        "network-train-words",
        "1gbit",
        WORDS,
        ("tfdp-sockets", "tfdp-sockets-bfloat16"),
        calls=4,
    ),
    _over_link(
        "network-compressed-sums", "1gbit", ("resnet50", "tiny"), COMPRESSED_SUM_ARMS
    ),
    _over_link_in_training(
        "network-compressed-mlp",
        "1gbit",
        MLP,
        COMPRESSED_TRAINING_ARMS,
        calls=2,
        devices=1,
    ),
]
ROWS = {row.case.name: row for row in _ROWS}


def run(options: argparse.Namespace) -> int:
    """Prints a table for each case; returns 1 where an arm failed."""
    rows = [ROWS[name] for name in options.case]
    _refuse_arms_that_cannot(options.arms, rows)
    results, failed = [], 0
    for row in rows:
        arms = tuple(options.arms) or row.case.arms
        request = Request(
            row.case,
            devices=row.devices,
            workers=2,
            repeats=options.repeats,
            arms=arms,
            quick=options.quick,
        )
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(two_hosts(row.rate)) if row.rate else None
            result, failures = measure_groups(
                request, options.timeout_seconds, hosts=hosts
            )
        for arm, reason in failures.items():
            failed = 1
            print(f"{row.case.name}, {arm}: FAILED: {reason}", file=sys.stderr)
        if result is not None:
            settings = {
                **result.settings,
                "reference_arms": [arms[0] if row.rate else "torch-gloo"],
                **({"link_rate": row.rate} if row.rate else {}),
            }
            result = dataclasses.replace(result, settings=settings)
            print(format_result(result), end="\n\n", flush=True)
            results.append(result.to_json())
    write_report(options.json, "workers", results=results)
    return failed


def _refuse_arms_that_cannot(arms: list[str], rows: list[Row]) -> None:
    for row in rows:
        for arm in arms:
            if row.case.suite not in ARMS[arm].works:
                raise ConfigurationError(f"--arms {arm}: no arm of {row.case.name}.")


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=20)
    parser.add_argument(
        "--case",
        nargs="+",
        choices=ROWS,
        metavar="CASE",
        default=list(ROWS),
        help=f"only these of: {', '.join(ROWS)}; those of network-... need root",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        metavar="ARM",
        default=[],
        help=f"in place of a case's own: {', '.join(ARMS)}",
    )
    run_script(parser, run)
