"""`quiet`: starts TensorFlow without the log lines of its libraries.

TensorFlow 2.21 writes some of them past Python, and two before any setting takes
effect, so it is loaded while the process' standard error is redirected to a file.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence

from tfdp.cluster.machine import notebook_restart_hint
from tfdp.errors import TooLateWarning

STDERR_DESCRIPTOR = 2
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
#: Set by `tfdp launch`: the level is the launcher's, and not the user's.
LEVEL_OF_LAUNCHER = "TFDP_LOG_LEVEL_OF_LAUNCHER"
# TensorFlow's level 2: no information and warnings, only errors.
ERRORS_ONLY = "2"


def quiet() -> None:
    """Starts TensorFlow without its log lines on oneDNN, CUDA and the processor.

    Call it before Keras or TensorFlow is imported: it imports TensorFlow, and shows
    the captured lines if that fails. TensorFlow's later notes and warnings on standard
    error are hidden too; errors, Python's warnings, Keras' output and tfdp's own lines
    are not. Keeps a TF_CPP_MIN_LOG_LEVEL that is set.

    Raises:
      ImportError: from TensorFlow.

    Warns:
      TooLateWarning: TensorFlow was imported before, and has written its lines.

    ```python
    import tfdp

    tfdp.quiet()

    import keras
    ```
    """
    if "tensorflow" in sys.modules:
        if not _was_quiet:
            warnings.warn(
                "tfdp.quiet() was called after TensorFlow was imported and had written "
                "its lines. Call it before `import keras` and `import tensorflow`."
                + notebook_restart_hint(),
                TooLateWarning,
                stacklevel=2,
            )
    else:
        import_tensorflow_quietly(ERRORS_ONLY)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


# Not empty: tfdp imported TensorFlow, in `quiet` or in one of its commands.
_was_quiet: list[bool] = []


# Optional imports of TensorFlow and Keras: for JAX models, scikit-learn wrappers and
# image galleries. 2.0 of 6.9 seconds of processor time.
NOT_NEEDED_FOR_A_STEP = ("jax", "matplotlib", "sklearn")


def import_tensorflow_quietly(level: str = "3", without: Sequence[str] = ()) -> None:
    """Imports TensorFlow with the process' standard error redirected to a file.

    Native libraries write past `sys.stderr`, so the descriptor itself is redirected.
    `level`: TF_CPP_MIN_LOG_LEVEL, if not set: 3 hides errors, too. `without`: packages
    hidden during the import, such as NOT_NEEDED_FOR_A_STEP.
    """
    if os.environ.pop(LEVEL_OF_LAUNCHER, None) is not None:
        os.environ.pop(LEVEL, None)  # workers are as quiet as worker 0
    os.environ.setdefault(LEVEL, level)
    is_first = "tensorflow" not in sys.modules
    sys.stderr.flush()
    terminal = os.dup(STDERR_DESCRIPTOR)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), STDERR_DESCRIPTOR)
        try:
            with _hidden(without):
                importlib.import_module("tensorflow")
            if is_first:
                _was_quiet.append(True)
        except BaseException:
            captured.seek(0)
            os.write(terminal, captured.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, STDERR_DESCRIPTOR)
            os.close(terminal)


@contextlib.contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Makes imports of these modules raise ImportError within the context."""
    hidden = [name for name in names if name not in sys.modules]
    # Python's own mechanism: None as the module.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
