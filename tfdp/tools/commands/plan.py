"""The `tfdp plan` command: whether a training fits in memory, before its launch."""

from __future__ import annotations

import argparse
import pathlib
from functools import partial
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.machine import installed_versions
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_paths, write_json_for, write_text_for
from tfdp.plan.options import OPTIONS, SHARD_STAGES
from tfdp.plan.shards import Sharding
from tfdp.plan.sizes import bytes_of
from tfdp.progress_bar import progress_bar
from tfdp.strategies.quiet import NOT_NEEDED_FOR_A_STEP, import_tensorflow_quietly
from tfdp.strategies.unused import note_used
from tfdp.tools.commands.check_target import Target, end_help, errors_of_target
from tfdp.tools.commands.plan_model import (
    BATCH_HELP,
    FORMS,
    check_model,
    load_model,
    parse_model,
)
from tfdp.tools.report.plots import require_matplotlib

FITS, DOES_NOT_FIT, FAILED = 0, 1, 2
# Those of `tfdp.remat`, whose import would load TensorFlow.
POLICIES = ("each", "segments", "whole")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp plan`."""
    end_help(
        parser,
        f"MODEL is {FORMS}",
        "Exit status: 0 it fits, or no memory was given; 1 it does not, or a rule of a "
        "layout has a fault; 2 nothing was planned, or a file could not be written.",
    )
    add = parser.add_argument
    count = partial(parser.add_argument, type=integer_from(1))
    add("model", metavar="MODEL", help="what to plan; see below")
    count("--batch", metavar="N", help=BATCH_HELP)
    add("--memory", metavar="SIZE", help="of one replica, such as 16GB")
    count("--replicas", metavar="R", default=1, help="per host (default: 1)")
    count("--hosts", metavar="H", default=1, help="(default: 1)")
    shard = OPTIONS["shard"].default
    stages = f"{', '.join(SHARD_STAGES)}, or 0 to 3 (default: {shard})"
    add("--shard", default=shard, metavar="WHAT", help=stages)
    offload = "keep the sharded optimizer state in the host's memory"
    add("--offload", action="store_true", help=offload)
    add("--remat", action="store_true", help="with tfdp.remat(model), layer by layer")
    add(
        "--remat-policy",
        dest="remat",
        metavar="POLICY",
        choices=POLICIES,
        help=f"with tfdp.remat(model, POLICY): {', '.join(POLICIES)}",
    )
    layout = "the weights that each rule of the script's layout= meets, and cuts"
    add("--layout", action="store_true", help=layout)
    quick = "this setting only: no largest batch, no alternatives"
    add("--quick", action="store_true", help=quick)
    add("--json", metavar="PATH", help="also write the plan to this file")
    add("--page", metavar="PATH", help="also draw it, as an HTML page")


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp plan`; returns the exit status: 0 fits, 1 does not."""
    memory_bytes = None if options.memory is None else bytes_of(options.memory)
    sharding = _sharding(options)
    check_output_paths({"--json": options.json, "--page": options.page})
    if options.page is not None:
        require_matplotlib()
    target = parse_model(options.model, options.arguments, options.batch)
    check_model(target)
    with errors_of_target("the model's step could not be traced"):
        try:
            answer = _answer(options, target, sharding, memory_bytes)
        except MemoryError as error:
            raise ConfigurationError(
                f"such a batch does not fit here: {error}"
            ) from None
    answer.print()
    if options.json is not None:
        document = {"versions": installed_versions(), **answer.to_json()}
        write_json_for("--json", options.json, document)
    if options.page is not None:
        write_text_for("--page", options.page, answer.page())
        print(f"page with charts: {pathlib.Path(options.page).absolute()}")
    return DOES_NOT_FIT if answer.fits is False else FITS


def _answer(
    options: argparse.Namespace,
    target: Target | str,
    sharding: Sharding,
    memory_bytes: int | None,
) -> Any:
    import_tensorflow_quietly(without=NOT_NEEDED_FOR_A_STEP)
    from tfdp._private.first_fit import noted_layout, noted_pipeline
    from tfdp.tools.commands.plan_layout import loading_layouts, table_of_script
    from tfdp.tools.planning.answer import Answer
    from tfdp.tools.planning.planner import Planner, have_devices
    from tfdp.tools.planning.ways import largest_batch, settings_to_try, ways_to_fit

    note_used()  # suppresses the warning about a strategy without a scope
    have_devices(options.replicas, is_offloading=sharding.offloads)
    replicas = options.replicas * options.hosts
    with errors_of_target(f"{options.model} could not be loaded"):
        with loading_layouts(target, replicas) as refused:
            build, batch = load_model(target, options.batch, replicas)
            if options.layout or noted_layout() is not None:
                _check_table_options(options, "layout=", "weights")
                return table_of_script(options.model, build, batch, refused)
    pipeline = noted_pipeline()
    if pipeline is not None:
        import tensorflow as tf

        from tfdp.tools.planning.stages import stage_table

        _check_table_options(options, "tfdp.pipeline", "stages")
        rows = tf.nest.flatten(batch)[0].shape[0]
        return stage_table(options.model, *pipeline, rows, replicas)
    planner = Planner(
        build,
        batch,
        replicas=options.replicas,
        hosts=options.hosts,
        shard=sharding,
        any_rows=memory_bytes is not None and not options.quick,
    )
    remat = options.remat
    limit = None if options.quick else memory_bytes
    # The requested one, those for the largest batch, and the ways to need less.
    count = 1 if limit is None else 2 + len(settings_to_try(planner, remat))
    settings = "1 setting" if count == 1 else f"{count} settings"
    with progress_bar(f"planning {settings}", count) as advance:
        plan = planner.at(planner.local_rows, remat=remat, memory_bytes=memory_bytes)
        advance(1)
        largest, ways = None, []
        if limit is not None:
            largest = largest_batch(planner, limit, remat=remat)
            advance(1)
            if not plan.fits:
                ways = list(ways_to_fit(planner, limit, advance, remat))
    return Answer(options.model, plan, largest, ways)


def _check_table_options(options: argparse.Namespace, what: str, of: str) -> None:
    for name, value in {"--page": options.page, "--memory": options.memory}.items():
        if value is not None:
            raise ConfigurationError(
                f"{name} is about the memory of a step, which is not planned for a "
                f"script with {what}. Leave it out; --json writes the table of {of}."
            )


def _sharding(options: argparse.Namespace) -> Sharding:
    numbers = {str(stage): stage for stage in range(len(SHARD_STAGES))}
    offload = "optimizer" if options.offload else "none"
    return Sharding(numbers.get(options.shard, options.shard), offload=offload)
