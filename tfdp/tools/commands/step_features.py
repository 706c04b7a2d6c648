"""`tfdp info --step SCRIPT`: what each feature of tfdp does in a script's training."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdp.errors import ConfigurationError
from tfdp.files.near import did_you_mean_path, is_script
from tfdp.step.watch_features import watch_features
from tfdp.tools.commands.end_of_process import leave
from tfdp.tools.commands.script_fit import as_main_program, ended_itself


def print_features(path: str, arguments: Sequence[str], *, as_json: bool) -> NoReturn:
    """Runs a script until tfdp has traced its first step that updates weights, prints
    what each feature does in it, and ends the process.

    Raises:
      ConfigurationError: there is no such script, or it ended without such a step.
      Exception: what the script raised.
    """
    if not pathlib.Path(path).is_file():
        hint = did_you_mean_path(path, is_script)
        raise ConfigurationError(f"There is no script {path!r} for --step.{hint}")

    def tell(replicas: int, features: list[dict[str, Any]]) -> None:
        if as_json:
            text = json.dumps(features, indent=1)
        else:
            title = f"First training step of {path}, {replicas} replica(s)"
            text = f"{title}\n\n{format_features(features)}"
        print(text, file=sys.__stdout__, flush=True)
        leave(0)  # at once: handlers of the script could save an untrained model

    watch_features(tell)
    script = pathlib.Path(path)
    with as_main_program(script, arguments, is_heard=True) as execute:
        try:
            execute()
        except SystemExit as error:
            ended = ended_itself(script, arguments, error, "training step")
            raise ConfigurationError(ended) from None
    raise ConfigurationError(
        f"{path} ended without a training step in a graph of a tfdp strategy, so there "
        "is nothing to show. Train in the scope of one (tfdp.auto_strategy()), by fit "
        "or strategy.run, and without run_eagerly=True."
    )


def format_features(features: Sequence[dict[str, Any]]) -> str:
    """A paragraph for each feature, in their order."""
    lines = [
        "The order of overrides: of two for one method the later runs first, and calls",
        "the earlier. Of stages the earlier is the outer one.",
    ]
    for one in features:
        lines += ["", f"{one['feature']}: {one['about']}"]
        done = [
            f"  {moment:<9}  {what}"
            for moment in ("begin", "overrides", "stages", "remarks")
            for what in one[moment]
        ]
        lines += done or ["  -"]
    return "\n".join(lines)
