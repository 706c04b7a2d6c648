"""`tfdp merge`: one ordinary Keras file from a checkpoint."""

from __future__ import annotations

import argparse
import os

from tfdp.errors import ConfigurationError
from tfdp.files.near import did_you_mean_path
from tfdp.strategies.quiet import import_tensorflow_quietly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "directory",
        help="a directory of tfdp.callbacks.Checkpoint or tfdp.checkpoint.Checkpoint "
        "(its newest complete checkpoint is used), or one checkpoint in it",
    )
    parser.add_argument("path", help="the file to write: .keras or .weights.h5")


def run(options: argparse.Namespace) -> int:
    """Merges, and prints the file that was written."""
    if "://" not in options.directory and not os.path.isdir(options.directory):
        raise ConfigurationError(
            f"There is no folder {options.directory}."
            f"{did_you_mean_path(options.directory, os.path.isdir)}"
        )
    import_tensorflow_quietly()
    from tfdp.checkpoint import merge_parts

    path = merge_parts(options.directory, options.path)
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    return 0
