"""`tfdp merge`: one ordinary Keras file from the files of several hosts."""

from __future__ import annotations

import argparse
import os
import traceback

from tfdp.errors import ConfigurationError
from tfdp.files.near import did_you_mean_path
from tfdp.strategies.quiet import import_tensorflow_quietly
from tfdp.tools.commands.check_target import ENDED_ITSELF, load_build, parse_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "directory",
        help="a directory of tfdp.checkpoint.save_parts, of tfdp.callbacks.Checkpoint "
        "(its newest complete checkpoint is used), or one checkpoint in it",
    )
    parser.add_argument("path", help="the file to write: .keras or .weights.h5")
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="builds the model, where a checkpoint does not describe it: "
        "path/to/script.py that defines build_model(), path/to/script.py:function or "
        "package.module:function",
    )


def run(options: argparse.Namespace) -> int:
    """Merges, and prints the file that was written."""
    target = None if options.model is None else parse_target(options.model)
    if "://" not in options.directory and not os.path.isdir(options.directory):
        raise ConfigurationError(
            f"There is no folder {options.directory}."
            f"{did_you_mean_path(options.directory, os.path.isdir)}"
        )
    import_tensorflow_quietly()
    from tfdp.checkpoint import merge_parts

    build = None
    try:
        if target is not None:
            build = load_build(target)
        path = merge_parts(options.directory, options.path, build=build)
    except SystemExit:
        # Whatever its code: 0 would report that the file was written.
        traceback.print_exc()
        raise ConfigurationError(f"nothing was merged: {ENDED_ITSELF}") from None
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    return 0
