"""A worker that ends its loop of steps early: all hear it at once, and why."""

import contextlib
import re
import threading
import time

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.async_exchanges import AsyncSums
from tfdp.hosts.host_link import Compared

# None of them waits for it: each test would take twice as long.
TIMEOUT_SECONDS = 60.0


def train(link, steps, loops=1, exchanges_per_step=1):
    """Loops of that many steps; how many were begun in the last one."""
    made = []
    for _ in range(loops):
        made.clear()
        with link.loop_of_steps(lambda: str(len(made)), lambda: str(steps), "training"):
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


def train_later(link, steps, loops=1):
    """As `train`; a step takes the sums of the step before, and the end its own."""
    later, made = AsyncSums(link), []
    try:
        for _ in range(loops):
            made.clear()
            with link.loop_of_steps(
                lambda: str(len(made)), lambda: str(steps), "training"
            ):
                for step in range(steps):
                    made.append(step)
                    later.begin(step, [np.zeros(2), np.float32([1])], "gradients")
                    if step:
                        later.take(step - 1)
                later.take(steps - 1)
    finally:
        later.close()
    return len(made)


@pytest.mark.parametrize("workers", [2, 3])
def test_loops_with_sums_that_come_later_go_on(workers):
    work = lambda link: train_later(link, 3, loops=4)  # noqa: E731
    assert on_workers(workers, work, timeout_seconds=TIMEOUT_SECONDS) == [3] * workers


@pytest.mark.parametrize("workers, early", [(2, 0), (2, 1), (3, 1)])
def test_who_ends_early_says_so_where_sums_come_later(workers, early):
    work = lambda link: train_later(link, 2 if link.rank == early else 5)  # noqa: E731
    start = time.monotonic()
    errors = on_workers(workers, work, timeout_seconds=TIMEOUT_SECONDS)
    assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    for rank, error in enumerate(errors):
        assert type(error) is (CollectiveError if rank == early else WorkerLostError)
        said = re.search(r"different numbers of steps .*: (.*?)\.", str(error)).group(1)
        assert f"2 on worker {early}" in said and "5 on worker" in said


def test_steps_without_an_exchange_are_compared_at_the_end():
    """As where hosts train apart for a while."""
    work = lambda link: train(link, 3 + link.rank, exchanges_per_step=0)  # noqa: E731
    for error in on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS):
        assert type(error) is CollectiveError
        assert "3 on worker 0 and 4 on worker 1" in str(error)


def test_a_loop_within_a_loop():
    def work(link):
        with link.loop_of_steps(lambda: "1", lambda: "1", "a loop"):
            link.sum([np.zeros(2)], "bucket")
            train(link, 2)
        return train(link, 2)

    assert on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS) == [2, 2]


def test_an_error_within_a_loop_stays_what_it_is():
    def work(link):
        with contextlib.suppress(FileNotFoundError):
            with link.loop_of_steps(lambda: "1", lambda: "1", "a loop"):
                raise FileNotFoundError("a callback's own")
            return "taken for another"
        return train(link, 2)

    assert on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS) == [2, 2]


def run_loop(link, name, inside=lambda: None, made=lambda: "1"):
    with link.loop_of_steps(made, lambda: "9", name):
        inside()


def in_the_same_order(pattern, work, workers=2):
    """All workers say what each one did, long before the deadline."""
    start = time.monotonic()
    errors = on_workers(workers, work, timeout_seconds=TIMEOUT_SECONDS)
    assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    for error in errors:
        assert isinstance(error, CollectiveError)
        assert re.search(f"{pattern}.*in the same order", str(error)), error


@pytest.mark.parametrize("workers", [2, 3])
def test_loops_in_another_order(workers):
    def work(link):
        run_loop(link, "epoch 1 of fit")
        run_loop(link, "predict" if link.rank == 1 else "epoch 2 of fit")

    others = "Worker 0" if workers == 2 else "Workers 0, 2"
    did = f"{others} started epoch 2 of fit while worker 1 started predict"
    in_the_same_order(did, work, workers)


@pytest.mark.parametrize("channel", ["step", "host", None])
def test_a_loop_that_one_worker_starts_within_another(channel):
    """While the other is in an exchange of the next step, or in one of Python's, or in
    a step of which nothing is heard (`engine="tensorflow"`)."""
    steps, is_over = [], threading.Event()

    def go_on(link):
        if channel == "step":
            link.sum([np.zeros(2)], "bucket")
        elif channel == "host":
            link.gather(b"", "barrier")
        else:
            steps.append("the next one")
            is_over.wait(TIMEOUT_SECONDS)
            raise CollectiveError(link.news())

    def work(link):
        if link.rank:  # the other worker may know of it earlier
            link.on_failure(lambda reason: is_over.set())
        begun = len(steps) if link.rank else 0
        nested = lambda: run_loop(link, "evaluate")  # noqa: E731
        run_loop(
            link,
            "epoch 1 of fit",
            (lambda: go_on(link)) if link.rank else nested,
            lambda: str(1 + (len(steps) - begun if link.rank else 0)),
        )

    did = "orker 0 started evaluate while worker 1 was in epoch 1 of fit"
    in_the_same_order(did, work)


def test_an_exchange_outside_of_loops_while_another_worker_starts_one():
    def work(link):
        link.gather(b"", "barrier") if link.rank else run_loop(link, "evaluate")

    did = "orker 0 started evaluate while worker 1 was in an exchange after it made"
    in_the_same_order(did, work)


def test_a_loop_after_another_worker_has_come_to_its_end():
    def work(link):
        run_loop(link, "predict")
        link.close() if link.rank == 0 else run_loop(link, "evaluate")

    start = time.monotonic()
    error = on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS)[1]
    assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    did = "Worker 0 has come to the end of its script while worker 1 started evaluate;"
    assert str(error).startswith(did)


class Told(Compared):
    """What a worker has in common with others, or not."""

    def __init__(self, digest):
        self.told, self.explained = digest, []

    def digest(self, *, is_end):
        return self.told if is_end else "alike"

    def explain(self, *, is_end):
        self.explained.append(is_end)


def test_only_what_differs_is_explained():
    def work(link, digest):
        told = Told(digest)
        with link.loop_of_steps(lambda: "1", lambda: "1", "a loop", told):
            pass
        return told.explained

    alike = lambda link: work(link, "alike")  # noqa: E731
    unlike = lambda link: work(link, f"of {link.rank}")  # noqa: E731
    assert on_workers(2, alike, timeout_seconds=TIMEOUT_SECONDS) == [[], []]
    assert on_workers(2, unlike, timeout_seconds=TIMEOUT_SECONDS) == [[True], [True]]


def test_a_note_that_no_worker_leaves():
    def work(link):
        if link.rank:
            link.share_note(
                "start or end 0 of a loop of fit, evaluate or predict", "{}"
            )
        else:
            run_loop(link, "predict")

    error = on_workers(2, work, timeout_seconds=TIMEOUT_SECONDS)[0]
    assert "Worker 1 left a note that no worker leaves" in str(error)
