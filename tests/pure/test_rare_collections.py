"""Python's garbage collector is what it was, however a trace ends."""

import gc

import pytest

from tfdp.tracing.rare_collections import OBJECTS, collected_rarely


@pytest.fixture(autouse=True)
def restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_set_comes_back(fails):
    gc.set_threshold(500, 7, 8)
    try:
        with collected_rarely():
            assert gc.get_threshold() == (OBJECTS, 7, 8)
            with collected_rarely():
                assert gc.get_threshold() == (OBJECTS, 7, 8)
            assert gc.get_threshold() == (OBJECTS, 7, 8)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert gc.get_threshold() == (500, 7, 8)


@pytest.mark.parametrize("own", [0, OBJECTS, 10 * OBJECTS])
def test_who_wants_it_rarer_is_left_alone(own):
    gc.set_threshold(own, 7, 8)
    with collected_rarely():
        assert gc.get_threshold() == (own, 7, 8)
    assert gc.get_threshold() == (own, 7, 8)
