"""`tfdp merge`: one ordinary Keras file from the files of several hosts."""

from __future__ import annotations

import argparse
import traceback

from tfdp.errors import ConfigurationError


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
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    from tfdp.checkpoint import merge_parts
    from tfdp.tools.commands.check_target import ENDED_ITSELF, load_build, parse_target

    build = None
    try:
        if options.model is not None:
            build = load_build(parse_target(options.model))
        path = merge_parts(options.directory, options.path, build=build)
    except SystemExit:
        # Whatever its code: 0 would report that the file was written.
        traceback.print_exc()
        raise ConfigurationError(f"nothing was merged: {ENDED_ITSELF}") from None
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    return 0
