"""Makes the test world: four logical CPU devices, set once, before TensorFlow starts.

Logical devices can only be made before the runtime starts, so the first thing the
test session does is to make them. `tests/pure` never imports TensorFlow: the split
happens in `tests/devices/conftest.py`.
"""

import os

import pytest

from tests.support import slow_rows

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run slow tests")


def pytest_configure(config):
    slow_rows.wanted = config.getoption("--slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow; run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
