"""Resolves the TARGET argument of commands: a script or a function."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from tfdp.checks import did_you_mean
from tfdp.errors import ConfigurationError, TfdpError
from tfdp.files.near import did_you_mean_path, is_script
from tfdp.strategies.unused import note_used

FORMS = "path/to/script.py, path/to/script.py:function or package.module:function"
#: How a script without a function is taken.
RUN = (
    "A script that defines build_model() and make_data() is imported. Any other runs "
    "as `python SCRIPT ARGUMENTS` until its first fit, from which model, data and "
    "batch size are taken; its arguments go after --."
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
DEFINITIONS = ("build_model", "make_data")
OPTIONAL_KEYS = ("steps", "batch_size", "seed", "random_layers")


def end_help(parser: argparse.ArgumentParser, *texts: str) -> None:
    """Sets the end of a command's help, each text wrapped."""
    parser.epilog = "\n".join(textwrap.fill(text, 80) for text in texts)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


@dataclasses.dataclass(frozen=True)
class Target:
    """A script's path or a module's name, and optionally a function in it.

    `arguments` are those of a script that is run.
    """

    module: str
    function: str | None
    arguments: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        return self.module.endswith(".py")


@dataclasses.dataclass(frozen=True)
class ModelAndData:
    """A model to train and its data; `options`: further arguments of `check_parity`."""

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
        _print_error(error)
        is_exit = isinstance(error, SystemExit)
        raise ConfigurationError(ENDED_ITSELF if is_exit else failure) from None


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """How to run a script that has no function for the command.

    Args:
      make_strategy: makes what the script gets instead of a strategy of its own.
      replicas: how many replicas the script sees.
      batches: how many batches to keep of data other than arrays.
    """

    make_strategy: Callable[[], Any]
    replicas: int
    batches: int = 1


def _print_error(error: BaseException) -> None:
    """Prints the traceback from where it leaves the commands' own code for good."""
    shown = trace = error.__traceback__
    here = pathlib.Path(__file__).parent
    while trace is not None and trace.tb_next is not None:
        if pathlib.Path(trace.tb_frame.f_code.co_filename).parent == here:
            shown = trace.tb_next
        trace = trace.tb_next
    traceback.print_exception(type(error), error, shown)


def parse_target(text: str, arguments: Sequence[str] = ()) -> Target:
    """Parses TARGET from the command line; imports nothing.

    Args:
      text: TARGET.
      arguments: of the script, which follow `--`.

    Raises:
      ConfigurationError: its form is unknown, the script does not exist, or nothing
        takes the arguments.

    >>> parse_target("pkg.models:small")
    Target(module='pkg.models', function='small')
    """
    # From the right: a path may contain a colon.
    module, colon, function = text.rpartition(":")
    if not colon:
        module, function = text, ""
    target = Target(module, function or None, tuple(arguments))
    if target.is_script:
        path = pathlib.Path(module)
        if not path.is_file():
            hint = did_you_mean_path(module, is_script)
            raise ConfigurationError(f"There is no script {module!r}.{hint}")
    elif not (function and all(part.isidentifier() for part in module.split("."))):
        raise ConfigurationError(f"TARGET must be {FORMS}. Received: {text!r}.")
    if function and not function.isidentifier():
        raise ConfigurationError(
            f"{function!r} is not the name of a function. TARGET must be {FORMS}."
        )
    if function and target.is_script:
        _check_function(path, function)
    if arguments and not is_run(target):
        raise ConfigurationError(
            f"{text} is imported, not run, so it takes no arguments. Leave out "
            f"`-- {' '.join(arguments)}`."
        )
    return target


def _check_function(path: pathlib.Path, function: str) -> None:
    """Refuses a name that does not occur in the script, before it is imported."""
    try:
        text = path.read_text("utf-8")
        names = {name for node in ast.parse(text).body for name in _defined(node)}
    except (SyntaxError, ValueError):
        return  # importing it shows the error
    if re.search(rf"\b{function}\b|import \*", text) is None:
        raise ConfigurationError(
            f"{path} defines no function {function!r}.{did_you_mean(function, names)}"
        )


def check_module(target: Target) -> None:
    """Refuses a module whose package does not exist; imports nothing.

    Raises:
      ConfigurationError: there is no such package or module here.
    """
    if target.is_script:
        return
    top = target.module.partition(".")[0]
    folder = pathlib.Path.cwd()
    is_here = (folder / top).is_dir() or (folder / f"{top}.py").is_file()
    if is_here or top in sys.modules or importlib.util.find_spec(top) is not None:
        return
    near = [each.stem for each in folder.iterdir() if each.stem.isidentifier()]
    raise ConfigurationError(
        f"There is no module {top!r} here or among the installed packages."
        f"{did_you_mean(top, near)}"
    )


def is_run(target: Target) -> bool:
    """Whether the target is a script that is run until its first `fit`.

    Not if it defines functions `build_model` and `make_data` that need no arguments.
    """
    if not target.is_script or target.function is not None:
        return False
    try:
        body = ast.parse(pathlib.Path(target.module).read_bytes()).body
    except (SyntaxError, ValueError):
        return True  # running it shows the error
    return not {*DEFINITIONS} <= {name for node in body for name in _defined(node)}


def _defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement at the top level binds to what needs no arguments."""
    if isinstance(node, ast.FunctionDef):
        given = node.args
        needed = len(given.posonlyargs) + len(given.args) - len(given.defaults)
        if not needed and None not in given.kw_defaults:
            yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (each.asname or each.name for each in node.names)
    elif isinstance(node, ast.Assign):
        yield from (each.id for each in node.targets if isinstance(each, ast.Name))


def load_target(target: Target, script_run: ScriptRun | None = None) -> ModelAndData:
    """Imports the target and calls its function; raises what that code raises.

    A script without functions for it runs until its first `fit`, as `script_run` says.
    """
    if script_run is not None and is_run(target):
        return _first_fit(target, script_run)
    module = _import(target)
    if target.function is None:
        build = _function(module, target, "build_model")
        return ModelAndData(build, _function(module, target, "make_data")(), {})
    return _read(_function(module, target, target.function)(), target)


def _first_fit(target: Target, script_run: ScriptRun) -> ModelAndData:
    from tfdp.tools.commands.script_fit import Script

    strategy = script_run.make_strategy()
    script = Script(
        target.module,
        target.arguments,
        strategy,
        script_run.replicas,
        script_run.batches,
    )
    found = script.first_fit()
    without = f", without {', '.join(found.callbacks)}" if found.callbacks else ""
    print(
        f"tfdp: {target.module} was run until its first fit: model "
        f"{found.model.name!r}, batches of {found.batch_rows} rows{without}",
        file=sys.stderr,
    )
    return ModelAndData(script.build, found.data, {"batch_size": found.batch_rows})


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
        hint = f" TARGET is {FORMS}."
        if target.function is not None:
            hint = did_you_mean(name, dir(module))
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
