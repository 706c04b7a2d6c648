"""`tfdp merge`: one ordinary Keras file from the parts that several hosts wrote."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "directory", help="where tfdp.checkpoint.save_parts has written"
    )
    parser.add_argument("path", help="the file to write: .keras or .weights.h5")


def run(options: argparse.Namespace) -> int:
    """Merges, and says what was written."""
    from tfdp.checkpoint.merge import merge_parts

    path = merge_parts(options.directory, options.path)
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    return 0
