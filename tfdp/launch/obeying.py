"""Runs a program by its `keras.distribution`: `tfdp launch --keras-distribution`."""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
from collections.abc import Sequence

import tfdp


def main(words: Sequence[str]) -> None:
    """Runs `script.py args...`, or `-m module args...`, as Python would."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    tfdp.obey_keras_distribution()
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    sys.path[0] = str(pathlib.Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
