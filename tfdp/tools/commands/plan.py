"""The `tfdp plan` command: whether a training fits, before it is launched."""

from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap
import traceback
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.machine import installed_versions
from tfdp.errors import TfdpError
from tfdp.files.asked_for import refuse_bad_places, write_json_for, write_text_for
from tfdp.plan.shards import SHARD_STAGES, Sharding
from tfdp.progress_bar import progress_bar
from tfdp.strategies.quiet import NOT_NEEDED_FOR_A_STEP, import_tensorflow_quietly
from tfdp.tools.commands.check_target import ENDED_ITSELF
from tfdp.tools.commands.plan_model import FORMS, bytes_of, load_model

FITS, DOES_NOT_FIT, NOT_PLANNED = 0, 1, 2
EPILOG = "\n".join(
    textwrap.fill(text, 80)
    for text in (
        f"MODEL is {FORMS}.",
        "Exit status: 0 it fits, or no memory was given; 1 it does not; 2 nothing was "
        "planned, or what was asked for could not be written.",
    )
)

# Of `tfdp.remat`, which loads TensorFlow.
POLICIES = ("each", "segments", "whole")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp plan`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="what to plan; see below")
    parser.add_argument(
        "--batch",
        type=integer_from(1),
        metavar="N",
        required=True,
        help="rows of the global batch, of all replicas together",
    )
    parser.add_argument("--memory", metavar="SIZE", help="of one replica, such as 16GB")
    parser.add_argument(
        "--replicas",
        type=integer_from(1),
        metavar="R",
        default=1,
        help="per host (default: 1)",
    )
    parser.add_argument(
        "--hosts", type=integer_from(1), metavar="H", default=1, help="(default: 1)"
    )
    parser.add_argument(
        "--device-type",
        choices=("GPU", "CPU"),
        help="deprecated, and without effect",
    )
    parser.add_argument(
        "--shard",
        default="none",
        metavar="WHAT",
        help=f"{', '.join(SHARD_STAGES)}, or 0 to 3 (default: none)",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="the sharded state of the optimizer stays in the memory of the host",
    )
    parser.add_argument(
        "--remat", action="store_true", help="with tfdp.remat(model), layer by layer"
    )
    parser.add_argument(
        "--remat-policy",
        dest="remat",
        metavar="POLICY",
        choices=POLICIES,
        help=f"with tfdp.remat(model, POLICY): {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="this setting alone: no largest batch, no other ways",
    )
    parser.add_argument("--json", metavar="PATH", help="also write the plan here")
    parser.add_argument("--page", metavar="PATH", help="also draw it, as an HTML page")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp plan`; returns the exit status: 0 fits, 1 does not, 2 not planned."""
    if options.device_type is not None:
        print(
            "tfdp plan: --device-type is deprecated and has no effect: replicas on "
            "CPUs need what replicas on GPUs need",
            file=sys.stderr,
        )
    try:
        memory_bytes = None if options.memory is None else bytes_of(options.memory)
        sharding = _sharding(options)
        refuse_bad_places({"--json": options.json, "--page": options.page})
        answer = _answer(options, sharding, memory_bytes)
    except TfdpError as error:
        print(f"tfdp plan: {error}", file=sys.stderr)
        return NOT_PLANNED
    except SystemExit:
        traceback.print_exc()
        print(f"tfdp plan: {ENDED_ITSELF}", file=sys.stderr)
        return NOT_PLANNED
    except _NotLoaded:
        traceback.print_exc()
        print(f"tfdp plan: {options.model} could not be loaded", file=sys.stderr)
        return NOT_PLANNED
    except MemoryError as error:
        print(f"tfdp plan: such a batch cannot be made here: {error}", file=sys.stderr)
        return NOT_PLANNED
    except Exception:
        # The target's own code: its traceback says where.
        traceback.print_exc()
        print("tfdp plan: the model's step could not be traced", file=sys.stderr)
        return NOT_PLANNED
    answer.print()
    try:
        _write(answer, options)
    except TfdpError as error:
        print(f"tfdp plan: {error}", file=sys.stderr)
        return NOT_PLANNED
    return DOES_NOT_FIT if answer.plan.fits is False else FITS


class _NotLoaded(Exception):
    """The target's own code has failed before there was a model."""


def _write(answer: Any, options: argparse.Namespace) -> None:
    if options.json is not None:
        document = {"versions": installed_versions(), **answer.to_json()}
        write_json_for("--json", options.json, document)
    if options.page is not None:
        write_text_for("--page", options.page, answer.page())
        print(f"the plan in pictures: {pathlib.Path(options.page).absolute()}")


def _answer(
    options: argparse.Namespace, sharding: Sharding, memory_bytes: int | None
) -> Any:
    import_tensorflow_quietly(without=NOT_NEEDED_FOR_A_STEP)
    from tfdp.tools.planning.answer import Answer
    from tfdp.tools.planning.planner import Planner, have_devices
    from tfdp.tools.planning.ways import largest_batch, ways_to_fit

    have_devices(options.replicas, is_offloading=sharding.offloads)
    try:
        build, batch = load_model(options.model, options.batch)
    except TfdpError:
        raise
    except Exception as error:
        raise _NotLoaded(f"{type(error).__name__}: {error}") from error
    planner = Planner(
        build,
        batch,
        replicas=options.replicas,
        hosts=options.hosts,
        shard=sharding,
        any_rows=memory_bytes is not None and not options.quick,
    )
    rows, remat = planner.local_rows, options.remat
    with progress_bar("tracing the step", 0):
        plan = planner.at(rows, remat=remat, memory_bytes=memory_bytes)
        largest, ways = None, []
        if memory_bytes is not None and not options.quick:
            largest = largest_batch(planner, memory_bytes, remat=remat)
            if not plan.fits:
                ways = list(ways_to_fit(planner, memory_bytes))
    return Answer(options.model, plan, largest, ways)


def _sharding(options: argparse.Namespace) -> Sharding:
    numbers = {str(stage): stage for stage in range(len(SHARD_STAGES))}
    offload = "optimizer" if options.offload else "none"
    return Sharding(numbers.get(options.shard, options.shard), offload=offload)
