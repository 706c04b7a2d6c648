"""The program to launch: a script or a module, with its arguments."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from tfdp.errors import ConfigurationError
from tfdp.files.near import did_you_mean_path, is_script


@dataclasses.dataclass(frozen=True)
class Program:
    """`script.py args...` or `-m module args...`.

    `obeys_keras`: the strategy is that of its `keras.distribution`.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    obeys_keras: bool = False

    def command(self, python: str) -> list[str]:
        runner = ["-m", "tfdp.launch.obeying"] if self.obeys_keras else []
        flag = ["-m"] if self.is_module else []
        return [python, *runner, *flag, self.target, *self.arguments]

    @property
    def name(self) -> str:
        """The script's file name without suffix, or the module's last part."""
        if self.is_module:
            return self.target.rpartition(".")[2]
        return pathlib.PurePath(self.target).stem

    def check_exists(self) -> None:
        if not self.is_module and not pathlib.Path(self.target).is_file():
            raise ConfigurationError(
                f"there is no script {self.target!r} (looked in {pathlib.Path.cwd()})."
                f"{did_you_mean_path(self.target, is_script)} For a module write -m "
                "package.module."
            )


def parse_program(words: Sequence[str], is_module: bool) -> Program:
    """The program from the words after the launcher's own options."""
    # `tfdp launch -- script.py` ends the launcher's options explicitly.
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words or (not is_module and words[0].startswith("-")):
        raise ConfigurationError(
            "no program to launch: tfdp launch [options] script.py args..., or "
            f"-m module args... Received: {' '.join(words) or 'nothing'}."
        )
    return Program(words[0], tuple(words[1:]), is_module)
