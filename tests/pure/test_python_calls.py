"""The interpreter ends behind the calls that other threads are in."""

import subprocess
import sys
import threading
import traceback

import pytest

from tests.support.package_source import REPOSITORY
from tfdp.errors import WorkerLostError
from tfdp.hosts.python_calls import PythonCalls

SECONDS = 60.0


def test_calls_are_waited_for_and_errors_end_them():
    calls, may_end, is_in = PythonCalls(), threading.Event(), threading.Event()

    @calls.counted
    def call(word):
        """What it was."""
        is_in.set()
        may_end.wait(SECONDS)
        raise ValueError(word)

    assert call.__doc__ == "What it was."
    assert calls.wait_for_end(0.0)
    caught = []

    def run():
        try:
            call("own error")
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert is_in.wait(SECONDS)
    assert not calls.wait_for_end(0.05)
    may_end.set()
    assert calls.wait_for_end(SECONDS)
    thread.join()
    assert caught == ["own error"]


def test_an_error_of_tfdp_has_no_frames_and_causes_of_ours():
    def receive():
        raise ConnectionError("closed")

    @PythonCalls().counted
    def call():
        try:
            receive()
        except ConnectionError as error:
            raise WorkerLostError("worker 1 has ended") from error

    with pytest.raises(WorkerLostError, match="worker 1 has ended") as raised:
        call()
    told = "".join(traceback.format_exception(raised.value))
    assert "ConnectionError" not in told and "receive" not in told


# A thread of a library reads in Python, and what is to be dropped waits for it: as
# TensorFlow's iterators do.
PROGRAM = """
import atexit, sys, threading, time
from tfdp.hosts.python_calls import counted, let_calls_end_at_exit

let_calls_end_at_exit()
atexit.register(lambda: is_over.set())  # as a strategy that is closed at exit
is_over, is_in = threading.Event(), threading.Event()

@counted
def call():
    is_in.set()
    is_over.wait(60)
    time.sleep(0.3)
    print("call has ended", flush=True)

class Iterator:
    def __del__(self):
        print("iterator ends", sys.is_finalizing(), flush=True)

def main():
    iterator = Iterator()
    threading.Thread(target=call, daemon=True).start()
    is_in.wait(60)
    {end}

main()
"""


def run(end):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_what_an_error_has_kept_is_dropped_before_the_end():
    code, lines, told = run("raise ValueError('the first error')")
    assert code == 1 and "ValueError: the first error" in told
    assert lines == ["call has ended", "iterator ends False"]


def test_a_script_that_comes_to_its_end_waits_for_calls():
    code, lines, told = run("return")
    assert code == 0, told
    assert lines == ["iterator ends False", "call has ended"]
