"""Texts over MPI travel in buffers of one size; mpi4py's pickles are not used."""

import concurrent.futures
import re
import threading

import pytest

from tests.support.package_source import REPOSITORY
from tfdp.hosts.mpi_link import (
    LONGEST_TEXT_BYTES,
    bytes_of_first,
    text_of_first,
    texts_at_first,
)

WORKERS = 3


class World:
    """The two calls of MPI that are used, between threads; no other form of them."""

    def __init__(self, rank, place):
        self.rank, self.size = rank, WORKERS
        self._parts, self._barrier = place

    def _meet(self, part):
        self._parts[self.rank] = part.tobytes()
        self._barrier.wait(10)

    def Gather(self, part, rows):
        self._meet(part)
        for rank in range(WORKERS) if rows is not None else ():
            rows[rank] = memoryview(self._parts[rank])

    def Bcast(self, buffer):
        self._meet(buffer)
        buffer[...] = memoryview(self._parts[0])


def on_worlds(work):
    place = ([b""] * WORKERS, threading.Barrier(WORKERS))
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(lambda r: work(World(r, place)), range(WORKERS)))


@pytest.mark.parametrize("text", ["", "node", "ü.example", "n" * LONGEST_TEXT_BYTES])
def test_texts_come_as_they_were(text):
    own = lambda world: text if world.rank else "first"  # noqa: E731
    first, *others = on_worlds(lambda world: texts_at_first(world, own(world)))
    assert first == ["first", text, text] and others == [None, None]
    other = lambda world: "another" if world.rank else text  # noqa: E731
    assert on_worlds(lambda world: text_of_first(world, other(world))) == [text] * 3


def test_bytes_of_the_first():
    owns = [bytes([rank, 0, 0]) for rank in range(WORKERS)]
    assert on_worlds(lambda w: bytes_of_first(w, owns[w.rank])) == [owns[0]] * WORKERS


def test_no_pickles_of_mpi4py():
    """Its lower-case calls take any object: they pickle it."""
    for path in (REPOSITORY / "tfdp").rglob("mpi*.py"):
        found = re.findall(
            r"_?world\.(?:[a-z]*(?:bcast|gather|send|recv))\b", path.read_text()
        )
        assert found == [], path
