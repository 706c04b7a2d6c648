"""Exchanges beside the link: their deadline, and who is said to be missing."""

import re
import threading
import time

import pytest

from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts import exchange_watch as module
from tfdp.hosts.exchange_watch import ExchangeWatch
from tfdp.hosts.membership import SuspendDetector

SOON_SECONDS = 5.0


class Link:
    """What the watch asks of a link; three workers, this is worker 0."""

    rank, workers, timeout_seconds = 0, 3, 0.5

    def __init__(self, notes=None, news=None):
        self.notes = notes or {}
        self.is_news = news
        self.listeners = []
        self.left = []

    def on_failure(self, listener):
        self.listeners.append(listener)

    def leave_note(self, key, note):
        self.left.append(note)

    def wait_for_notes(self, key, enough):
        assert enough(self.notes)
        return self.notes

    def news(self):
        return self.is_news


@pytest.fixture
def watched():
    def make(**options):
        link, given_up = Link(**options), threading.Event()
        messages = []

        def give_up(message):
            messages.append(message)
            given_up.set()

        return ExchangeWatch(link, give_up), link, given_up, messages

    return make


def test_after_the_deadline_those_are_named_who_have_begun_fewer(watched):
    watch, link, given_up, messages = watched(notes={0: "2", 1: "1", 2: "2"})
    watch.end(watch.begin("bucket 1 of 2"))
    watch.begin("bucket 2 of 2")
    assert given_up.wait(SOON_SECONDS)
    assert re.search(r"Worker 0 waited \d+\.\d seconds in an exchange", messages[0])
    assert "(bucket 2 of 2)" in messages[0]
    assert "worker 1 did not arrive within 0.5 seconds" in messages[0]
    assert link.left[-1] == "2"


@pytest.mark.parametrize(
    "notes, words",
    [
        # Who has said nothing is missing; when all are there it is the network.
        ({0: "1", 2: "1"}, "worker 1 did not arrive"),
        ({0: "1", 1: "1", 2: "7"}, "all workers are there"),
    ],
)
def test_what_is_missing_is_named(watched, notes, words):
    watch, _, given_up, messages = watched(notes=notes)
    watch.begin("bucket 1 of 1")
    assert given_up.wait(SOON_SECONDS)
    assert words in messages[0]


def test_exchanges_that_end_have_no_deadline(watched):
    watch, link, given_up, _ = watched()
    link.timeout_seconds = 2.0
    for _ in range(8):
        number = watch.begin("bucket 1 of 1")
        assert not given_up.wait(0.3)
        watch.end(number)
    assert not given_up.wait(0.5)


def test_a_worker_that_left_ends_the_wait_before_the_deadline(watched):
    watch, link, given_up, messages = watched(news="worker 2 has come to the end")
    link.timeout_seconds = 100.0
    watch.begin("bucket 1 of 1")
    assert given_up.wait(SOON_SECONDS)
    assert "worker 2 has come to the end" in messages[0]


def test_who_leaves_after_a_failed_exchange_hears_why_first(watched):
    watch, link, given_up, messages = watched()
    link.timeout_seconds = 100.0
    watch.begin("bucket 1 of 1")
    link.is_news = "worker 2 has ended"
    watch.close()
    assert given_up.is_set()
    assert "worker 2 has ended" in messages[0]


def test_who_leaves_in_peace_does_not_wait(watched):
    watch, link, given_up, _ = watched()
    watch.end(watch.begin("bucket 1 of 1"))
    start = time.monotonic()
    watch.close()
    assert time.monotonic() - start < 0.1
    assert not given_up.is_set()


def test_a_lost_worker_ends_all_exchanges_once(watched):
    watch, link, given_up, messages = watched()
    (listener,) = link.listeners
    watch.begin("bucket 1 of 1")
    listener("worker 1 has ended")
    listener("worker 2 has ended")
    assert given_up.is_set()
    assert len(messages) == 1
    assert "for the others: worker 1 has ended" in messages[0]


def test_a_link_that_breaks_while_it_is_asked_is_no_end_of_the_watch(watched):
    watch, link, given_up, messages = watched(notes={0: "1", 1: "0", 2: "1"})
    answers = iter([WorkerLostError("gone"), None])

    def wait_for_notes(key, enough):
        answer = next(answers, None)
        if answer:
            raise answer
        return link.notes

    link.wait_for_notes = wait_for_notes
    watch.begin("bucket 1 of 1")
    assert given_up.wait(SOON_SECONDS)
    assert "worker 1 did not arrive" in messages[0]


def test_after_close_nothing_begins_and_the_thread_ends(watched):
    watch, _, given_up, _ = watched()
    watch.end(watch.begin("bucket 1 of 1"))
    watch.close()
    watch.close()
    watch._thread.join(60)
    assert not watch._thread.is_alive()
    with pytest.raises(CollectiveError, match=r"\(bucket 2 of 2\) was begun after"):
        watch.begin("bucket 2 of 2")
    assert not given_up.is_set()


def test_who_did_not_run_itself_does_not_call_the_others_late(watched, monkeypatch):
    class Clock:
        seconds = 0.0

        def __call__(self):
            return self.seconds

    clock = Clock()
    standstill = SuspendDetector(1.0, clock)
    monkeypatch.setattr(module, "boot_seconds", clock)
    monkeypatch.setattr(module, "SuspendDetector", lambda usual_seconds: standstill)
    looks = threading.Semaphore(0)
    look = standstill.look
    standstill.look = lambda: (looks.release(), look())[1]
    watch, link, given_up, messages = watched(notes={0: "1", 1: "0", 2: "1"})
    link.timeout_seconds = 5.0
    watch.begin("bucket 1 of 1")
    for seconds in (100.0, *[0.9] * 3):
        clock.seconds += seconds
        for _ in range(2):
            assert looks.acquire(timeout=60)
    assert not given_up.is_set()
    # Its own time does count.
    while not given_up.is_set():
        assert clock.seconds < 120.0
        clock.seconds += 0.9
        looks.acquire(timeout=1)
    assert "worker 1 did not arrive" in messages[0]
