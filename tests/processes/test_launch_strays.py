"""What workers start in sessions of their own ends with `tfdp launch`, and no other."""

import os
import signal

import pytest

from tests.support.launching import Launches, is_alive, pids, wait_until
from tests.support.workers import LONGEST_SECONDS
from tfdp.cluster import crash_report
from tfdp.launch import guard


@pytest.fixture
def launches(tmp_path):
    with Launches(tmp_path) as launches:
        yield launches


STRAYS = """
def stray(name, lines, **more):
    lines = "import signal, time; " + lines + "; time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", lines], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        **more,
    )
    note(f"{name}{RANK}", child.pid)

stray("willing", "pass")
stray("unwilling", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
# As after `setsid` twice: nobody's child any more.
if os.fork() == 0:
    os.setsid()
    stray("grandchild", "pass")
    os._exit(0)
os.wait()
freed = {name: v for name, v in os.environ.items() if name != "TFDP_LAST_WORDS"}
stray("freed", "pass", env=freed)
"""
STRAY_NAMES = [
    f"{name}{rank}"
    for name in ("willing", "unwilling", "grandchild")
    for rank in range(2)
]


def freed(folder):
    """That those who asked for it run on; ends them."""
    for pid in pids(folder, "freed0", "freed1"):
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)


def test_what_has_a_session_of_its_own_is_stopped(launches, tmp_path):
    code, _, err, _ = launches.run(STRAYS, "--workers", 2, "--grace-seconds", "0.3")
    strays = pids(tmp_path, *STRAY_NAMES)
    freed(tmp_path)
    assert not any(map(is_alive, strays))
    assert code == 0
    assert err == [
        "tfdp launch: stops 6 processes that workers left in sessions of their own"
    ]


def test_it_ends_with_a_killed_launcher(launches, tmp_path):
    process = launches.start(
        STRAYS + "time.sleep(600)", "--workers", 2, "--grace-seconds", "0.3"
    )
    strays = pids(tmp_path, *STRAY_NAMES, "freed0", "freed1")[:-2]
    assert all(map(is_alive, strays))
    process.kill()
    process.wait()
    gone = wait_until(lambda: not any(map(is_alive, strays)))
    freed(tmp_path)
    assert gone


def test_strays_of_another_launch_are_left_alone(launches, tmp_path):
    (tmp_path / "other").mkdir()
    with Launches(tmp_path / "other") as other:
        process = other.start(
            STRAYS + "time.sleep(600)", "--workers", 2, "--grace-seconds", "0.3"
        )
        strays = pids(tmp_path / "other", *STRAY_NAMES, "freed0", "freed1")[:-2]
        options = ("--workers", 2, "--grace-seconds", "0.3")
        assert launches.run(STRAYS, *options)[0] == 0
        freed(tmp_path)
        assert all(map(is_alive, strays))
        process.send_signal(signal.SIGTERM)
        process.wait(LONGEST_SECONDS)
        freed(tmp_path / "other")
        assert not any(map(is_alive, strays))


def test_the_guard_knows_where_workers_find_the_folder():
    """It runs as a script, which imports nothing of the package."""
    assert guard.FOLDER_VARIABLE == crash_report.FOLDER_VARIABLE
