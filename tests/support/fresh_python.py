"""Runs Python in a process of its own: imports, output and devices start afresh."""

import os
import subprocess
import sys

from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS

# Put before a program, it hides packages as if they were not installed.
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

# `importlib.util.find_spec` asks the finders, too: None there means not installed.
import importlib.util
_find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] in {names!r} else _find_spec(name, package)
)
sys.meta_path.insert(0, Hidden())
"""


def run_python(
    *arguments, cwd=REPOSITORY, timeout_seconds=LONGEST_SECONDS, environment=None
):
    """`python ARGUMENTS`, started in the repository; its output as text.

    `environment` adds to the variables of this process.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, **(environment or {})},
    )


def run_program(program, *, hidden=(), **options):
    """`python -c PROGRAM`, with the packages of `hidden` not to be found."""
    prelude = HIDE.format(names=set(hidden)) if hidden else ""
    return run_python("-c", prelude + program, **options)
