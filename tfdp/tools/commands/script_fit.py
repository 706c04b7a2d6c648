"""Runs a user's script until its first `fit`, for its model, data and batch size.

A model has to be built several times: on one device and on replicas, with other shards
or with `remat`. Each time the script runs again, in the scope that the command has
opened, and stops where it first calls `fit`. Its own strategies are replaced: one made
by the script has the command's number of replicas, and its scope opens nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.first_fit import input_of_fit, running_a_script
from tfdp.errors import ConfigurationError
from tfdp.tools.commands.end_of_process import leave

INSTEAD = (
    "Define build_model() and make_data() at the top level of the script, or name a "
    "function that returns (build, data): SCRIPT:function."
)


# A search for a batch size may call fit a few times, and catch everything.
MOST_STOPS = 100
FAILED = 2


class Stopped(BaseException):
    """Leaves the script; `except Exception` in it does not catch this."""


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """The arguments of the script's first `fit`.

    Args:
      model: the compiled model.
      data: arrays `(x, y, sample_weight)`, or a list of global batches.
      batch_rows: rows of a global batch.
      callbacks: the names of the classes of its callbacks, which are not called.
    """

    model: Any
    data: Any
    batch_rows: int
    callbacks: tuple[str, ...]


class Script:
    """A script that can be run again and again until its first `fit`.

    Args:
      path: of the script.
      arguments: its command line.
      strategy: what a strategy of the script is replaced by, but for its scope.
      replicas: how many replicas the script sees.
      batches: how many batches to keep, of data other than arrays.
    """

    def __init__(
        self,
        path: str,
        arguments: Sequence[str],
        strategy: Any,
        replicas: int,
        batches: int,
    ):
        self._path, self._arguments = pathlib.Path(path), list(arguments)
        self._stand_in = StandIn(strategy, replicas, self._refuse)
        self._batches = batches
        self._is_first = True
        self._found: FitArguments | None = None
        self._refusal: Exception | None = None
        self._unused: tuple[Any, Any] | None = None  # a strategy, and a model in it

    def first_fit(self) -> FitArguments:
        """Runs the script.

        Raises:
          ConfigurationError: it ended without a fit, or trains in another way.
          Exception: what the script raised.
        """
        found = self._run()
        if tf.distribute.has_strategy():
            self._unused = tf.distribute.get_strategy(), found.model
        return found

    def build(self) -> Any:
        """A new model: of another run of the script, in the scope that is open."""
        strategy, model = self._unused or (None, None)
        self._unused = None
        if strategy is not None and strategy is tf.distribute.get_strategy():
            return model
        return self._run().model

    def _run(self) -> FitArguments:
        self._found = self._refusal = None
        self._thread, self._stops = threading.get_ident(), 0
        failure: BaseException | None = None
        replaced = running_a_script(
            self._stand_in, self._stop, self._refuse, self._keep_files
        )
        main = as_main_program(self._path, self._arguments, is_heard=self._is_first)
        with replaced, main as execute:
            # A new process has no names and policies of an earlier model.
            keras.utils.clear_session(free_memory=False)
            try:
                execute()
            except Stopped:
                pass
            except (Exception, SystemExit) as error:
                if self._found is None and self._refusal is None:
                    failure = error
        if failure is not None:
            self._raise(failure)
        self._is_first = False
        if self._refusal is not None:
            raise self._refusal
        if self._found is None:
            raise ConfigurationError(
                f"{self._path} ended without calling fit, so there is no training to "
                f"take. {INSTEAD}"
            )
        return self._found

    def _raise(self, error: BaseException) -> None:
        if not self._is_first:
            traceback.print_exception(error)
            raise ConfigurationError(
                f"{self._path} failed when it was run again. A command runs it once "
                "for each model that it builds, so before its first fit the script "
                "must not change what it depends on (files, standard input). "
                f"{INSTEAD}"
            ) from None
        if not isinstance(error, SystemExit):
            raise error
        ended = ended_itself(self._path, self._arguments, error, "fit")
        raise ConfigurationError(f"{ended} {INSTEAD}") from None

    def _stop(self, given: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            # Scopes belong to threads: the model is outside of the command's.
            self._refuse("fit is called in another thread")
        self._stops += 1
        if self._stops > MOST_STOPS:
            print(
                f"tfdp: {self._path} catches every exception of fit, and calls it "
                f"again and again. {INSTEAD}",
                file=sys.__stderr__,
                flush=True,
            )
            leave(FAILED)
        try:
            self._found = self._found or self._first(given)
        except Exception as error:  # the script could catch it
            self._refusal = error
        raise Stopped

    def _keep_files(self) -> None:
        """A `finally` of the script could replace a trained model by this one."""
        if self._found is not None or self._refusal is not None:
            raise Stopped

    def _first(self, given: dict[str, Any]) -> FitArguments:
        from tfdp.tools.testing.batches import collect_batches, row_count

        data, rows = input_of_fit(given, self._batches)
        if rows is None:
            rows = row_count(collect_batches(data, 1, 1)[0])
        callbacks = given.get("callbacks") or ()
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        names = tuple(type(each).__name__ for each in keras.tree.flatten(callbacks))
        model = given["self"]
        if type(model).fit is not keras.Model.fit:
            # The data have passed the fit of its class, such as KerasHub's, which
            # tokenizes: only Keras' fit is left to call.
            model.fit = lambda *args, **kwargs: keras.Model.fit(model, *args, **kwargs)
        return FitArguments(model, data, rows, names)

    def _refuse(self, what: str = "an optimizer is applied before it") -> None:
        if self._found is None:
            self._refusal = self._refusal or ConfigurationError(
                f"The training of {self._path} cannot be taken from its first fit: "
                f"{what}. {INSTEAD}"
            )
        if threading.get_ident() != self._thread:
            raise SystemExit  # ends a thread without a traceback
        raise Stopped


def ended_itself(
    path: pathlib.Path, arguments: Sequence[str], error: SystemExit, awaited: str
) -> str:
    """The sentence about a script that has left before its first `awaited`."""
    code = error.code
    how = "" if code is None else f": {str(code).rstrip('.')}"
    if isinstance(code, int):
        how = f", with exit code {code}"
    return (
        f"{path} ended itself before its first {awaited}{how}. What it needs as "
        f"arguments goes after --, as in `-- {' '.join(arguments) or 'DATA'}`."
    )


@contextlib.contextmanager
def as_main_program(
    path: pathlib.Path, arguments: Sequence[str], *, is_heard: bool
) -> Iterator[Callable[[], None]]:
    """Yields the function that runs a script as `python SCRIPT ARGUMENTS` would; what
    it prints goes to the standard error, or nowhere."""
    source = path.resolve()
    module = types.ModuleType("__main__")
    module.__file__ = str(source)
    code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
    main, words, folder = sys.modules["__main__"], sys.argv, os.getcwd()
    packages = {name.partition(".")[0] for name in sys.modules}
    if str(source.parent) not in sys.path:
        sys.path.insert(0, str(source.parent))
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    try:
        with (
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stdout(out := sys.stderr if is_heard else nothing),
            contextlib.redirect_stderr(out),
        ):
            yield lambda: exec(code, vars(module))
    finally:
        sys.argv, sys.modules["__main__"] = words, main
        os.chdir(folder)
        # Modules beside the script may make parts of the model when imported.
        for name, imported in list(sys.modules.items()):
            is_new = name.partition(".")[0] not in packages
            if is_new and _is_beside(imported, source.parent):
                del sys.modules[name]


class StandIn:
    """Replaces each strategy that a script makes; otherwise as `strategy`."""

    def __init__(self, strategy: Any, replicas: int, refuse: Callable[[str], None]):
        self._strategy, self._refuse = strategy, refuse
        self.num_replicas_in_sync = replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # a script may test it with isinstance
        return type(self._strategy)

    def __repr__(self) -> str:
        return repr(self._strategy)

    def scope(self) -> Any:
        """Opens nothing: the command has opened the scope of its own strategy."""
        return contextlib.nullcontext(self)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The dataset itself: `fit` of the command distributes it."""
        return dataset

    def run(self, *arguments: Any, **options: Any) -> Any:
        self._refuse("strategy.run is called before it")

    def distribute_datasets_from_function(self, *arguments: Any, **more: Any) -> Any:
        self._refuse("distribute_datasets_from_function makes batches of one replica")


def _is_beside(module: types.ModuleType, folder: pathlib.Path) -> bool:
    """Whether a module belongs to the script: in its folder, and not installed."""
    path = pathlib.Path(getattr(module, "__file__", None) or "/")
    is_source = path.suffix == ".py" and "site-packages" not in path.parts
    return is_source and folder in path.parents
