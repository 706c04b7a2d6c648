"""Who did not run for a while says so, and accuses nobody of it."""

import socket
import threading

import pytest

from tfdp.hosts import membership as module
from tfdp.hosts.membership import Membership, SuspendDetector, boot_seconds

# Only there to end a hang.
HANG_SECONDS = 60


class Clock:
    """A clock that the test sets."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


def test_what_is_longer_than_usual_is_missed():
    clock = Clock()
    standstill = SuspendDetector(1.0, clock)
    missed = []
    for clock.seconds in (0.5, 1.5, 9.0, 9.2):
        missed.append(standstill.look())
    assert missed == [0.0, 0.0, 6.5, 0.0]
    assert standstill.seconds_within(5.0) == 7.5
    clock.seconds = 9.0 + 5.1
    standstill.look()
    clock.seconds = 9.0 + 5.2
    # That one is over for longer than was asked for; the last look was late, too.
    assert standstill.seconds_within(5.0) == pytest.approx(4.9)
    for clock.seconds in (15.0, 15.9, 16.8, 17.7, 18.6, 19.5):
        standstill.look()
    assert standstill.seconds_within(5.0) == 0.0


def test_a_standstill_that_nobody_has_looked_at_yet_counts():
    clock = Clock()
    standstill = SuspendDetector(1.0, clock)
    clock.seconds = 8.0
    assert standstill.seconds_within(5.0) == 8.0


def test_the_clock_goes_on():
    assert boot_seconds() <= boot_seconds()


class Sleeper:
    """A membership of worker 1 whose thread can be made to stand still.

    Worker 0 is the test. The time is a clock's: nothing here waits for it to pass.
    """

    def __init__(self, monkeypatch, silence_seconds):
        self.clock = Clock()
        monkeypatch.setattr(module, "boot_seconds", self.clock)
        standstill = SuspendDetector(module.USUAL_LOOK_SECONDS, self.clock)
        monkeypatch.setattr(module, "SuspendDetector", lambda usual_seconds: standstill)
        self.looks = threading.Semaphore(0)
        self.has_failed = threading.Event()
        self.worker_0, own = socket.socketpair()
        self.membership = Membership(
            1,
            2,
            {0: own},
            silence_seconds,
            self.has_failed.set,
            lambda missed_seconds: self.looks.release(),
        )

    def wait_for_look(self):
        """Until the thread has looked, from beginning to end, after this moment.

        Or until it has ended, because it found that a worker is lost.
        """
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(2):
            while not self.looks.acquire(timeout=0.1):
                if self.has_failed.is_set():
                    return


@pytest.fixture
def sleeper(monkeypatch):
    made = Sleeper(monkeypatch, silence_seconds=4.0)
    yield made
    made.membership.leave()
    made.worker_0.close()


def test_nobody_is_silent_while_this_worker_sleeps(sleeper):
    sleeper.wait_for_look()
    sleeper.clock.seconds += 100.0
    sleeper.wait_for_look()
    assert sleeper.membership.failure is None


def test_who_is_silent_afterwards_is_noticed(sleeper):
    sleeper.clock.seconds += 100.0
    seconds = 0.0
    while not sleeper.has_failed.is_set():
        assert seconds < 10.0
        seconds += 0.9
        sleeper.clock.seconds += 0.9
        sleeper.wait_for_look()
    assert "worker 0 was silent for 4 seconds" in sleeper.membership.failure


@pytest.mark.parametrize(
    "told, words",
    [
        # The others have given it up; or they are gone, because they did.
        (
            b'{"failure": "worker 1 was silent for 4 seconds"}\n',
            "worker 1 was silent for 4 seconds",
        ),
        (b"", "worker 0 has ended"),
    ],
)
def test_what_it_finds_on_waking_is_said_with_its_own_sleep(sleeper, told, words):
    sleeper.wait_for_look()
    sleeper.clock.seconds += 7.3
    sleeper.worker_0.sendall(told)
    if not told:
        sleeper.worker_0.shutdown(socket.SHUT_RDWR)
    assert sleeper.has_failed.wait(HANG_SECONDS)
    failure = sleeper.membership.failure
    assert failure.startswith("worker 1 itself did not run for 7.3 seconds"), failure
    assert failure.endswith(words) or words in failure


def test_a_failure_long_after_a_sleep_has_nothing_to_do_with_it(sleeper):
    sleeper.clock.seconds += 7.3
    for _ in range(6):
        sleeper.wait_for_look()
        sleeper.worker_0.sendall(b"{}\n")
        sleeper.clock.seconds += 0.9
    sleeper.wait_for_look()
    sleeper.worker_0.sendall(b'{"failure": "worker 0 has ended"}\n')
    assert sleeper.has_failed.wait(HANG_SECONDS)
    assert sleeper.membership.failure == "worker 0 has ended"


def test_a_wait_for_words_ends_when_it_is_closed(sleeper):
    found = []

    def wait():
        with pytest.raises(ConnectionError) as caught:
            sleeper.membership.wait_for_notes("key", lambda notes: False, 600.0)
        found.append(caught)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    sleeper.wait_for_look()
    sleeper.membership.leave()
    thread.join(HANG_SECONDS)
    assert found
