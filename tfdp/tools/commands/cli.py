"""The command line: `tfdp info`, `tfdp selftest`, `tfdp check`, `tfdp launch`,
`tfdp merge`, `tfdp plan`, `tfdp tune`, `tfdp measure`, `tfdp simulate`, `tfdp report`,
`tfdp bench`.

Nothing here imports TensorFlow before a command needs it, so help and lists are
instant. `python -m tfdp` and `python -m tfdp.tools.commands.cli` are the same program.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfdp._version import __version__
from tfdp.errors import TfdpError

# Name -> (module with add_arguments(parser) and run(options), one line of help).
COMMANDS = {
    "info": (
        "tfdp.tools.commands.info",
        "devices, versions and what tfdp would choose, and why",
    ),
    "selftest": (
        "tfdp.tools.selftest.command",
        "whether sums and training steps are right on this machine's devices",
    ),
    "check": (
        "tfdp.tools.commands.check",
        "whether a model trains on N replicas as on one device",
    ),
    "plan": (
        "tfdp.tools.commands.plan",
        "the memory of a training step, before it is launched",
    ),
    "tune": (
        "tfdp.tools.commands.tune",
        "which settings train a model fastest here, by short trials",
    ),
    "launch": ("tfdp.launch.command", "start the workers of one training"),
    "merge": (
        "tfdp.tools.commands.merge",
        "one Keras file from parts, or from checkpoints of a training",
    ),
    "measure": (
        "tfdp.tools.commands.measure",
        "this machine's numbers, for tfdp simulate",
    ),
    "simulate": (
        "tfdp.tools.commands.simulate",
        "how long a step takes on other hardware, and why",
    ),
    "report": ("tfdp.tools.commands.report", "what a training run did, as a page"),
    "bench": (
        "tfdp.tools.bench.command",
        "benchmarks against TensorFlow's own strategies",
    ),
}


# What no command says of its answer: that shells say of a program which wrote to nobody
# (128 + SIGPIPE), and that of a file that could not be written.
READER_LEFT, NOT_WRITTEN = 141, 2


class Parser(argparse.ArgumentParser):
    """Argparse's, which adds to an error what was meant, perhaps."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        known, rest = super().parse_known_args(args, namespace)
        self._refuse_strange_options(rest)
        self._refuse_strange_options(getattr(known, "program", None) or [])
        return known, rest

    def _refuse_strange_options(self, words: Sequence[str]) -> None:
        """Also those that came where the program should be."""
        if not words or not words[0].startswith("-") or words[0] in ("-", "--"):
            return
        given = words[0].partition("=")[0]
        if given in self.options:
            return
        self.error(f"there is no option {given}{_meant(given, self.options)}")

    def error(self, message: str) -> NoReturn:
        """Ends the program; a command that does not exist may be meant otherwise."""
        if message.endswith("required: COMMAND"):
            message += f", one of {', '.join(COMMANDS)}"
        if found := re.search(r"invalid choice: '([^']*)'", message):
            message += _meant(found[1], list(COMMANDS))
        super().error(message)

    @property
    def options(self) -> list[str]:
        """All that begins with a dash, those of the help first."""
        listed = sorted(self._actions, key=lambda a: a.help is argparse.SUPPRESS)
        return [word for action in listed for word in action.option_strings]


def _meant(given: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    return f". Did you mean {close[0]}?" if close else ""


def make_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Args:
      chosen: the command whose options are wanted: others are not imported, and know
        none of theirs. None: those of all commands.
    """
    parser = Parser(
        prog="tfdp", description="Data-parallel training for Keras 3 on TensorFlow."
    )
    parser.add_argument("--version", action="version", version=f"tfdp {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=help_line, description=f"{help_line}."
        )
        if chosen not in (None, name):
            continue
        module = importlib.import_module(module_name)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      arguments: without the program's name; None takes those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper) or stream.closed:
            continue
        if stream.errors == "strict":
            # A name that the terminal's character set lacks is written by its number.
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What stands first is the command, or an option that ends the program.
    options = make_parser(words[0] if words else "").parse_args(words)
    try:
        code = options.run(options)
        if sys.stdout is not None:  # None: closed from the beginning
            sys.stdout.flush()
        return code
    except TfdpError as error:
        print(f"tfdp: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`| head`) has left. Python would write to it once more at exit.
        _forget_output()
        return READER_LEFT
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _forget_output()
        print(f"tfdp: the answer could not be written: {error}", file=sys.stderr)
        return NOT_WRITTEN
    except KeyboardInterrupt:
        return 130


def _forget_output() -> None:
    """Has Python write what is left of the output nowhere, when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
