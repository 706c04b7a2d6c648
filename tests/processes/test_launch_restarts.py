"""`tfdp launch --max-restarts` with real processes: scripts without TensorFlow."""

import signal
import socket
import time

import pytest

from tests.support.launching import (
    SLACK_SECONDS,
    Launches,
    is_alive,
    lines_until,
    pids,
    ssh,
    wait_until,
)
from tests.support.workers import LONGEST_SECONDS
from tfdp.cluster import START_AGAIN

QUICK = [
    "from tfdp.launch import restart_policy",
    "restart_policy.FIRST_WAIT_SECONDS = 0.01",
]
ENDLESS = [
    "from tfdp.launch import restart_policy",
    "restart_policy.FIRST_WAIT_SECONDS = restart_policy.LONGEST_WAIT_SECONDS = 6000.0",
]
# Prepended to the scripts: which start this is, and the notes of a training loop.
START = """
from tfdp.cluster import START_AGAIN, progress, restarts
RESTARTS = restarts()
"""


@pytest.fixture
def launches(tmp_path):
    """Launchers that wait 0.01 s and not a second before the first restart."""
    with Launches(tmp_path, QUICK) as launches:
        yield launches
        assert not launches.own.exists() or not any(launches.own.iterdir())


def own_lines(err):
    mark = "tfdp launch: "
    return [line.removeprefix(mark) for line in err if line.startswith(mark)]


def starts(out):
    return sorted(line[4:] for line in out if line[4:].startswith("start"))


def test_all_start_again_and_go_on(launches):
    script = """
print("start", RESTARTS, PORT, os.environ["TFDP_JOB_KEY"])
if RESTARTS == 0:
    progress.note_resumed(0)
    progress.note_saved(1200)
    progress.note_step(1234)
    note(f"up{RANK}")
    wait_for("up0", "up1")
    if RANK == 1:
        raise ValueError("no luck")
    time.sleep(600)
progress.note_resumed(1200)
print("done")
"""
    options = ["--workers", 2, "--max-restarts", 3]
    code, out, err, _ = launches.run(START + script, *options)
    assert code == 0, err
    # Both workers, the same ranks; another port and another key.
    first, same, second, again = (line.split()[1:] for line in starts(out))
    assert first == same and second == again
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] != second[1] and first[2] != second[2]
    assert {"[0] done", "[1] done"} <= set(out)
    assert "[1] ValueError: no luck" in err
    said = own_lines(err)
    assert said[0].startswith("worker 1 failed first")
    assert said[1] == "worker 0 was stopped: killed by SIGTERM"
    assert said[2] == "worker 1 failed at step 1234"
    assert said[3].startswith("starts again in 0.0 s, from step 1200 (restart 1 of 3)")
    assert said[4].startswith("goes on from step 1200; lost 34 steps and ")
    assert said[5].startswith("ended well after 1 restart; lost ")
    for port in (first[1], second[1]):
        with socket.create_server(("127.0.0.1", int(port))):
            pass


@pytest.mark.parametrize(
    "notes, restarts, expected",
    [
        ("", 0, "as nothing was saved: with tfdp.callbacks.Checkpoint(folder) in fit"),
        ("", 1, "as nothing was saved: with tfdp.callbacks.Checkpoint(folder) in fit"),
        (
            "progress.note_saved(40)",
            0,
            "step 40 is saved: the same command goes on from there, and with "
            "--max-restarts 3 it does so by itself",
        ),
        ("progress.note_saved(40)", 1, ""),
        ("progress.note_resumed(0)", 0, ""),
    ],
)
def test_what_a_failure_cost_is_said_once(launches, notes, restarts, expected):
    script = f"""
progress.note_strategy()
{notes}
note(f"up{{RANK}}")
wait_for("up0", "up1")
if RANK == 1:
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
    options = ["--workers", 2, "--max-restarts", restarts]
    _, _, err, _ = launches.run(START + script, *options)
    said = [line for line in own_lines(err) if "saved:" in line or "lost," in line]
    assert len(said) == bool(expected), said
    assert expected in "".join(said)
    assert ("by itself" in "".join(said)) == bool(expected and not restarts)


def test_a_stop_names_the_saved_step(launches):
    script = """
progress.note_saved(122)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
note(f"up{RANK}", os.getpid())
time.sleep(600)
"""
    process = launches.start(START + script, "--workers", 2)
    pids(launches.folder, "up0", "up1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SLACK_SECONDS)
    stopped = "stopped by SIGTERM; step 122 is saved, and the same command goes on"
    assert own_lines(err.splitlines())[0].startswith(stopped)
    assert process.returncode == START_AGAIN


@pytest.mark.parametrize("knows_steps", [False, True])
def test_the_same_failure_twice_ends_it(launches, knows_steps):
    # The numbers in a message are others each time.
    notes = "progress.note_step(7)\n" if knows_steps else ""
    script = notes + 'print("start"); raise ValueError(f"bad sample at {id(print)}")'
    code, out, err, _ = launches.run(START + script, "--max-restarts", 9)
    assert code == 1
    assert starts(out) == ["start", "start"]
    where = " at step 7" if knows_steps else ""
    reason = f"not started again: the same twice in a row{where}, with nothing gained"
    assert own_lines(err)[-1].startswith(reason)
    assert "ValueError: bad sample" in own_lines(err)[-1]


def test_failures_that_get_further_use_up_the_restarts(launches):
    script = """
print("start")
progress.note_step(10 + RESTARTS)
raise ValueError("always")
"""
    code, out, err, _ = launches.run(START + script, "--max-restarts", 2)
    assert code == 1
    assert len(starts(out)) == 3
    assert own_lines(err)[-1] == "not started again: 2 of 2 restarts are used up"


def test_failures_of_other_causes_are_not_the_same(launches):
    # Without last words a worker is told by its last line, TensorFlow's stack left out.
    script = """
print("start")
cause = ["no row", "no column", "no row"][RESTARTS]
print(f"{cause}\\n\\t [[{{{{node a}}}}]] [Op:f]", file=sys.stderr)
sys.exit(1)
"""
    code, out, err, _ = launches.run(START + script, "--max-restarts", 2)
    assert code == 1
    assert len(starts(out)) == 3
    assert own_lines(err)[-1] == "not started again: 2 of 2 restarts are used up"


def test_without_the_option_nothing_starts_again(launches):
    code, out, err, _ = launches.run(START + 'print("start"); sys.exit(3)')
    assert (code, len(starts(out)), len(own_lines(err))) == (3, 1, 1)


def test_who_has_left_too_early_starts_again_as_after_any_failure(launches):
    script = """
print("start")
if RANK == 0:
    progress.note_strategy()
    time.sleep(0 if RESTARTS == 2 else 600)
elif RESTARTS == 2:
    progress.note_strategy()
elif RESTARTS == 1:
    raise ValueError("another failure")
"""
    options = ["--workers", 2, "--max-restarts", 2]
    code, out, err, _ = launches.run(START + script, *options)
    assert (code, len(starts(out))) == (0, 6), err
    again = script.replace("RESTARTS == 1", "False")
    code, out, err, _ = launches.run(START + again, *options)
    assert (code, len(starts(out))) == (1, 4), err
    assert own_lines(err)[-1].startswith("not started again: the same twice in a row")


def test_a_killed_worker_starts_again_with_its_peers(launches):
    script = """
print("start")
note(f"{RESTARTS}-{RANK}", os.getpid())
if RESTARTS < 2:
    wait_for(f"{RESTARTS}-0", f"{RESTARTS}-1")
    if RANK == RESTARTS:  # by turns
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    options = ["--workers", 2, "--max-restarts", 2]
    code, out, err, _ = launches.run(START + script, *options)
    assert code == 0, err
    assert len(starts(out)) == 6
    names = [f"{start}-{rank}" for start in range(3) for rank in range(2)]
    assert not any(map(is_alive, pids(launches.folder, *names)))


def test_every_line_comes_over_the_starts_to_a_slow_reader(launches):
    # More than pipes hold and than the launcher keeps, after a start that was stopped.
    script = """
for line in range(3000 if RESTARTS else 3):
    print("start", RESTARTS, line, "x" * 1000)
    if RESTARTS:
        note("begun")
sys.exit(0 if RESTARTS else 5)
"""
    process = launches.start(START + script, "--max-restarts", 1)
    assert wait_until(lambda: (launches.folder / "begun").exists())
    time.sleep(1.0)
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0
    lines = [f"0 {line}" for line in range(3)] + [f"1 {line}" for line in range(3000)]
    assert out.splitlines() == [f"[0] start {line} {'x' * 1000}" for line in lines]
    assert "ended well after 1 restart" in err


def test_what_killed_workers_throw_away_is_removed(launches):
    # Within the launcher's folder, where that is there; after each start.
    script = """
import shutil
from tfdp.cluster.scratch import scratch_folder
if RESTARTS == 1:
    shutil.rmtree(os.path.dirname(os.environ[progress.FOLDER_VARIABLE]))
folder = scratch_folder()
print("start", folder.name)
(pathlib.Path(folder.name) / "model.keras").write_bytes(b"large")
if RESTARTS == 0:
    note("first", folder.name)
    os.kill(os.getpid(), signal.SIGKILL)
assert not os.path.exists((FOLDER / "first").read_text())
folder.cleanup()
sys.exit(3 if RESTARTS == 1 else 0)
"""
    code, out, err, _ = launches.run(START + script, "--max-restarts", 2)
    assert code == 0, err
    first, second, third = (line.split()[1] for line in starts(out))
    own = f"{launches.own}/tfdp-launch-"
    assert sum(path.startswith(own) for path in (first, second, third)) == 2
    assert not any(launches.own.iterdir())


NO_SPACE = """
from tfdp.launch import own_folder
def no_space(*_, **__):
    raise OSError(28, "No space left on device")
own_folder.os.mkdir = own_folder.tempfile.mkdtemp = no_space
"""


@pytest.mark.parametrize("how", ["removed", "full"])
def test_a_launcher_without_its_folder_restarts(tmp_path, how):
    script = """
import shutil
print("start")
progress.note_strategy()
if RESTARTS == 0 and RANK == 1:
    if {is_removed}:
        shutil.rmtree(os.path.dirname(os.environ[progress.FOLDER_VARIABLE]))
    sys.exit(3)
note(f"up{{RANK}}")
wait_for("up1")
"""
    script = script.format(is_removed=how == "removed")
    options = ["--workers", 2, "--max-restarts", 1]
    with Launches(tmp_path, [*QUICK, NO_SPACE if how == "full" else ""]) as launches:
        code, out, err, _ = launches.run(START + script, *options)
        left = list(launches.own.iterdir())
    assert (code, len(starts(out)), left) == (0, 4, []), err
    said = own_lines(err)
    lost = [line for line in said if "cannot be made (No space left" in line]
    assert len(lost) == (2 if how == "full" else 0)
    assert said[len(lost) // 2].startswith("worker 1 failed first"), said


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("saved", [0, 8])
def test_a_signal_between_two_starts_ends_it(tmp_path, saved):
    script = f"progress.note_saved({saved})\nsys.exit(3)"
    with Launches(tmp_path, ENDLESS) as launches:
        process = launches.start(START + script, "--max-restarts", 9)
        lines_until(process, "starts again in")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SLACK_SECONDS)
        assert own_lines(err.splitlines()) == ["stopped by SIGTERM, before a restart"]
        assert process.returncode == (START_AGAIN if saved else 128 + signal.SIGTERM)
        assert not any(launches.own.iterdir())


def test_a_launcher_killed_between_two_starts_leaves_nothing(tmp_path):
    with Launches(tmp_path, ENDLESS) as launches:
        process = launches.start(START + "sys.exit(3)", "--max-restarts", 9)
        lines_until(process, "starts again in")
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(launches.own.iterdir()))


# Fails once; then trains until it is asked to stop.
TRAINING = """
if RESTARTS == 0:
    sys.exit(3)
def end(number, frame):
    {save}
signal.signal(signal.SIGTERM, end)
note(f"up{{RANK}}", os.getpid())
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "save, code",
    [
        ("sys.exit(START_AGAIN)", START_AGAIN),
        ("sys.exit(START_AGAIN if RANK else 0)", START_AGAIN),
        ("sys.exit(START_AGAIN if RANK else 4)", 128 + signal.SIGTERM),
        ("pass", 128 + signal.SIGTERM),  # until it is killed
    ],
)
def test_a_signal_to_the_launcher_never_restarts(launches, save, code):
    options = ["--workers", 2, "--max-restarts", 9, "--grace-seconds", "0.5"]
    process = launches.start(START + TRAINING.format(save=save), *options)
    family = pids(launches.folder, "up0", "up1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SLACK_SECONDS)
    assert not any(map(is_alive, family))
    assert process.returncode == code
    assert "tfdp launch: stopped by SIGTERM" in err


def test_no_second_start_outlives_a_killed_launcher(launches):
    options = ["--workers", 2, "--max-restarts", 9, "--grace-seconds", "0.3"]
    process = launches.start(START + TRAINING.format(save="pass"), *options)
    family = pids(launches.folder, "up0", "up1")
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(is_alive, family)))
    assert wait_until(lambda: not any(launches.own.iterdir()))


# Saves, and requests a restart; worker 1 takes longer, and must not be disturbed.
ASKING = """
print("start")
signal.signal(signal.SIGTERM, lambda *_: note("disturbed"))
progress.note_resumed(10 * RESTARTS)
progress.note_step(10 * RESTARTS + {steps})
if RESTARTS == 3:
    sys.exit(0)
progress.note_saved(10 * RESTARTS + {steps})
if RANK == 1:
    time.sleep(0.6)
sys.exit(START_AGAIN)
"""


def test_who_has_saved_starts_again_for_nothing(launches):
    options = ["--workers", 2, "--max-restarts", 1, "--grace-seconds", 60]
    code, out, err, _ = launches.run(START + ASKING.format(steps=10), *options)
    assert code == 0, err
    assert len(starts(out)) == 8
    assert not (launches.folder / "disturbed").exists()
    said = own_lines(err)
    assert "has saved, and requests a restart" in said[0]
    assert said[2] == "starts again in 0.0 s, from step 10 (not counted)"


def test_who_asks_and_gets_no_further_is_ended(launches):
    options = ["--workers", 2, "--max-restarts", 5, "--grace-seconds", 60]
    # From step 0 to step 0, always.
    script = START + ASKING.format(steps="0").replace("10 * RESTARTS", "0 * RESTARTS")
    code, out, err, _ = launches.run(script, *options)
    assert code == START_AGAIN
    assert len(starts(out)) == 4
    assert "with nothing gained" in own_lines(err)[-1]


def test_who_has_saved_without_restarts_ends_with_that_code(launches):
    code, out, err, _ = launches.run(
        START + ASKING.format(steps=1), "--workers", 2, "--grace-seconds", 60
    )
    assert (code, len(starts(out))) == (START_AGAIN, 2)
    assert "exit code 75: saved, start me again" in own_lines(err)[-1]


def test_a_progress_file_of_nonsense_says_nothing(launches):
    script = """
path = os.path.join(os.environ[progress.FOLDER_VARIABLE], f"{os.getpid()}.progress")
os.unlink(path)
os.mkfifo(path)
progress.note_resumed(3)
sys.exit(0 if RESTARTS else 3)
"""
    code, _, err, _ = launches.run(START + script, "--max-restarts", 1)
    assert code == 0, err
    assert not any("step" in line for line in own_lines(err))


def test_fewer_go_on_where_one_place_fails_twice(launches):
    script = """
print("start", RESTARTS, WORKERS, RANK, os.environ["CUDA_VISIBLE_DEVICES"])
if "GPU-b" in os.environ["CUDA_VISIBLE_DEVICES"]:
    raise RuntimeError("broken")
note(f"{RESTARTS}-{RANK}")
wait_for(*(f"2-{rank}" for rank in range(2)))
"""
    code, out, err, _ = launches.run(
        START + script,
        *("--workers", "2:3", "--max-restarts", 5),
        variables={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"},
    )
    assert code == 0, err
    # Who is left keeps its GPU, and the broken one is nobody's.
    last = [line.split()[1:] for line in starts(out) if " 2 " in line[:9]]
    assert last == [["2", "2", "0", "GPU-a"], ["2", "2", "1", "GPU-c"]]
    left_out = "worker 1 has failed first 2 times in a row, and is left out: 2 go on"
    assert left_out in own_lines(err)


def test_a_failure_of_every_place_leaves_nobody_out(launches):
    script = """
note(f"{RESTARTS}-{RANK}")
wait_for(*(f"{RESTARTS}-{rank}" for rank in range(3)))
if RANK == RESTARTS:
    raise RuntimeError("a bug")
time.sleep(600)
"""
    options = ["--workers", "1:3", "--max-restarts", 5]
    code, _, err, _ = launches.run(START + script, *options)
    assert code == 1
    assert own_lines(err)[-1].startswith("not started again: the same twice")


def test_who_only_lost_another_is_not_left_out(tmp_path):
    script = """
from tfdp.errors import WorkerLostError
from tfdp.cluster import crash_report

crash_report.listen()
print("start", RESTARTS, WORKERS)
if RESTARTS < 2:
    if RANK == 0:
        raise WorkerLostError("worker 1 is silent")
    time.sleep(600)  # as one that was stopped, or whose machine is cut off
"""
    patches = [*QUICK, "from tfdp.launch import cause", "cause.LOST_ONE_SECONDS = 0.3"]
    options = ["--workers", "1:2", "--max-restarts", 2]
    with Launches(tmp_path, patches) as launches:
        code, out, err, _ = launches.run(START + script, *options)
    assert code == 0, err
    assert starts(out)[-2:] == ["start 2 2"] * 2


HOSTS = ["--hosts", "alpha,beta,gamma"]


def test_hosts_start_again_without_the_one_that_is_lost(launches):
    script = """
print("start", RESTARTS, WORKERS, HOST)
progress.note_resumed(5 * RESTARTS)
progress.note_saved(5)
progress.note_step(9)
note(f"{RESTARTS}-{RANK}")
if RESTARTS == 0:
    wait_for(*(f"0-{rank}" for rank in range(3)))
    if RANK == 0:
        note("down-alpha")
        sys.exit(255)
    time.sleep(600)
wait_for("1-0", "1-1")
"""
    code, out, err, _ = launches.run(
        START + script,
        *(*HOSTS, "--workers", "2:3", "--max-restarts", 3, "--grace-seconds", 5),
        path=ssh(launches.folder),
    )
    assert code == 0, err
    assert starts(out) == ["start 0 3 alpha"] * 3 + ["start 1 2 beta"] * 2
    said = own_lines(err)
    assert "worker 0 on alpha failed at step 9" in said
    assert "goes on without alpha: does not answer" in said
    assert any(line.startswith("goes on from step 5; lost 4 steps") for line in said)


def test_too_few_hosts_use_up_the_restarts(launches):
    script = "note('down-beta'); note('down-gamma'); sys.exit(3)"
    code, _, err, _ = launches.run(
        START + script,
        *(*HOSTS, "--workers", "2:3", "--max-restarts", 3),
        path=ssh(launches.folder),
    )
    assert code == 3
    said = own_lines(err)
    assert said.count("beta and gamma do not answer") == 3
    assert said[-1] == "not started again: 3 of 3 restarts are used up"


def test_remote_workers_are_waited_for_while_they_save(launches):
    script = """
def end(number, frame):
    time.sleep(0.5)  # the connection must stay
    note(f"saved{RANK}")
    progress.note_saved(40)
    sys.exit(START_AGAIN)

signal.signal(signal.SIGTERM, end)
note(f"up{RANK}", os.getpid())
while True:
    time.sleep(0.05)
"""
    process = launches.start(
        START + script,
        *("--hosts", "alpha,beta", "--max-restarts", 3, "--grace-seconds", 60),
        path=ssh(launches.folder),
    )
    family = pids(launches.folder, "up0", "up1")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SLACK_SECONDS)
    assert process.returncode == START_AGAIN, err
    assert (launches.folder / "saved0").exists()
    assert (launches.folder / "saved1").exists()
    assert not any(map(is_alive, family))


def test_one_starts_again_while_the_others_go_on(launches):
    script = """
print("start", RESTARTS, PORT, os.environ["TFDP_JOB_KEY"])
note(f"up{RANK}.{RESTARTS}")
if RANK == 0:
    wait_for("up1.2")
elif RESTARTS < 2:
    wait_for("up0.0")
    sys.exit(3)
"""
    options = ["--workers", 2, "--max-restarts", 2, "--restart", "one"]
    code, out, err, _ = launches.run(START + script, *options)
    assert code == 0, err
    begun = [line.split() for line in out if " start " in line]
    assert sorted(line[0] for line in begun) == ["[0]", "[1]", "[1]", "[1]"]
    assert len({tuple(line[3:]) for line in begun}) == 1  # the same port and key
    said = own_lines(err)
    assert said.count("worker 1 has ended: exit code 3; the others go on") == 2, said
    assert sum(line.startswith("starts worker 1 again in ") for line in said) == 2


def test_one_that_fails_once_more_than_it_may_ends_all(launches):
    script = """
note(f"up{RANK}.{RESTARTS}")
if RANK == 1:
    sys.exit(3)
wait_for("never")
"""
    options = ["--workers", 2, "--max-restarts", 1, "--restart", "one"]
    code, out, err, _ = launches.run(START + script, *options)
    assert code == 3, err
    said = own_lines(err)
    assert sum(line.startswith("starts worker 1 again") for line in said) == 1
    assert any(line.startswith("worker 0 was stopped") for line in said), said


@pytest.mark.parametrize("saves", [False, True])
def test_a_signal_while_one_waits_to_be_started_again_is_no_failure(tmp_path, saves):
    script = """
note(f"up{RANK}")
if RANK == 1:
    wait_for("up0")
    sys.exit(3)
if SAVES:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
wait_for("never")
""".replace("SAVES", str(saves))
    # So that the signal comes before the replacement.
    patches = [
        "import tfdp.launch.one_by_one as one_by_one",
        "one_by_one.wait_seconds = lambda times: 3600.0",
    ]
    options = ["--workers", 2, "--max-restarts", 9, "--restart", "one"]
    with Launches(tmp_path, patches) as launches:
        launcher = launches.start(script, *options)
        lines_until(launcher, "starts worker 1 again")
        launcher.terminate()
        out, err = launcher.communicate(timeout=SLACK_SECONDS)
    assert launcher.returncode == (75 if saves else 128 + signal.SIGTERM), err
    assert "stopped by SIGTERM" in err and "failed first" not in err
    again = "worker 1 ended by itself: exit code 3, and was to be started again"
    assert again in err


@pytest.mark.parametrize("fails", ["after the others", "before the others"])
def test_none_starts_again_when_the_others_have_ended_well(tmp_path, fails):
    script = """
print("start")
note(f"up{RANK}", os.getpid())
if RANK == 1:
    if AFTER:
        for name in ("up0", "up2"):
            wait_for(name)
            while os.path.exists("/proc/" + (FOLDER / name).read_text()):
                time.sleep(0.02)
    note("fails")
    sys.exit(3)
wait_for("up1" if AFTER else "fails")
if not AFTER:
    time.sleep(1.0)  # for the launcher to promise that worker 1 starts again
""".replace("AFTER", str(fails == "after the others"))
    options = ["--workers", 3, "--max-restarts", 9, "--restart", "one"]
    with Launches(tmp_path, ENDLESS) as launches:
        code, out, err, seconds = launches.run(START + script, *options)
    assert (code, len(starts(out))) == (3, 3), err
    said = own_lines(err)
    over = "worker 1 is not started again: workers 0, 2 ended with exit code 0, and "
    assert sum(line.startswith(over) for line in said) == 1, said
    assert any(line.startswith("worker 1 failed first") for line in said), said
    assert seconds < SLACK_SECONDS


@pytest.mark.parametrize(
    "options", [[], ["--max-restarts", 1, "--workers", "1:2"]], ids=["none", "min:max"]
)
def test_one_by_one_needs_restarts_and_places(launches, options):
    code, _, err, _ = launches.run(START, "--restart", "one", *options)
    assert code != 0
    assert any("--restart one" in line for line in err), err
