"""Workers that die, stop, leave or are late: the others say so, soon, and end."""

import re
import socket

import pytest

from tests.support.launching import Launches
from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS, Workers

# How the worker fails -> what the others say. A process that is stopped is told by its
# silence, one that is late by the deadline of the exchange.
FAILURES = {
    "kill": "worker 1 has ended",
    "raise": "worker 1 has raised ValueError: the first error",
    "leave": "worker 1 has come to the end of its script",
    "stop": "worker 1 was silent for 4 seconds",
    "late": "worker 1 did not arrive within 6 seconds",
}
# They end within a second or two of that; a busy machine takes longer. Who waited in
# vain would be there after ten minutes.
SOON_SECONDS = 120.0


def time_of(word, output):
    return float(re.search(rf"^{word} at ([\d.]+)$", output, re.MULTILINE).group(1))


def lose_a_worker(how, *engine):
    """What the others said, by rank, and what the failing one said."""
    with Workers(3, "tests.support.lost_worker", how, 4, 6, *engine) as workers:
        survivors = {}
        for rank in (0, 2):
            survivors[rank] = workers.processes[rank].communicate(
                timeout=LONGEST_SECONDS
            )[0]
            assert workers.processes[rank].returncode not in (0, None)
        lost = workers.processes[1]
        if how in ("stop", "late"):
            lost.kill()
        return survivors, lost.communicate(timeout=LONGEST_SECONDS)[0]


# Slow because it takes long.
LEAVE = pytest.param("leave", marks=pytest.mark.slow)


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("how", [*(how for how in FAILURES if how != "leave"), LEAVE])
def test_the_others_name_it_and_end(how):
    words = FAILURES[how]
    survivors, output = lose_a_worker(how)
    for rank, text in survivors.items():
        assert re.search(rf"WorkerLostError: Worker {rank} waited .*{words}", text), (
            text
        )
        # Which exchange it was.
        assert re.search(r"in exchange \d+ \((bucket|number)", text)
        assert time_of("ended", text) - time_of("failing", output) < SOON_SECONDS


@pytest.mark.parametrize("how", ["late", LEAVE])
def test_who_waits_in_a_collective_of_tensorflow_is_told(how):
    words = FAILURES[how]
    if how == "leave":  # TensorFlow makes an error of a script that ends in its call
        words = "worker 1 has raised UnknownError"
    survivors, output = lose_a_worker(how, "tensorflow")
    for rank, text in survivors.items():
        said = (
            rf"tfdp: Worker {rank} waited .* seconds in an exchange \(bucket.*{words}"
        )
        assert re.search(said, text), text
        assert time_of("ended", text) - time_of("failing", output) < SOON_SECONDS


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("how, sync", [("kill", "bounded"), ("stop", "delayed")])
def test_who_waits_for_a_late_sum_is_told(how, sync):
    """In the step that must have the sum, up to two steps after the failure."""
    survivors, output = lose_a_worker(how, "auto", sync)
    for rank, text in survivors.items():
        said = rf"WorkerLostError: Worker {rank} waited .*{FAILURES[how]}"
        assert re.search(said, text), text
        assert "(gradients of update" in text
        assert time_of("ended", text) - time_of("failing", output) < SOON_SECONDS


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_who_pushes_at_its_own_pace_is_told(how):
    """The others push to the failed one, or wait for it where the epoch ends."""
    survivors, output = lose_a_worker(how, "auto", "own pace")
    for rank, text in survivors.items():
        said = rf"WorkerLostError: Worker {rank} (pushed to|waited) .*{FAILURES[how]}"
        assert re.search(said, text), text
        assert time_of("ended", text) - time_of("failing", output) < SOON_SECONDS


# What ends worker 1 with 0 -> what the launcher says of it.
LEFT_EARLY = {
    "if RANK == 1: sys.exit(0)": "before it joined the training (it never made a",
    "pass": "in the middle of the training, and worker 0 still needed it",
}
TRAINING = f"""
import runpy
{{}}
sys.path.insert(0, {str(REPOSITORY)!r})
sys.argv[1:] = ["leave", "600", "600"]
runpy.run_module("tests.support.lost_worker", run_name="__main__")
"""


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("how", LEFT_EARLY)
def test_the_launcher_names_a_worker_that_ends_with_0_too_early(how, tmp_path):
    """Nobody waits for the ten minutes that a strategy waits for the others."""
    with Launches(tmp_path) as launches:
        code, _, err, seconds = launches.run(TRAINING.format(how), "--workers", 2)
    said = [line for line in err if line.startswith("tfdp launch: ")]
    assert code == 1
    start = f"tfdp launch: worker 1 ended with exit code 0 {LEFT_EARLY[how]}"
    assert said[0].startswith(start), said
    assert seconds < SOON_SECONDS


def test_a_worker_that_never_comes_is_named():
    with Workers(3, "tests.support.lost_worker", "kill", 4, 5) as workers:
        workers.processes[2].kill()
        output = workers.processes[0].communicate(timeout=LONGEST_SECONDS)[0]
        other = workers.processes[1].communicate(timeout=LONGEST_SECONDS)[0]
        assert workers.processes[0].returncode not in (0, None)
        host, port = workers.coordinator.split(":")
    assert "worker 2 did not arrive at worker 0 in time" in output
    assert "worker 2 did not arrive" in other
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


@pytest.mark.worth_seconds(25)
def test_a_process_ends_though_its_input_is_being_read_ahead():
    """In Python, by a thread of TensorFlow's: the process waited for it for ever."""
    with Workers(2, "tests.support.late_reader", 6) as workers:
        output = workers.processes[0].communicate(timeout=LONGEST_SECONDS)[0]
        assert workers.processes[0].returncode == 1, output
    assert "worker 1 has come to the end of its script" in output
    # The call was let end, and not broken off.
    assert output.index("reads ahead") < output.index("has read ahead")
