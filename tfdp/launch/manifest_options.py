"""The options of `tfdp launch --kubernetes` that no other way to start knows."""

from __future__ import annotations

import argparse

from tfdp.errors import ConfigurationError

__all__ = ["add_manifest_arguments", "refuse_words_of_manifests"]


def add_manifest_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares them."""
    parser.add_argument(
        "--jobset", action="store_true", help="with --kubernetes: a JobSet, not a Job"
    )
    parser.add_argument(
        "--gpus",
        type=_count,
        default=0,
        metavar="G",
        help="with --kubernetes: GPUs to ask for, for each worker",
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="with --kubernetes: a PersistentVolumeClaim, and where workers see it",
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"out of range: {text}")
    return number


def refuse_words_of_manifests(options: argparse.Namespace) -> None:
    """Where no manifest is written.

    Raises:
      ConfigurationError: when one of them is given.
    """
    for name, is_given, instead in (
        ("--jobset", options.jobset, "It is a kind of manifest."),
        ("--gpus", options.gpus, "Workers take the GPUs that there are."),
        ("--volume", options.volume, "Workers see the files of their machine."),
    ):
        if is_given:
            raise ConfigurationError(
                f"{name} has no effect without --kubernetes IMAGE. {instead}"
            )
