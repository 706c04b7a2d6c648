"""What to launch: a script or a module, with its arguments."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from tfdp.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Program:
    """`script.py args...` or `-m module args...`.

    >>> Program("train.py", ("--epochs", "3")).command("python")
    ['python', 'train.py', '--epochs', '3']
    >>> Program("package.train", is_module=True).command("python")
    ['python', '-m', 'package.train']
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def command(self, python: str) -> list[str]:
        """The command line that runs it with the interpreter `python`."""
        flag = ["-m"] if self.is_module else []
        return [python, *flag, self.target, *self.arguments]

    @property
    def name(self) -> str:
        """The script's file name without its ending, or the module's last part."""
        if self.is_module:
            return self.target.rpartition(".")[2]
        return pathlib.PurePath(self.target).stem

    def refuse_if_missing(self) -> None:
        """Raises ConfigurationError when the script is not a file on this machine."""
        if not self.is_module and not pathlib.Path(self.target).is_file():
            raise ConfigurationError(
                f"there is no script {self.target!r} (looked for it in "
                f"{pathlib.Path.cwd()}). For a module write -m package.module."
            )


def parse_program(words: Sequence[str], is_module: bool) -> Program:
    """The program from the words that follow the launcher's own options.

    Raises:
      ConfigurationError: when there is none.
    """
    # `tfdp launch -- script.py` ends the launcher's options by hand.
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words or (not is_module and words[0].startswith("-")):
        raise ConfigurationError(
            "no program to launch: tfdp launch [options] script.py args..., or "
            f"-m module args... Received: {' '.join(words) or 'nothing'}."
        )
    return Program(words[0], tuple(words[1:]), is_module)
