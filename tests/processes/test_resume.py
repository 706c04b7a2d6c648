"""Trainings with planned faults, in real processes; see tests/fault_plans.py.

A few fixed plans; `python -m tests.fault_plans` draws others.
"""

import importlib.util
import subprocess
import sys

import pytest

from tests.fault_plans import LONG_STOP_SECONDS, SILENCE_SECONDS, Plan, draw
from tests.support.package_source import REPOSITORY

KILL = {"where": "within", "how": "kill", "rank": 1, "number": 5, "seconds": 0.02}
TERM = {"where": "after", "how": "term", "rank": 1, "number": 4, "seconds": 0.0}
# In the second epoch: the order of the first is drawn again.
LATE_KILL = KILL | {"number": 11}
COMMIT = {"where": "committing", "how": "kill", "rank": 0, "number": 2, "seconds": 1.0}
FULL = {"point": "before the part", "how": "full", "rank": 1, "number": 1, "times": 1}
NOT_SHARED = FULL | {"how": "not shared", "number": 3, "times": 2}
MANIFEST = {"point": "manifest", "how": "stale", "rank": 0, "number": 2, "times": 2}


def stopped(where, how, rank, number, seconds=0.0):
    """A worker is stopped for longer than the others wait for a sign of it."""
    said = {"where": where, "how": how, "rank": rank, "number": number}
    return said | {"seconds": seconds, "stop_seconds": LONG_STOP_SECONDS}


def long_stop(number, *faults):
    workers = [2] * (len(faults) + 1)
    return Plan(
        *(number, "parameters", workers, list(faults), [None] * len(workers)),
        SILENCE_SECONDS,
    )


PLANS = {
    "everything": Plan(
        *(0, "everything", [2, 2, 2], [LATE_KILL, TERM], [None, None, "byte"]),
        disks=[None, FULL, NOT_SHARED],
    ),
    "resized": Plan(
        *(1, "resized", [2, 1, 3], [KILL, COMMIT], [None, None, "half"]),
        disks=[None, None, MANIFEST],
    ),
    "grain": Plan(2, "grain", [2, 2], [KILL], [None, None]),
    "grain-shards": Plan(3, "grain-shards", [2, 2], [KILL], [None, None]),
    "stopped-in-a-step": long_stop(
        *(4, stopped("within", "stop", 0, 5), stopped("after", "stop and kill", 1, 5))
    ),
    "stopped-while-saving": long_stop(
        *(5, stopped("saving", "stop", 1, 2), stopped("saving", "stop and kill", 0, 2))
    ),
    "balanced": Plan(9, "balanced", [2, 2, 3], [KILL, TERM], [None, None, None]),
    # The last one: the others train no more.
    "stopped-in-the-last-save": long_stop(6, stopped("saving", "stop", 1, 9)),
    "stopped-while-committing": long_stop(
        *(7, stopped("committing", "stop", 0, 2)),
        stopped("committing", "stop and kill", 0, 2, seconds=1.0),
    ),
    "stopped-while-restoring": long_stop(
        *(8, KILL, stopped("restoring", "stop", 1, 1)),
        stopped("restoring", "stop and kill", 0, 1, seconds=1.0),
    ),
}
IS_SLOW = ("grain", "stopped")

# Processes are forked from one that has not used TensorFlow: not from pytest's.
PROGRAM = """
import sys
from tests.fault_plans import run_plans
from tests.processes.test_resume import PLANS
sys.exit(run_plans([PLANS[sys.argv[1]]], "0", sys.argv[2]))
"""


@pytest.mark.worth_seconds(120)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith(IS_SLOW) else ())
        for name in PLANS
    ],
)
def test_a_training_with_faults_ends_as_without(tmp_path, name):
    if name.startswith("grain") and importlib.util.find_spec("grain") is None:
        pytest.skip("grain is not installed (pip install 'tfdp[grain]')")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = (tmp_path / f"plan-{PLANS[name].number}.0.log.0").read_text()
    assert ("hosts reads all of the grain input" in said) == (name == "grain")


def test_plans_are_drawn_from_their_seed():
    assert draw("a", 3) == draw("a", 3)
    assert len({str(draw("a", number)) for number in range(50)}) > 40
