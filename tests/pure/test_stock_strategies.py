"""Tests take stock strategies from `tests.support.parity.stock_strategy`.

Two of TensorFlow's default that sum tensors of different size in one process abort the
collectives of all later tests: which tests meet in a process is chance, so no run
that is green says that they never will.
"""

import ast

import pytest

from tests.support.package_source import REPOSITORY

# What makes them in processes of their own, and the place that makes them for all.
MAY = {"support/parity.py", "support/defects.py"}
TESTS = REPOSITORY / "tests"
FILES = sorted(
    path
    for folder in ("devices", "support", "generator")
    for path in (TESTS / folder).rglob("*.py")
)


def made_in(source):
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and getattr(node.func, "attr", getattr(node.func, "id", None))
        == "MirroredStrategy"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_stock_strategies_have_one_maker(path):
    if path.relative_to(TESTS).as_posix() not in MAY:
        assert made_in(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["tf.distribute.MirroredStrategy(x)", "y = MirroredStrategy()"]
)
def test_a_strategy_is_seen(source):
    assert made_in(source) == [1]
