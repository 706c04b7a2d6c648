"""Hosts at their own pace with their own numbers of steps: fits, saves, and signals."""

import json
import signal
import time

import pytest

from tests.support.own_steps import EPOCHS, LONGEST_SECONDS
from tests.support.workers import Workers
from tfdp.cluster import START_AGAIN

MODULE = "tests.support.own_steps"
# Data, steps by worker, who is slow before which of its steps, whom SIGTERM reaches.
PLANS = [
    (data, steps, slow, at, whom)
    for data in ("arrays", "own")
    for steps in ((7, 2), (2, 5), (4, 4))
    for slow, at in ((0, 1), (1, 1), (1, steps[1] + 1))
    for whom in ("all", "fast", "slow")
]
PLANS += [("validated", steps, 1, 1, "all") for steps in ((7, 2), (2, 5))]
QUICK = [("arrays", (7, 2), 0, 1, "all"), ("own", (2, 5), 1, 1, "fast")]


def ended(folder, steps):
    """How many updates the training had in the end; the same weights on all workers."""
    by_rank = [json.loads((folder / f"ended.{r}").read_text()) for r in (0, 1)]
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][0] == EPOCHS * sum(steps)


def steps_made(folder, rank):
    path = folder / f"steps.{rank}"
    return len(path.read_text()) if path.exists() else 0


def ended_by_signals(workers, ranks, folder):
    """The outputs of workers of which these get SIGTERM, and then may go on."""
    for rank in ranks:
        workers.processes[rank].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    (folder / "go").touch()
    outputs = workers.outputs()
    codes = [process.returncode for process in workers.processes]
    assert codes == [START_AGAIN, START_AGAIN], outputs
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("steps", [(7, 2), (2, 5)])
@pytest.mark.parametrize("data", ["arrays", "own", "validated"])
def test_hosts_with_their_own_steps_train_and_save(tmp_path, data, steps, every):
    words = ",".join(map(str, steps)), -1, -1, every
    with Workers(2, MODULE, tmp_path, data, *words) as workers:
        outputs = workers.succeed()
    ended(tmp_path, steps)
    assert list((tmp_path / "saved").glob("step-*/manifest.json")), outputs
    assert "CheckpointWarning" not in "".join(outputs), outputs


def wait_until(is_so, what):
    deadline = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize(
    "plan",
    [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PLANS],
    ids=lambda plan: "-".join(map(str, plan)).replace(" ", ""),
)
def test_a_signal_saves_after_the_slow_hosts_current_step(tmp_path, plan):
    """The slow host is in its step `at`, and the fast one is ahead or has come to the
    end of its epoch, when SIGTERM comes: the slow one makes that step, and no other.
    A restart makes the steps that were left, once."""
    data, steps, slow, at, whom = plan
    fast = 1 - slow
    words = data, ",".join(map(str, steps)), slow, at, 0
    before = at // steps[slow] * steps[fast]  # epochs that the fast host has ended
    with Workers(2, MODULE, tmp_path, *words) as workers:
        wait_until((tmp_path / f"waits.{slow}").exists, "the slow worker's step")
        ahead = before + steps[fast]
        wait_until(lambda: steps_made(tmp_path, fast) == ahead, "the fast worker")
        reached = {"all": (0, 1), "fast": (fast,), "slow": (slow,)}[whom]
        outputs = ended_by_signals(workers, reached, tmp_path)
    assert steps_made(tmp_path, slow) == at + 1, outputs
    assert list((tmp_path / "saved").glob("step-*/manifest.json")), outputs
    with Workers(2, MODULE, tmp_path, *words) as workers:
        workers.succeed()
    ended(tmp_path, steps)
    assert steps_made(tmp_path, fast) == EPOCHS * steps[fast]
    assert steps_made(tmp_path, slow) == EPOCHS * steps[slow]


@pytest.mark.slow
@pytest.mark.parametrize("whom", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("steps", [(7, 2), (2, 5)])
def test_a_signal_in_an_evaluation_saves_after_the_next_step(tmp_path, steps, whom):
    words = "validated", ",".join(map(str, steps)), 1, "looks", 0
    with Workers(2, MODULE, tmp_path, *words) as workers:
        wait_until((tmp_path / "waits.1").exists, "the evaluation")
        outputs = ended_by_signals(workers, whom, tmp_path)
    made = [steps_made(tmp_path, rank) for rank in (0, 1)]
    assert all(n >= one for n, one in zip(made, steps, strict=True)), outputs
    assert sum(made) < EPOCHS * sum(steps), outputs
    with Workers(2, MODULE, tmp_path, *words) as workers:
        workers.succeed()
    ended(tmp_path, steps)
    assert [steps_made(tmp_path, r) for r in (0, 1)] == [EPOCHS * n for n in steps]
