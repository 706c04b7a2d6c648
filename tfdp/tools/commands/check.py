"""The `tfdp check` command: N replicas against one device, on the user's model."""

from __future__ import annotations

import argparse
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.machine import installed_versions
from tfdp.files.asked_for import check_output_path, write_json_for
from tfdp.strategies.quiet import import_tensorflow_quietly
from tfdp.strategies.unused import note_used
from tfdp.tools.commands import check_target
from tfdp.tools.processes.devices import find_devices

HOLDS, FAILS, FAILED = 0, 1, 2
STRATEGIES = ("tfdp", "mirrored")
DEFAULT_STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp check`."""
    check_target.end_help(
        parser,
        f"TARGET is {check_target.FORMS}. {check_target.RUN}",
        f"A function returns {check_target.RETURNS}.",
        "Exit status: 0 the check holds, or holds except for batch normalization per "
        "replica, which is by design; 1 it fails; 2 nothing was checked, the check is "
        "inconclusive, or the report could not be written.",
    )
    add, count = parser.add_argument, integer_from(1)
    add("target", metavar="TARGET", help="what to check; see below")
    add(
        "--replicas",
        type=integer_from(2),
        metavar="N",
        default=2,
        help="one per GPU, or else per logical CPU (default: 2)",
    )
    default = "(default: tfdp)"
    add("--strategy", choices=STRATEGIES, default="tfdp", help=default)
    add("--steps", type=count, metavar="S", help="training steps (default: 4)")
    rows = "rows of a global batch, for arrays (default: that of the script, or 32)"
    add("--batch-size", type=count, metavar="B", help=rows)
    add("--seed", type=integer_from(0), metavar="SEED", help="of build() (default: 0)")
    random = "keep dropout and noise, which draw differently on every replica"
    add("--keep-random-layers", action="store_true", help=random)
    add("--json", metavar="PATH", help="also write the report to this file")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp check`; returns the exit status: 0 holds, 1 fails, 2 inconclusive."""
    target = check_target.parse_target(options.target, options.arguments)
    check_output_path("--json", options.json)
    check_target.check_module(target)
    with check_target.errors_of_target("the target failed on one device"):
        report = _check(target, options)
    print(report)
    if options.json is not None:
        facts = {"target": options.target, "versions": installed_versions()}
        write_json_for("--json", options.json, {**facts, **report.to_json()})
    if report.inconclusive:
        return FAILED
    return HOLDS if report.ok or report.is_intended else FAILS


def _check(target: check_target.Target, options: argparse.Namespace) -> Any:
    devices = _make_devices(options.replicas)
    import tensorflow as tf

    import tfdp
    from tfdp.tools.testing.parity import check_parity
    from tfdp.tools.testing.stages import printed_stages

    def ours() -> Any:
        strategy = tfdp.DataParallelStrategy(devices)
        # As under `auto_strategy`: a `sync` between hosts does nothing here.
        strategy.idle_options = {}
        return strategy

    steps = options.steps or DEFAULT_STEPS
    script_run = check_target.ScriptRun(ours, options.replicas, steps)
    with check_target.errors_of_target(f"{options.target} could not be loaded"):
        found = check_target.load_target(target, script_run)
    keywords = dict(found.options)
    for name in ("steps", "batch_size", "seed"):
        if (value := getattr(options, name)) is not None:
            keywords[name] = value
    if options.keep_random_layers:
        keywords["random_layers"] = "keep"
    with printed_stages("tfdp check"):
        is_stock = options.strategy == "mirrored"
        replicated = tf.distribute.MirroredStrategy(devices) if is_stock else ours()
        return check_parity(found.build, found.data, replicated, **keywords)


def _make_devices(replicas: int) -> list[str]:
    """Configures devices before the target starts TensorFlow."""
    import_tensorflow_quietly()
    devices = find_devices(replicas)
    note_used()  # suppresses the warning about a strategy without a scope
    return devices
