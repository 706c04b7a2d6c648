"""What `dir` shows of a public module, and what stands beside its names."""

import importlib
import pkgutil

import pytest

import tfdp
from tests.support.public_names import ROOMS


@pytest.mark.parametrize("name", ["tfdp", *ROOMS])
def test_dir_is_what_is_public(name):
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, each) for each in module.__all__)


def test_every_public_module_is_a_name_of_the_package():
    assert {room.removeprefix("tfdp.") for room in ROOMS} <= set(dir(tfdp))


def test_no_module_has_the_name_of_a_compression_in_small_letters():
    """`compression=tfdp.compression.int8` gave a module in the place of `Int8()`."""
    modules = {each.name for each in pkgutil.iter_modules(tfdp.compression.__path__)}
    assert modules.isdisjoint(name.lower() for name in tfdp.compression.__all__)
    assert not hasattr(tfdp.compression, "int8")
