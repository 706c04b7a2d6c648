"""`tfdp launch` with real processes: small scripts, no TensorFlow in any of them."""

import os
import signal
import socket
import sys
import time

import pytest

from tests.support.launching import (
    SLACK_SECONDS,
    Launches,
    is_alive,
    pids,
    program,
    ssh,
    wait_until,
)
from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS


@pytest.fixture
def launcher(tmp_path):
    """Starts `tfdp launch OPTIONS script.py`; kills what is left at the end."""
    with Launches(tmp_path) as launches:
        yield launches.start


@pytest.fixture
def launch(tmp_path):
    """The same, to its end: (exit code, stdout lines, stderr lines, seconds)."""
    with Launches(tmp_path) as launches:
        yield launches.run


def test_an_option_after_the_program_is_told(launch):
    code, out, err, _ = launch("print(*sys.argv[1:])", arguments=["--workers", "2"])
    assert code == 0 and out == ["[0] --workers 2"]
    assert "Options of tfdp launch come before the program." in err[0]


def test_workers_meet_and_their_lines_carry_their_rank(launch):
    script = """
print("arguments", *sys.argv[1:])
print("key", os.environ["TFDP_JOB_KEY"])
if RANK == 0:
    with socket.create_server((HOST, int(PORT))) as server:
        note("open")
        for _ in range(WORKERS - 1):
            peer = server.accept()[0]
            print("met", peer.recv(9).decode())
else:
    wait_for("open")
    socket.create_connection((HOST, int(PORT))).sendall(f"worker {RANK}".encode())
    print("sent", file=sys.stderr)
"""
    code, out, err, _ = launch(script, "--workers", 3, arguments=["--workers", "9"])
    assert code == 0, err
    keys = {line.split()[2] for line in out if line[3:].startswith(" key ")}
    assert len(keys) == 1 and len(keys.pop()) == 64
    assert sorted(line for line in out if line[3:8] != " key ") == [
        "[0] arguments --workers 9",
        "[0] met worker 1",
        "[0] met worker 2",
        "[1] arguments --workers 9",
        "[2] arguments --workers 9",
    ]
    assert sorted(err) == ["[1] sent", "[2] sent"]


def test_the_first_failure_is_named_and_stops_the_others(launch):
    script = """
if RANK != 1:
    note(f"up{RANK}")
    time.sleep(600)
wait_for("up0", "up2")
for line in range(15):
    print("line", line)
sys.exit(3)
"""
    code, _, err, seconds = launch(script, "--workers", 3)
    report = err[-13:]
    assert code == 3
    assert report[0].startswith("tfdp launch: worker 1 failed first")
    assert report[0].endswith("exit code 3. Its last lines:")
    assert report[1:11] == [f"    line {line}" for line in range(5, 15)]
    assert report[11:] == [
        "tfdp launch: worker 0 was stopped: killed by SIGTERM",
        "tfdp launch: worker 2 was stopped: killed by SIGTERM",
    ]
    assert seconds < SLACK_SECONDS


def test_a_killed_worker_is_the_cause_and_not_its_peer(launch):
    # Worker 0 fails in the very moment in which its connection to worker 1 ends.
    script = """
if RANK == 0:
    with socket.create_server((HOST, int(PORT))) as server:
        note("open")
        peer = server.accept()[0]
        peer.recv(1)
        os._exit(1)
wait_for("open")
peer = socket.create_connection((HOST, int(PORT)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, err, _ = launch(script, "--workers", 2)
    assert code == 128 + signal.SIGKILL
    assert "worker 1 failed first" in err[0]
    assert "killed by SIGKILL (often out of memory; see dmesg)." in err[0]


def test_a_killed_worker_of_another_machine_may_have_had_no_memory(launch, tmp_path):
    script = "os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err, _ = launch(script, "--hosts", "alpha", path=ssh(tmp_path))
    assert code == 128 + signal.SIGKILL
    assert "exit code 137 (often out of memory; see dmesg there)." in err[0]


def test_a_cause_that_shows_after_its_consequence_is_named(launch, tmp_path):
    # Worker 0 has failed, and was seen to, before worker 1 is killed: with the time
    # for that stretched from 0.2 to 1.5 s, so that a busy machine changes nothing.
    script = """
if RANK == 0:
    sys.exit(1)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    patches = ["from tfdp.launch import cause", "cause.CAUSE_SECONDS = 1.5"]
    with Launches(tmp_path, patches) as launches:
        code, _, err, _ = launches.run(script, "--workers", 2)
    assert code == 128 + signal.SIGKILL
    assert "worker 1 failed first" in err[0]
    assert "tfdp launch: worker 0 ended by itself: exit code 1" in err


# Worker 1 fails, worker 0 because of it, and worker 0 is the first to end.
LOSING = """
import atexit
from tfdp.errors import WorkerLostError
from tfdp.cluster import crash_report

crash_report.listen()
if RANK == 0:
    wait_for("raised")
    atexit.register(note, "lost")
    raise WorkerLostError("Worker 0 waited for the others: worker 1 has raised")
"""
RAISING = """
def late_end():
    note("raised")
    wait_for("lost")
    time.sleep(1.0)

atexit.register(late_end)
raise ValueError("the first\\nerror")
"""
SILENT = """
note("raised")
wait_for("lost")
time.sleep(1.0)
os._exit(7)
"""


@pytest.mark.parametrize("where", ["here", "ssh"])
@pytest.mark.parametrize("how", ["raises", "dies silently"])
def test_who_lost_another_is_not_the_cause(launch, tmp_path, where, how):
    raises = how == "raises"
    options, path = ["--workers", 2], None
    if where == "ssh":
        options, path = ["--hosts", "alpha,beta"], ssh(tmp_path)
    script = LOSING + (RAISING if raises else SILENT)
    code, _, err, _ = launch(script, *options, path=path)
    start = next(n for n, line in enumerate(err) if line.startswith("tfdp launch"))
    report = err[start:]
    assert report[0].startswith("tfdp launch: worker 1 failed first")
    assert report[-1] == (
        "tfdp launch: worker 0 ended by itself: exit code 1, as it had lost another"
    )
    if raises:
        assert code == 1
        assert "ValueError: the first error (exit code 1). Its traceback" in report[0]
        assert report[-3:-1] == ["    ValueError: the first", "    error"]
        # As Python prints it, and once: what travels by ssh is not shown.
        assert [line for line in err if "last words" in line] == []
    else:
        assert code == 7
        assert report[0].endswith("exit code 7. Its last lines:")


# Worker 1 ends with 0, by what is said before it.
LEAVING = """
from tfdp.cluster import progress
from tfdp.errors import WorkerLostError
from tfdp.cluster import crash_report

crash_report.listen()
{before}
if RANK == 1:
    print("leaves")
    atexit.register(note, "left")
    sys.exit(0)
{then}
"""
MEETS, WAITS = "progress.note_strategy()", 'wait_for("left")\n'
LOSES = 'raise WorkerLostError("Worker 0 waited for the others: worker {} has ended")'
RIGHT = {
    # What it did before, and what worker 0 does then -> what is said of worker 1.
    "before it joined": ("", f"{MEETS}; time.sleep(600)", "it never made a strategy"),
    "before a second strategy": (
        MEETS,
        f"{MEETS}; time.sleep(600)",
        "it made 1 of 2 strategies",
    ),
    "in the middle": (MEETS, LOSES.format(1), "worker 0 still needed it"),
    "after all have trained": (MEETS, "print('saves')", None),
    "another was lost": (MEETS, LOSES.format(2), "worker 0 failed first"),
    # Such as a search for the best settings, one on each worker.
    "no strategy at all": ("", "print('goes on')", None),
}


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("where", ["here", "ssh"])
@pytest.mark.parametrize("when", RIGHT)
def test_who_ends_with_0_while_another_needs_it_is_named(tmp_path, where, when):
    before, then, said = RIGHT[when]
    options, path = ["--workers", 2], None
    if where == "ssh":
        options, path = ["--hosts", "alpha,beta"], ssh(tmp_path)
    patches = ["from tfdp.launch import cause", "cause.LOST_ONE_SECONDS = 0.3"]
    script = "import atexit\n" + LEAVING.format(before=before, then=WAITS + then)
    with Launches(tmp_path, patches) as launches:
        code, _, err, seconds = launches.run(script, *options, path=path)
    assert seconds < SLACK_SECONDS
    report = [line for line in err if line.startswith("tfdp launch: ")]
    if said is None:
        assert (code, report) == (0, [])
        return
    assert code == 1
    assert said in report[0]
    if when != "another was lost":
        assert report[0].startswith("tfdp launch: worker 1 ended with exit code 0 ")
        assert "    leaves" in err
        assert report[1].startswith("tfdp launch: worker 0 ")


def test_a_worker_that_will_not_end_is_killed_after_the_grace_time(launch):
    script = """
if RANK == 0:
    signal.signal(signal.SIGTERM, lambda *_: note("asked"))
    note("up")
    while True:
        time.sleep(0.1)
wait_for("up")
sys.exit(7)
"""
    code, _, err, seconds = launch(script, "--workers", 2, "--grace-seconds", "0.5")
    assert code == 7
    assert err[-1] == (
        "tfdp launch: worker 0 did not end within 0.5 s and was killed "
        "(--grace-seconds gives it longer to save)"
    )
    assert 0.5 < seconds < 0.5 + SLACK_SECONDS


def test_a_stopped_worker_is_woken_to_end(launch, tmp_path):
    script = """
if RANK == 0:
    signal.signal(signal.SIGTERM, lambda *_: (note("asked"), sys.exit(5)))
    note("up", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
wait_for("up")
time.sleep(0.2)
sys.exit(7)
"""
    code, _, err, seconds = launch(script, "--workers", 2, "--grace-seconds", "400")
    assert code == 7
    assert err[-1] == "tfdp launch: worker 0 was stopped: exit code 5"
    assert (tmp_path / "asked").exists()
    assert seconds < SLACK_SECONDS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(launcher, tmp_path, number):
    script = """
def end(number, frame):
    print("got", signal.Signals(number).name)
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, end)
note(f"up{RANK}")
time.sleep(600)
"""
    process = launcher(script, "--workers", 2)
    assert wait_until(lambda: all((tmp_path / f"up{i}").exists() for i in range(2)))
    process.send_signal(number)
    out, err = process.communicate(timeout=SLACK_SECONDS)
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    assert sorted(out.splitlines()) == [f"[0] got {name}", f"[1] got {name}"]
    assert err.splitlines()[0] == f"tfdp launch: stopped by {name}"


def test_a_second_signal_ends_the_patience(launcher, tmp_path):
    script = """
signal.signal(signal.SIGINT, lambda *_: note(f"asked{RANK}"))
note(f"up{RANK}")
while True:
    time.sleep(0.1)
"""
    process = launcher(script, "--workers", 1, "--grace-seconds", "600")
    assert wait_until(lambda: (tmp_path / "up0").exists())
    process.send_signal(signal.SIGINT)
    assert wait_until(lambda: (tmp_path / "asked0").exists())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SLACK_SECONDS)
    assert process.returncode == 128 + signal.SIGINT


# A worker and a grandchild that holds on to its output; both ignore SIGTERM.
FAMILY = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
note(f"worker{RANK}", os.getpid())
note(f"child{RANK}", child.pid)
"""
NAMES = ["worker0", "worker1", "child0", "child1"]


def test_no_process_outlives_a_killed_launcher(launcher, tmp_path):
    process = launcher(
        FAMILY + "time.sleep(600)", "--workers", 2, "--grace-seconds", "0.3"
    )
    family = pids(tmp_path, *NAMES)
    assert all(map(is_alive, family))
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(is_alive, family)))
    # Nor anything of its own.
    assert wait_until(lambda: not any((tmp_path / "own").iterdir()))


def test_what_workers_leave_behind_is_stopped(launch, tmp_path):
    code, _, err, seconds = launch(FAMILY, "--workers", 2, "--grace-seconds", "0.3")
    assert (code, err) == (0, [])
    assert not any(map(is_alive, pids(tmp_path, *NAMES)))
    assert seconds < SLACK_SECONDS


def test_a_reader_that_leaves_ends_the_workers(launcher, tmp_path):
    script = FAMILY + "while True:\n    print('more')\n    time.sleep(0.01)\n"
    process = launcher(script, "--workers", 2)
    family = pids(tmp_path, *NAMES)
    process.stdout.close()
    assert process.wait(SLACK_SECONDS) != 0
    assert wait_until(lambda: not any(map(is_alive, family)))


SAVES_WHEN_ASKED = """
def save(*_):
    note(f"saved{RANK}")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
note(f"up{RANK}")
while not os.path.exists(str(FOLDER / "done")):
    print("more", flush=True)
    time.sleep(0.01)
"""


def test_workers_are_asked_to_end_where_nobody_reads(launcher, tmp_path):
    process = launcher(SAVES_WHEN_ASKED, "--workers", 2)
    assert wait_until(lambda: all((tmp_path / f"up{i}").exists() for i in (0, 1)), 60)
    process.stdout.close()
    assert process.wait(SLACK_SECONDS) == 141
    assert all((tmp_path / f"saved{i}").exists() for i in (0, 1))


def test_a_log_that_cannot_be_written_ends_nobody(launch, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-0.log").symlink_to("/dev/full")
    options = "--workers", 2, "--log-dir", logs
    code, out, err, _ = launch("print('here', RANK)", *options)
    assert (code, sorted(out)) == (0, ["[0] here 0", "[1] here 1"])
    assert len(err) == 1 and "worker-0.log cannot be written (No space" in err[0]
    assert "here 1" in (logs / "worker-1.log").read_text()


# Notes when nobody has taken anything from its output for a while.
TALKING = """
import select
note(f"up{RANK}", os.getpid())
while True:
    while not select.select([], [1], [], 3.0)[1]:
        note(f"full{RANK}")
    os.write(1, b"more and more" * 100 + b"\\n")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_nobody_reads_obeys(launcher, tmp_path, number):
    process = launcher(TALKING, "--workers", 2)
    family = pids(tmp_path, "up0", "up1")
    assert wait_until(lambda: all((tmp_path / f"full{i}").exists() for i in (0, 1)), 60)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not any(map(is_alive, family))


def test_every_line_comes_to_a_slow_reader(launcher, tmp_path):
    # More than pipes hold and than the launcher keeps.
    script = """
for line in range(3000):
    print(line, "x" * 1000)
    note("begun")
print("the last one", file=sys.stderr)
sys.exit(3)
"""
    process = launcher(script)
    assert wait_until(lambda: (tmp_path / "begun").exists(), 60)
    time.sleep(1.0)
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3
    assert out.splitlines() == [f"[0] {line} {'x' * 1000}" for line in range(3000)]
    assert "[0] the last one" in err
    assert "worker 0 failed first" in err


def test_a_port_that_is_taken_is_refused(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err, _ = launch("print('ran')", "--port", port)
    assert (code, out) == (1, [])
    assert err[0].startswith(f"tfdp launch: --port {port}: the port is taken")


def test_the_port_is_free_afterwards(launch):
    script = """
server = socket.create_server((HOST, int(PORT)))
print(PORT)
os.kill(os.getpid(), signal.SIGKILL)
"""
    _, out, _, _ = launch(script)
    port = int(out[0].removeprefix("[0] "))
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_hosts_run_one_worker_each(launch, tmp_path):
    script = """
print(WORKERS, HOST, PORT, os.getcwd(), os.environ["TFDP_DEVICES_PER_WORKER"])
print("key", os.environ["TFDP_JOB_KEY"])
sys.exit(4 if RANK == 1 else 0)
"""
    options = ["--hosts", "me@alpha,beta", "--port", "2345", "--devices-per-worker", 2]
    code, out, err, _ = launch(script, *options, path=ssh(tmp_path))
    assert code == 4
    assert f"[1] 2 alpha 2345 {REPOSITORY} 2" in out
    assert err[0].startswith("tfdp launch: worker 1 failed first")
    called = [path.read_text() for path in tmp_path.glob("ssh-*")]
    assert sorted(call.split()[8] for call in called) == ["beta", "me@alpha"]
    # Both have the same key, which is on nobody's command line.
    (key,) = {line.split()[2] for line in out if line[3:].startswith(" key ")}
    assert len(key) == 64 and not any(key in call for call in called)


@pytest.mark.parametrize("who", ["launcher", "connection"])
def test_a_remote_worker_ends_with_its_connection(launcher, tmp_path, who):
    process = launcher(
        FAMILY + "time.sleep(600)",
        *("--hosts", "alpha", "--grace-seconds", "0.3"),
        path=ssh(tmp_path),
    )
    family = pids(tmp_path, "worker0", "child0")
    (called,) = tmp_path.glob("ssh-*")
    connection = int(called.name.removeprefix("ssh-"))
    if who == "launcher":
        process.kill()
    else:
        os.kill(connection, signal.SIGKILL)
    process.wait(SLACK_SECONDS)
    assert wait_until(lambda: not any(map(is_alive, family)))


def test_slurm_and_mpi_get_the_program(launch, tmp_path):
    for name in ("srun", "mpiexec"):
        text = f'#!/bin/sh\necho {name} "$@"\necho "$TFDP_JOB_KEY"\nexit 6\n'
        program(tmp_path / "bin", name, text)
    for option, name in (("--slurm", "srun"), ("--mpi", "mpiexec")):
        code, out, _, _ = launch(
            "", option, "--workers", 2, arguments=["-x"], path=tmp_path / "bin"
        )
        assert code == 6
        assert out[0].startswith(f"{name} -")
        assert out[0].endswith(f"{sys.executable} {tmp_path / 'script.py'} -x")
        # srun hands variables on to its tasks; MPI brings a key itself.
        assert len(out[1]) == {"srun": 64, "mpiexec": 0}[name]


def test_a_limit_of_open_files_is_named(tmp_path):
    patches = [
        "import resource",
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))",
    ]
    with Launches(tmp_path, patches) as launches:
        code, _, err, _ = launches.run("", "--workers", 2)
    assert code == 1
    assert any("Too many open files" in line and "ulimit -n" in line for line in err), (
        err
    )
    assert not any("Traceback" in line for line in err)
