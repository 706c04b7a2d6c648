"""The `tfdp` command line: `info`, `selftest`, `check`, `plan`, `tune`, `launch` ...

Only the chosen command is imported, and no TensorFlow for help: both are instant.
`python -m tfdp` and `python -m tfdp.tools.commands.cli` are the same program.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfdp._version import __version__
from tfdp.checks import did_you_mean
from tfdp.errors import TfdpError
from tfdp.tools.commands.end_of_process import leave

# Name -> (module with add_arguments(parser) and run(options), one line of help). FAILED
# of the module is the exit code where `run` raises; else 1.
_HERE = "tfdp.tools.commands"
COMMANDS = {
    "info": (f"{_HERE}.info", "devices, versions and what tfdp would choose, and why"),
    "selftest": (
        "tfdp.tools.selftest.command",
        "checks sums and steps on this machine",
    ),
    "check": (
        f"{_HERE}.check",
        "whether a model trains on N replicas as on one device",
    ),
    "plan": (f"{_HERE}.plan", "the memory of a training step, before it is launched"),
    "tune": (f"{_HERE}.tune", "the settings that train a model fastest, by trials"),
    "launch": ("tfdp.launch.command", "start the workers of one training"),
    "merge": (f"{_HERE}.merge", "one Keras file from parts or from checkpoints"),
    "measure": (f"{_HERE}.measure", "this machine's numbers, for tfdp simulate"),
    "simulate": (f"{_HERE}.simulate", "how long steps take on other hardware, and why"),
    "report": (f"{_HERE}.report", "what a training run did, as a page"),
}
# These take a script's own arguments after --.
TAKE_SCRIPTS = ("check", "info", "plan", "tune")
# Exit codes: 128 + SIGPIPE, as shells report it, and output that cannot be written.
READER_LEFT, NOT_WRITTEN = 141, 2
# A longer usage would hide the error below it.
MOST_USAGE_LINES = 8
# argparse's own message.
INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Adds suggestions to argparse's errors."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        known, rest = super().parse_known_args(args, namespace)
        self._reject_unknown_option(rest)
        # `tfdp launch` collects the words after its options in `program`.
        self._reject_unknown_option(getattr(known, "program", None) or [])
        return known, rest

    def _reject_unknown_option(self, words: Sequence[str]) -> None:
        if not words or not words[0].startswith("-") or words[0] in ("-", "--"):
            return
        given = words[0].partition("=")[0]
        if given in self.options:
            return
        hint = did_you_mean(given, self.options)
        self.error(f"there is no option {given}{'.' if hint else ''}{hint}")

    def error(self, message: str) -> NoReturn:
        """Adds the possible commands, or the nearest choice, to the message."""
        if message.endswith("required: COMMAND"):
            message += f", one of {', '.join(COMMANDS)}"
        if found := INVALID_CHOICE.search(message):
            # Python 3.12 and later give the choices without quotes.
            choices = found[2].replace("'", "").split(", ")
            hint = did_you_mean(found[1], choices)
            message += f"{'.' if hint else ''}{hint}"
        if self.format_usage().count("\n") > MOST_USAGE_LINES:
            self.usage = "%(prog)s [options] (%(prog)s --help lists them)"
        super().error(message)

    @property
    def options(self) -> list[str]:
        listed = sorted(self._actions, key=lambda a: a.help is argparse.SUPPRESS)
        return [word for action in listed for word in action.option_strings]


def make_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser; only `chosen`, or all commands with None, get their options."""
    what = "Data-parallel training for Keras 3 on TensorFlow."
    parser = Parser(prog="tfdp", description=what)
    parser.add_argument("--version", action="version", version=f"tfdp {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, help_line) in COMMANDS.items():
        text = f"{help_line}."
        subparser = subparsers.add_parser(name, help=help_line, description=text)
        if chosen not in (None, name):
            continue
        module = importlib.import_module(module_name)
        module.add_arguments(subparser)
        failed = getattr(module, "FAILED", 1)
        subparser.set_defaults(run=module.run, command=name, failed=failed)
    return parser


MORE_FILES = "raise the limit of open files and sockets (ulimit -n 4096)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: the process's) and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper) or stream.closed:
            continue
        if stream.errors == "strict":
            # Escapes characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:  # `tfdp help`, `tfdp help plan`
        words = [*words[1:], "--help"]
    # The first word is the command, or an option such as --help that exits.
    command = words[0] if words else ""
    arguments_of_script: list[str] = []
    if command in TAKE_SCRIPTS and "--" in words:
        place = words.index("--")
        words, arguments_of_script = words[:place], words[place + 1 :]
    options = make_parser(command).parse_args(words)
    options.arguments = arguments_of_script
    try:
        code = options.run(options)
        if sys.stdout is not None:  # None: closed from the beginning
            sys.stdout.flush()
        return code
    except TfdpError as error:
        print(f"tfdp {options.command}: {error}", file=sys.stderr)
        return options.failed
    except BrokenPipeError:
        # The reader (`| head`) has exited; at exit Python would write to it again.
        _discard_output()
        return READER_LEFT
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            print(f"tfdp {options.command}: {error}: {MORE_FILES}", file=sys.stderr)
            return options.failed
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _discard_output()
        print(f"tfdp: the answer could not be written: {error}", file=sys.stderr)
        return NOT_WRITTEN
    except KeyboardInterrupt:
        return 130


def _discard_output() -> None:
    """Redirects the output that Python flushes at exit to /dev/null."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> NoReturn:
    """The `tfdp` command: `main`, and the end of the process."""
    leave(main())


if __name__ == "__main__":
    run()
