"""A worker that ends its loop of steps early: all hear it at once, and why."""

import contextlib
import re
import time

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tfdp.errors import CollectiveError, WorkerLostError

# None of them waits for it: each test would take twice as long.
TIMEOUT_SECONDS = 60.0


def train(link, steps, loops=1, exchanges_per_step=1):
    """Loops of that many steps; how many were begun in the last one."""
    made = []
    for _ in range(loops):
        made.clear()
        with link.loop_of_steps(lambda: str(len(made)), lambda: str(steps)):
            for step in range(steps):
                made.append(step)
                for _ in range(exchanges_per_step):
                    link.sum([np.zeros(2)], "bucket")
    return len(made)


@pytest.mark.parametrize("workers", [2, 3])
def test_loops_of_as_many_steps_go_on(workers):
    work = lambda link: train(link, 3, loops=4)  # noqa: E731
    assert on_workers(workers, work, timeout_seconds=TIMEOUT_SECONDS) == [3] * workers


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("workers, early", [(2, 0), (2, 1), (3, 1)])
def test_who_ends_early_says_so(workers, early, loops):
    def work(link):
        train(link, 4, loops=loops - 1) if loops > 1 else None
        return train(link, 3 if link.rank == early else 5)

    start = time.monotonic()
    errors = on_workers(workers, work, timeout_seconds=TIMEOUT_SECONDS)
    assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    for rank, error in enumerate(errors):
        # Who waits in an exchange has it from there.
        kind = CollectiveError if rank == early else WorkerLostError
        assert type(error) is kind
        found = re.search(r"different numbers of steps .*: (.*?)\.", str(error)).group(
            1
        )
        said = dict(
            reversed(part.split(" on worker ")) for part in found.split(" and ")
        )
        assert said.pop(str(early)) == "3"
        assert set(said.values()) == {"5"}


def test_steps_without_an_exchange_are_compared_at_the_end():
    """As where hosts train apart for a while."""
    work = lambda link: train(link, 3 + link.rank, exchanges_per_step=0)  # noqa: E731
    for error in on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS):
        assert type(error) is CollectiveError
        assert "3 on worker 0 and 4 on worker 1" in str(error)


def test_a_loop_within_a_loop():
    def work(link):
        with link.loop_of_steps(lambda: "1", lambda: "1"):
            link.sum([np.zeros(2)], "bucket")
            train(link, 2)
        return train(link, 2)

    assert on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS) == [2, 2]


def test_an_error_within_a_loop_stays_what_it_is():
    def work(link):
        with contextlib.suppress(FileNotFoundError):
            with link.loop_of_steps(lambda: "1", lambda: "1"):
                raise FileNotFoundError("a callback's own")
            return "taken for another"
        return train(link, 2)

    assert on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS) == [2, 2]
