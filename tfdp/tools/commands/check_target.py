"""Resolves the TARGET argument of commands: a script or a function."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tfdp.errors import ConfigurationError, TfdpError
from tfdp.strategies.unused import note_used

FORMS = (
    "path/to/script.py:function, package.module:function, or path/to/script.py that "
    "defines build_model() and make_data()"
)
RETURNS = (
    "(build, data), or a dict with the keys 'build' and 'data' and perhaps 'steps', "
    "'batch_size', 'seed' and 'random_layers'"
)
#: For a target that calls `sys.exit`, whatever its code: 0 would report success.
ENDED_ITSELF = (
    "the target called sys.exit (SystemExit). It is imported, not run: keep code that "
    'trains, parses arguments or exits under `if __name__ == "__main__":`.'
)
MODULE_NAME = "tfdp_check_target"
OPTIONAL_KEYS = ("steps", "batch_size", "seed", "random_layers")


def end_help(parser: argparse.ArgumentParser, *texts: str) -> None:
    """Sets the end of a command's help, each text wrapped."""
    parser.epilog = "\n".join(textwrap.fill(text, 80) for text in texts)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


@dataclasses.dataclass(frozen=True)
class Target:
    """A script's path or a module's name, and optionally a function in it."""

    module: str
    function: str | None

    @property
    def is_script(self) -> bool:
        return self.module.endswith(".py")


@dataclasses.dataclass(frozen=True)
class ModelAndData:
    """What to train; `options` are further arguments of `check_parity`."""

    build: Callable[[], Any]
    data: Any
    options: dict[str, Any]


@contextlib.contextmanager
def training_a_target() -> Iterator[None]:
    """Around a process that only trains a target; an exit of the target is an error."""
    note_used()
    try:
        yield
    except SystemExit:
        traceback.print_exc()
        sys.exit(ENDED_ITSELF)


@contextlib.contextmanager
def errors_of_target(failure: str) -> Iterator[None]:
    """Around the target's own code: prints its traceback, and raises `failure`.

    Raises:
      ConfigurationError: the code raised an error, or called `sys.exit`.
    """
    try:
        yield
    except TfdpError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        is_exit = isinstance(error, SystemExit)
        raise ConfigurationError(ENDED_ITSELF if is_exit else failure) from None


def parse_target(text: str) -> Target:
    """Parses TARGET from the command line; imports nothing.

    Raises:
      ConfigurationError: its form is unknown, or the script does not exist.

    >>> parse_target("pkg.models:small")
    Target(module='pkg.models', function='small')
    """
    # From the right: a path may contain a colon.
    module, colon, function = text.rpartition(":")
    if not colon:
        module, function = text, ""
    target = Target(module, function or None)
    if target.is_script:
        if not pathlib.Path(module).is_file():
            raise ConfigurationError(f"There is no script {module!r}.")
    elif not (function and all(part.isidentifier() for part in module.split("."))):
        raise ConfigurationError(f"TARGET must be {FORMS}. Received: {text!r}.")
    if function and not function.isidentifier():
        raise ConfigurationError(
            f"{function!r} is not the name of a function. TARGET must be {FORMS}."
        )
    return target


def load_target(target: Target) -> ModelAndData:
    """Imports the target and calls its function; raises what that code raises."""
    module = _import(target)
    if target.function is None:
        build = _function(module, target, "build_model")
        return ModelAndData(build, _function(module, target, "make_data")(), {})
    return _read(_function(module, target, target.function)(), target)


def load_build(target: Target) -> Callable[..., Any]:
    """Imports the target and returns its model function, by default `build_model`."""
    module = _import(target)
    return _function(module, target, target.function or "build_model")


def _import(target: Target) -> ModuleType:
    return _run_script(target) if target.is_script else _import_module(target)


def _run_script(target: Target) -> ModuleType:
    path = pathlib.Path(target.module).resolve()
    # As when Python runs a script: it can import modules from its folder.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{target.module} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module here.
    sys.modules[MODULE_NAME] = module
    spec.loader.exec_module(module)
    return module


def _import_module(target: Target) -> ModuleType:
    sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target.module}.".startswith(f"{error.name}."):
            raise  # the module's own import failed
        raise ConfigurationError(
            f"There is no module {error.name!r} here or among the installed packages."
        ) from error


def _function(module: ModuleType, target: Target, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        hint = "" if target.function else f" Without a function TARGET is {FORMS}."
        raise ConfigurationError(f"{target.module} defines no function {name!r}.{hint}")
    return function


def _read(given: Any, target: Target) -> ModelAndData:
    if isinstance(given, tuple) and len(given) == 2:
        given = {"build": given[0], "data": given[1]}
    if not (
        isinstance(given, dict)
        and {"build", "data"} <= set(given)
        and callable(given["build"])
    ):
        raise ConfigurationError(
            f"{target.function}() must return {RETURNS}. It returned: "
            f"{type(given).__name__}."
        )
    unknown = set(given) - {"build", "data", *OPTIONAL_KEYS}
    if unknown:
        raise ConfigurationError(
            f"{target.function}() returned a dict with the unknown keys "
            f"{sorted(map(str, unknown))}. It must return {RETURNS}."
        )
    options = {key: given[key] for key in OPTIONAL_KEYS if key in given}
    return ModelAndData(given["build"], given["data"], options)
