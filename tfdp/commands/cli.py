"""The command line: `tfdp info`, `tfdp check`, `tfdp launch`, `tfdp merge`,
`tfdp bench`.

Nothing here imports TensorFlow before a command needs it, so help and lists are
instant. `python -m tfdp` and `python -m tfdp.commands.cli` are the same program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tfdp._version import __version__
from tfdp.bench import command as bench_command
from tfdp.commands import check as check_command
from tfdp.commands import info as info_command
from tfdp.commands import merge
from tfdp.errors import TfdpError
from tfdp.launch import command as launch_command

__all__ = ["main", "make_parser"]

# Name -> (module with add_arguments(parser) and run(options), one line of help).
COMMANDS = {
    "info": (info_command, "devices, versions and what tfdp would choose, and why"),
    "check": (check_command, "whether a model trains on N replicas as on one device"),
    "launch": (launch_command, "start the workers of one training"),
    "merge": (merge, "one file from the parts that several hosts have saved"),
    "bench": (bench_command, "benchmarks against TensorFlow's own strategies"),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tfdp", description="Data-parallel training for Keras 3 on TensorFlow."
    )
    parser.add_argument("--version", action="version", version=f"tfdp {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=help_line, description=f"{help_line}."
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      arguments: without the program's name; None takes those of the process.
    """
    options = make_parser().parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except TfdpError as error:
        print(f"tfdp: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`| head`) has left. Python would write to it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
