"""Keras' own tests of its trainer and its callbacks, each in the scope of two replicas.

They pass on one device, and say in Keras' words what `fit`, `evaluate` and `predict`
do. Keras' wheel ships them.
"""

import contextlib
import importlib
import importlib.util
import pathlib
import unittest

import keras
import pytest

from tests.support import slow_rows
from tests.support.parity import make_strategy

pytestmark = pytest.mark.slow

# Some of their rows are for these packages.
PACKAGES = ("jax", "orbax", "torch")
# It imports a file of Keras' repository that the wheel does not have.
NOT_WHOLE = "remote_monitor_test"
# Why a row cannot run in the scope.
LEFT_OUT = {
    "test_swap_ema_weights_with_tf_distribute": "it makes a strategy of its own",
}


def own_tests():
    """Keras' test classes, by names that are theirs alone."""
    source = pathlib.Path(keras.src.__file__).parent
    paths = [source / "trainers/trainer_test.py", *source.glob("callbacks/*_test.py")]
    for path in paths:
        if not path.exists() or path.stem == NOT_WHOLE:
            continue
        module = importlib.import_module(f"keras.src.{path.parent.name}.{path.stem}")
        for name, found in vars(module).items():
            is_test = isinstance(found, type) and issubclass(found, unittest.TestCase)
            if is_test and found.__module__ == module.__name__:
                yield f"{path.stem}_{name}", found


if slow_rows.wanted:
    globals().update(own_tests())


@pytest.fixture(autouse=True)
def _in_scope(request, monkeypatch):
    """Enters the scope after the `setUp` of all classes, which clears the session."""
    reason = LEFT_OUT.get(request.node.name)
    if reason:
        pytest.skip(reason)
    row = request.node.nodeid.lower()
    for package in PACKAGES:
        if package in row and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    is_filtered = keras.config.is_traceback_filtering_enabled()
    is_interactive = keras.config.is_interactive_logging_enabled()
    case = keras.src.testing.TestCase
    set_up = case.setUp
    with contextlib.ExitStack() as stack:

        def set_up_in_scope(self):
            set_up(self)
            stack.enter_context(make_strategy(2).scope())

        monkeypatch.setattr(case, "setUp", set_up_in_scope)
        yield
    if is_filtered:
        keras.config.enable_traceback_filtering()
    if is_interactive:
        keras.config.enable_interactive_logging()
