"""`quiet`: TensorFlow without the lines that its libraries print when it starts.

TensorFlow 2.21 writes some of them past Python, and two before any of its settings
counts. So it is loaded while the process' standard error goes to a file.
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

from tfdp.cluster.machine import restart_in_words
from tfdp.errors import TooLateWarning

STDERR_DESCRIPTOR = 2
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# By TensorFlow's count: information and warnings are left out, errors are not.
ERRORS_ONLY = "2"


def quiet() -> None:
    """Lets TensorFlow start without its lines on oneDNN, CUDA and the processor.

    Call it before Keras or TensorFlow is imported: it imports TensorFlow itself, and
    shows what was written when that fails. Later errors are shown, TensorFlow's later
    notes and warnings on standard error are not; Python's warnings, Keras' output and
    tfdp's own lines stay. A TF_CPP_MIN_LOG_LEVEL that is set stays as it is.

    Raises:
      ImportError: as TensorFlow raises it.

    Warns:
      TooLateWarning: where TensorFlow was imported before, and has written its lines.

    ```python
    import tfdp

    tfdp.quiet()

    import keras
    ```
    """
    if "tensorflow" in sys.modules:
        if not _was_called:
            warnings.warn(
                "tfdp.quiet() came after TensorFlow, whose lines are written by now. "
                "Call it before `import keras` and `import tensorflow`."
                + restart_in_words(),
                TooLateWarning,
                stacklevel=2,
            )
    else:
        import_tensorflow_quietly(ERRORS_ONLY)
        _was_called.append(True)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


_was_called: list[bool] = []


# TensorFlow and Keras import them where they are installed, and do without where they
# are not: for models of JAX, for scikit-learn's wrappers, for galleries of images.
# 2.0 of 6.9 seconds of processor time.
NOT_NEEDED_FOR_A_STEP = ("jax", "matplotlib", "sklearn")


def import_tensorflow_quietly(level: str = "3", without: Sequence[str] = ()) -> None:
    """Imports TensorFlow while the process' standard error goes to a file.

    Native libraries write past `sys.stderr`, so the descriptor itself is redirected.
    When the import fails, what was written is shown.

    Args:
      level: for TF_CPP_MIN_LOG_LEVEL, where that is not set: 3 leaves out errors, too.
      without: packages that TensorFlow and Keras do not find meanwhile, such as
        NOT_NEEDED_FOR_A_STEP. A program that imports them later gets them.

    Raises:
      ImportError: as TensorFlow raises it.
    """
    # Whoever has set a level keeps it.
    os.environ.setdefault(LEVEL, level)
    sys.stderr.flush()
    terminal = os.dup(STDERR_DESCRIPTOR)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), STDERR_DESCRIPTOR)
        try:
            with _hidden(without):
                importlib.import_module("tensorflow")
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
    """Who imports one of these within is told that it is not installed."""
    hidden = [name for name in names if name not in sys.modules]
    # Python's own way to say so: None in the place of a module.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
