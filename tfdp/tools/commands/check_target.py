"""What commands are pointed at: a script or a function, and what it gives."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.strategies.unused import note_used

FORMS = (
    "path/to/script.py:function, package.module:function, or path/to/script.py that "
    "defines build_model() and make_data()"
)
RETURNS = (
    "(build, data), or a dict with the keys 'build' and 'data' and perhaps 'steps', "
    "'batch_size', 'seed' and 'random_layers'"
)
#: What is said of a target that calls `sys.exit`, whatever code it gave: 0 would say
#: that all is well.
ENDED_ITSELF = (
    "the target ended by itself (SystemExit). It is imported, not run: keep what "
    'trains, reads arguments and ends under `if __name__ == "__main__":`.'
)
MODULE_NAME = "tfdp_check_target"
OPTIONAL_KEYS = ("steps", "batch_size", "seed", "random_layers")


@dataclasses.dataclass(frozen=True)
class Target:
    """A script's path or a module's name, and the function in it, if one is named."""

    module: str
    function: str | None

    @property
    def is_script(self) -> bool:
        """Whether `module` is a path."""
        return self.module.endswith(".py")


@dataclasses.dataclass(frozen=True)
class ModelAndData:
    """What is to be checked; `options` are further arguments of `check_parity`."""

    build: Callable[[], Any]
    data: Any
    options: dict[str, Any]


@contextlib.contextmanager
def training_a_target() -> Iterator[None]:
    """Around what a process does that trains a target, and nothing else.

    A target that ends it is told of; the strategy is not its own, so nobody is told
    how to use that.
    """
    note_used()
    try:
        yield
    except SystemExit:
        traceback.print_exc()
        sys.exit(ENDED_ITSELF)


def parse_target(text: str) -> Target:
    """Reads the target from the command line; imports nothing.

    Raises:
      ConfigurationError: when it is of no known form, or the script is missing.

    >>> parse_target("pkg.models:small")
    Target(module='pkg.models', function='small')
    """
    # From the right: a path may hold a colon.
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
    """Imports the target and calls its function.

    Raises:
      ConfigurationError: when the function does not exist or gives something else.
      Exception: whatever the target's own code raises.
    """
    module = _imported(target)
    if target.function is None:
        build = _function(module, target, "build_model")
        return ModelAndData(build, _function(module, target, "make_data")(), {})
    return _read(_function(module, target, target.function)(), target)


def load_build(target: Target) -> Callable[..., Any]:
    """Imports the target: what makes its model, `build_model` where none is named.

    Raises:
      ConfigurationError: when there is no such function.
      Exception: whatever the target's own code raises.
    """
    module = _imported(target)
    if target.function is None:
        return _function(module, target, "build_model")
    return _function(module, target, target.function)


def _imported(target: Target) -> ModuleType:
    return _run_script(target) if target.is_script else _import_module(target)


def _run_script(target: Target) -> ModuleType:
    path = pathlib.Path(target.module).resolve()
    # A script finds the modules beside it, as when Python runs it.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{target.module} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    # Classes look for their module here, dataclasses among them.
    sys.modules[MODULE_NAME] = module
    spec.loader.exec_module(module)
    return module


def _import_module(target: Target) -> ModuleType:
    sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target.module}.".startswith(f"{error.name}."):
            raise  # of something that the module itself imports
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
