"""Processes with a deadline: what they say, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tfdp.tools.processes.children import (
    Child,
    ProcessFailed,
    ask_child,
    ask_children,
    ended_together,
)

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
ANSWERS_ITS_RANK = """
import os, sys
from tfdp.tools.processes.children import answer
answer(sys.argv[1:], lambda request: os.environ["RANK"])
"""
# The last waits until the others wait.
WAITS_UNLESS_LAST = """
import json, os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(json.loads(sys.argv[1])["folder"])
if rank != "2":
    path = folder / f"part-{rank}"
    path.write_text(str(os.getpid()))
    path.rename(folder / f"told-{rank}")
    time.sleep(600)
while not all((folder / f"told-{other}").exists() for other in (0, 1)):
    time.sleep(0.01)
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


def module_of(tmp_path, monkeypatch, source):
    (tmp_path / "stand_in_module.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "stand_in_module"


def test_a_child_answers(tmp_path, monkeypatch):
    name = module_of(
        tmp_path,
        monkeypatch,
        "import json, sys\n"
        "open(sys.argv[2], 'w').write(json.dumps([json.loads(sys.argv[1]), 'x']))\n",
    )
    assert ask_child(name, {"a": 1}, 60) == [{"a": 1}, "x"]


@pytest.mark.parametrize(
    "source, seconds, word",
    [
        ("raise SystemExit('out of memory')", 60, "out of memory"),
        ("print('bye')", 60, "ended without a result\nbye"),
        ("import os; os.abort()", 60, "killed by signal 6"),
        ("import time; time.sleep(600)", 1, "no result within 1 s"),
    ],
)
def test_a_child_that_leaves_no_answer(tmp_path, monkeypatch, source, seconds, word):
    name = module_of(tmp_path, monkeypatch, source)
    with pytest.raises(ProcessFailed, match=word):
        ask_child(name, {}, seconds)


def test_what_failed_says_how(tmp_path, monkeypatch):
    name = module_of(tmp_path, monkeypatch, "raise SystemExit('mine')")
    with pytest.raises(ProcessFailed, match="^exit code 1\nmine$") as caught:
        ask_child(name, {}, SECONDS)
    assert not caught.value.took_too_long
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "none"))
    with pytest.raises(ProcessFailed, match="No module named"):
        ask_child(name, {}, SECONDS)


def test_variables_and_answers_are_each_childs_own(tmp_path, monkeypatch):
    name = module_of(tmp_path, monkeypatch, ANSWERS_ITS_RANK)
    children = [Child({**os.environ, "RANK": str(rank)}) for rank in range(3)]
    assert ask_children(name, {"a": 1}, SECONDS, children) == ["0", "1", "2"]
    assert ask_child(name, {}, SECONDS, RANK="7") == "7"


def test_one_of_several_that_fails_is_named_and_ends_the_others(tmp_path, monkeypatch):
    program = f"{WAITS_UNLESS_LAST}if rank == '2': raise SystemExit('mine')\n"
    name = module_of(tmp_path, monkeypatch, program)
    children = [Child({**os.environ, "RANK": str(rank)}) for rank in range(3)]
    with pytest.raises(ProcessFailed, match="^process 2 of 3: exit code 1\nmine$"):
        ask_children(name, {"folder": str(tmp_path)}, SECONDS, children)
    told = [tmp_path / f"told-{rank}" for rank in range(2)]
    assert all(ends(int(path.read_text("ascii"))) for path in told)


def test_those_that_are_missing_are_named(tmp_path, monkeypatch):
    source = "import os, time\nos.environ['RANK'] == '1' or time.sleep(600)\n"
    name = module_of(tmp_path, monkeypatch, source)
    children = [Child({**os.environ, "RANK": str(rank)}) for rank in range(3)]
    words = "^process 0, 2 of 3: no result within 2 s"
    with pytest.raises(ProcessFailed, match=words) as caught:
        ask_children(name, {}, 2, children)
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
        "from tfdp.tools.processes.children import Child, Children, ended_together\n"
        f"{SLOW_TO_START if when == 'while it starts' else ''}\n"
        f"with ended_together(), Children({str(tmp_path)!r}) as children:\n"
        f"    command = Child().command('-c', {WITH_A_CHILD!r}, {str(told)!r})\n"
        "    children.start(command, None)\n"
        "    children.wait(600)\n"
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
