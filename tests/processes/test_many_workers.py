"""Many workers on one machine meet, add, wait and name who is missing."""

import json
import math
import subprocess
import sys

import pytest

from tests.support.package_source import REPOSITORY

# Only there to end a hang.
HANG_SECONDS = 600
MANY = [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 64, 256))]


def workers_say(workers, scenario):
    done = subprocess.run(
        [*(sys.executable, "-m", "tests.support.many_workers"), str(workers), scenario],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    return {int(rank): words for rank, words in said.items()}


@pytest.mark.timeout(HANG_SECONDS + 60)
@pytest.mark.parametrize("workers", MANY)
def test_connections_and_threads_are_bounded(workers):
    said = workers_say(workers, "work")
    distances = math.ceil(math.log2(workers))
    assert sorted(said) == list(range(workers))
    for rank, found in said.items():
        assert isinstance(found, dict), found
        # To and from the neighbours, on four channels; and worker 0 knows everybody.
        assert found["connections"] == 4 * 2 * distances
        assert found["control"] == (workers - 1 if rank == 0 else 1)
        # This one, the membership's, and one for each neighbour, before and behind, to
        # whom something did not go at once: on an idle machine one or none.
        assert found["threads"] <= 2 + 2 * distances
        assert found["ways"] == said[0]["ways"]


@pytest.mark.timeout(HANG_SECONDS + 60)
@pytest.mark.parametrize("workers", MANY)
@pytest.mark.parametrize(
    "scenario", ["killed", pytest.param("stopped", marks=pytest.mark.slow)]
)
def test_who_is_lost_is_named_by_all(workers, scenario):
    said = workers_say(workers, scenario)
    lost = workers // 3
    assert sorted(said) == [rank for rank in range(workers) if rank != lost]
    for words in said.values():
        assert f"worker {lost} " in words, words
        assert "WorkerLostError" in words


@pytest.mark.slow
@pytest.mark.timeout(HANG_SECONDS + 60)
@pytest.mark.parametrize("workers", [16, 64])
def test_who_does_not_come_is_named_by_all(workers):
    said = workers_say(workers, "absent")
    assert sorted(said) == list(range(workers - 1))
    for words in said.values():
        assert f"worker {workers - 1} did not arrive at worker 0 in time" in words
