"""Processes with a deadline: what they say, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tfdp.tools.bench.python_process import ProcessFailed, ended_together, run_python

SECONDS = 60
# It starts one that ignores SIGTERM, writes down both, and waits with it.
WITH_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE)
child.stdout.readline()
with open(sys.argv[1] + ".part", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
# On busy cores it may run for a while before `Popen` returns.
SLOW_TO_START = """
import subprocess, time
class Slow(subprocess.Popen):
    def _execute_child(self, *args, **kwargs):
        super()._execute_child(*args, **kwargs)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            time.sleep(0.01)
subprocess.Popen = Slow
"""


def is_running(process_id):
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(process_id):
    until = time.monotonic() + SECONDS
    while is_running(process_id) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_running(process_id)


def test_the_last_lines_come_back():
    program = "import os; print('a'); print(os.environ['MINE'], end='')"
    assert run_python(["-c", program], SECONDS, MINE="b") == ["a", "b"]


def test_what_failed_says_how():
    with pytest.raises(ProcessFailed, match="exit code 1\nmine") as caught:
        run_python(["-c", "raise SystemExit('mine')"], SECONDS)
    assert not caught.value.took_too_long
    with pytest.raises(ProcessFailed, match="killed by signal 9"):
        run_python(["-c", "import os; os.kill(os.getpid(), 9)"], SECONDS)


def test_a_deadline_is_kept():
    with pytest.raises(ProcessFailed, match="no result within 0.1 s") as caught:
        run_python(["-c", "import time; time.sleep(600)"], 0.1)
    assert caught.value.took_too_long


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("when", ["while it waits", "while it starts"])
def test_nothing_is_left_when_who_asked_ends(tmp_path, number, when):
    """The process is in a session of its own: nobody else would tell it."""
    told = tmp_path / "told"
    asks = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may have nohup
        "from tfdp.tools.bench.python_process import run_python\n"
        f"{SLOW_TO_START if when == 'while it starts' else ''}\n"
        f"run_python(['-c', {WITH_A_CHILD!r}, {str(told)!r}], 600)"
    )
    asking = subprocess.Popen([sys.executable, "-c", asks], stderr=subprocess.PIPE)
    until = time.monotonic() + SECONDS
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)
    asking.send_signal(number)
    _, error = asking.communicate(timeout=SECONDS)
    assert asking.returncode != 0
    left = [each for each in told.read_text("ascii").split() if not ends(int(each))]
    assert not left, (asking.returncode, error)


def test_signals_that_somebody_hears_stay_theirs():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    try:
        with ended_together():
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
        after = signal.signal(signal.SIGHUP, hangup)
    assert after is signal.SIG_DFL
