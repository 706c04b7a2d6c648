"""What `make test` runs side by side."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import both_halves
from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS

LEAVES = "import sys; print('said'); sys.exit({})"


@pytest.mark.parametrize("codes, passed", [((0, 0), True), ((0, 1), False)])
def test_lines_are_named_and_one_failure_is_a_failure(capfd, codes, passed):
    commands = {
        name: [sys.executable, "-c", LEAVES.format(code)]
        for name, code in zip(("one", "two"), codes, strict=True)
    }
    assert both_halves.run(commands) == passed
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["one       | said", "two       | said"]


def test_a_run_says_after_a_fifth_of_each_half_how_long_it_will_take(
    monkeypatch, capsys
):
    now = 0.0
    monkeypatch.setattr(both_halves.time, "monotonic", lambda: now)
    estimate = both_halves.Estimate(["one", "two"])

    def print_dots(name, dots):
        for end in range(1, len(dots) + 1):
            estimate.note(name, dots[:end])

    estimate.note("one", "2 workers [20 items]\n")
    now = 61.0
    print_dots("one", ".s.F")
    assert not capsys.readouterr().out  # nothing is known of the other
    estimate.note("two", "1 worker [8 items]\n")
    estimate.note("two", "gw0 [8]")
    print_dots("two", ".")
    assert not capsys.readouterr().out  # one slow row says little
    now = 75.0
    print_dots("two", "x")
    said = "75 s: one 20%, two 25%; about 5 more minutes\n"
    assert capsys.readouterr().out == said


def test_every_folder_of_tests_is_in_one_half():
    folders = {
        path.parent.relative_to(REPOSITORY).as_posix()
        for path in REPOSITORY.joinpath("tests").glob("*/test_*.py")
    }
    halves = [folder for half in both_halves.HALVES.values() for folder in half]
    assert sorted(halves) == sorted(folders)


# Each half says its process and waits.
ENDED = """
import sys
import time
from tests import both_halves
wait = "import os, time; print(os.getpid(), flush=True); time.sleep(900)"
both_halves.command_of = lambda half, jobs: [sys.executable, "-c", wait]
both_halves.jobs.memory_bytes = lambda: 2**50
both_halves.main(["--jobs", "1", "--jobs-alone", "1"])
"""


def test_who_is_ended_ends_both():
    with subprocess.Popen(
        [sys.executable, "-c", ENDED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        children = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.terminate()
        assert process.wait(timeout=900) == 128 + signal.SIGTERM
    # They have ended; who gets an orphan may still have to ask for its status.
    end = time.monotonic() + LONGEST_SECONDS
    while any(exists(child) for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert [child for child in children if exists(child)] == []


def exists(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
