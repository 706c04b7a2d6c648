"""The `tfdp check` command: N replicas against one device, on the user's model."""

from __future__ import annotations

import argparse
import sys
import textwrap
import traceback
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.machine import installed_versions
from tfdp.errors import TfdpError
from tfdp.files.asked_for import refuse_bad_place, write_json_for
from tfdp.progress_bar import progress_bar
from tfdp.strategies.quiet import import_tensorflow_quietly
from tfdp.strategies.unused import note_used
from tfdp.tools.commands.check_target import (
    ENDED_ITSELF,
    FORMS,
    RETURNS,
    Target,
    load_target,
    parse_target,
)

HOLDS, FAILS, NOT_CHECKED = 0, 1, 2
STRATEGIES = ("tfdp", "mirrored")
EPILOG = "\n".join(
    textwrap.fill(text, 80)
    for text in (
        f"TARGET is {FORMS}.",
        f"A function returns {RETURNS}.",
        "Exit status: 0 the check holds, or does but for batch normalization per "
        "replica, which is by design; 1 it does not; 2 nothing was checked, the check "
        "cannot tell, or the report could not be written.",
    )
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp check`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="TARGET", help="what to check; see below")
    parser.add_argument(
        "--replicas",
        type=integer_from(2),
        metavar="N",
        default=2,
        help="replicas, on as many GPUs or else logical CPUs (default: 2)",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="tfdp",
        help="tfdp.DataParallelStrategy or tf.distribute.MirroredStrategy "
        "(default: tfdp)",
    )
    parser.add_argument(
        "--steps", type=integer_from(1), metavar="S", help="training steps (default: 4)"
    )
    parser.add_argument(
        "--batch-size",
        type=integer_from(1),
        metavar="B",
        help="rows of a global batch, for arrays (default: 32)",
    )
    parser.add_argument(
        "--seed", type=integer_from(0), metavar="SEED", help="of the build (default: 0)"
    )
    parser.add_argument(
        "--keep-random-layers",
        action="store_true",
        help="leave dropout and noise on, which draw differently on every replica",
    )
    parser.add_argument("--json", metavar="PATH", help="also write the report here")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp check`; returns the exit status: 0 holds, 1 fails, 2 not checked."""
    try:
        target = parse_target(options.target)
        refuse_bad_place("--json", options.json)
        report = _check(target, options)
    except TfdpError as error:
        print(f"tfdp check: {error}", file=sys.stderr)
        return NOT_CHECKED
    except SystemExit:
        traceback.print_exc()
        print(f"tfdp check: {ENDED_ITSELF}", file=sys.stderr)
        return NOT_CHECKED
    except Exception:
        # The target's own code, on one device: its traceback says where.
        traceback.print_exc()
        print("tfdp check: the target failed on one device", file=sys.stderr)
        return NOT_CHECKED
    print(report)
    if options.json is not None:
        facts = {"target": options.target, "versions": installed_versions()}
        try:
            write_json_for("--json", options.json, {**facts, **report.to_json()})
        except TfdpError as error:
            print(f"tfdp check: {error}", file=sys.stderr)
            return NOT_CHECKED
    if report.inconclusive:
        return NOT_CHECKED
    return HOLDS if report.ok or report.is_intended else FAILS


def _check(target: Target, options: argparse.Namespace) -> Any:
    strategy = _make_devices(options.replicas)
    from tfdp.tools.testing.parity import check_parity

    found = load_target(target)
    given = {
        "steps": options.steps,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "random_layers": "keep" if options.keep_random_layers else None,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    with progress_bar("training on one device and on the replicas", 0):
        return check_parity(
            found.build,
            found.data,
            strategy(options.strategy),
            **{**found.options, **chosen},
        )


def _make_devices(replicas: int) -> Any:
    """Sets the devices up before the target can start TensorFlow's runtime.

    Returns:
      A function from the strategy's name to the strategy, for after that.
    """
    import tfdp

    import_tensorflow_quietly()
    import tensorflow as tf

    if len(tf.config.list_physical_devices("GPU")) < replicas:
        tfdp.use_virtual_devices(replicas)
        devices = [f"CPU:{i}" for i in range(replicas)]
    else:
        devices = [f"GPU:{i}" for i in range(replicas)]

    def make_strategy(name: str) -> Any:
        kinds = {
            "tfdp": tfdp.DataParallelStrategy,
            "mirrored": tf.distribute.MirroredStrategy,
        }
        note_used()  # not by a program, whose scope it would be told to use
        return kinds[name](devices)

    return make_strategy
