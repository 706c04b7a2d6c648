"""The generator draws programs, finds planted faults, and finds nothing else."""

import random
import runpy

import pytest

from tests.generator.child import Child
from tests.generator.program import Program
from tests.generator.search import Search

MINUTES = 5


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize("fault, kind", [("an_end", "died"), ("a_wait", "hang")])
def test_a_program_that_ends_its_process_or_waits(fault, kind):
    # Idle for so long because of a loaded machine is a wait, too, for this test.
    child = Child(fault, idle_seconds=20.0)
    try:
        assert child.judge(Program()).kind == kind
    finally:
        child.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", ["equal_shares", "a_replica_dropped"])
def test_finds_a_planted_fault(fault, tmp_path):
    search = Search(20, 1, tmp_path, reduce_seconds=120.0, plant=fault)
    (finding,) = search.run(stop_at_first=True)
    assert finding.verdict.kind == "differs"
    # The smallest program has it still, and its file makes it again.
    (file,) = tmp_path.iterdir()
    assert runpy.run_path(str(file))["program"] == finding.program


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_finds_nothing_in_five_minutes(tmp_path):
    seed = random.randrange(10**6)
    search = Search(MINUTES, seed, tmp_path)
    search.run()
    print(search.summary())
    assert not search.findings, f"seed {seed}\n{search.summary()}"
    assert search.counts["same"] > 0, search.summary()
