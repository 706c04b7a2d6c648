"""`LateQueue`: which sums of earlier steps a step takes, without TensorFlow."""

import ast
import pathlib

import numpy as np
import pytest

import tfdp
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.hosts.late_queue import LateQueue
from tfdp.step.distributed_optimizer import checked_sync


class SumsByHand:
    """In the place of `AsyncSums`: complete when the test says so."""

    def __init__(self):
        self.begun, self.complete, self.waited, self.forgotten = {}, set(), [], []

    def begin(self, ticket, arrays, label):
        self.begun[ticket[1]] = [2 * array for array in arrays]

    def is_complete(self, ticket):
        return ticket[1] in self.complete

    def take(self, ticket):
        if ticket[1] not in self.complete:
            self.waited.append(ticket[1])
        return self.begun.pop(ticket[1])

    def forget(self, ticket):
        self.forgotten.append(ticket[1])


def queue(sums, steps=2, early=True, most=2):
    return LateQueue(sums, steps=steps, takes_early=early, most=most)


def begin(one, value):
    one.begin([0, 4], [np.full(2, value, "float32"), np.float32(value)])


def test_a_delay_is_exact_whatever_is_complete():
    sums = SumsByHand()
    one = queue(sums, steps=2, early=False, most=1)
    for step in range(6):
        begin(one, step)
        sums.complete.add(step)
        assert one.take_due() == (step >= 2)
        if step >= 2:
            assert one.taken(0)[4] == 2 * (step - 2)
    assert [one.take_oldest() for _ in range(3)] == [1, 1, 0]


def test_a_host_waits_for_what_is_due_and_takes_two_at_most():
    sums = SumsByHand()
    one = queue(sums)
    counts = []
    for step in range(4):
        begin(one, step)
        counts.append(one.take_due())
    # It waited for the sums of steps 0 and 1.
    assert (counts, sums.waited) == ([0, 0, 1, 1], [0, 1])
    sums.complete.update(range(2, 7))
    for step in range(4, 7):
        begin(one, step)
        counts.append(one.take_due())
    assert (counts[4:], len(one), sums.waited) == ([2, 2, 1], 0, [0, 1])
    np.testing.assert_array_equal(one.taken(0)[0], [12, 12])


def test_a_complete_sum_waits_for_those_before_it():
    sums = SumsByHand()
    one = queue(sums)
    begin(one, 0)
    one.take_due()
    sums.complete.add(1)
    begin(one, 1)
    assert one.take_due() == 0


def test_what_a_failed_step_left_is_an_error():
    one = queue(SumsByHand(), steps=1, early=False, most=1)
    for step in range(3):
        begin(one, step)  # and the step failed before it took a sum
    with pytest.raises(CollectiveError, match="a step before has failed"):
        one.take_due()


def test_rows_of_a_checkpoint_are_taken_again():
    sums, after = SumsByHand(), SumsByHand()
    one, other = queue(sums, steps=3), queue(after, steps=3)
    for step in range(2):
        begin(one, step + 1)
    begin(other, 9)
    rows = {0: one.rows(0, [2], "float32"), 4: one.rows(4, [], "float32")}
    np.testing.assert_array_equal(rows[4], [2, 4, 0])
    assert (len(one), len(sums.begun)) == (2, 0)
    other.restore(2, rows)
    assert after.forgotten == [0]
    begin(other, 5)
    taken = []
    while other.take_oldest():
        taken.append(float(other.taken(0)[4]))
    assert taken == [2.0, 4.0, 10.0]


@pytest.mark.parametrize("kind", [tfdp.sync.Delayed, tfdp.sync.BoundedStaleness])
def test_values_are_checked_and_kept_in_configs(kind):
    for steps in (-1, 1.0, True, None, 65, 10**9):
        words = f"{kind.__name__}.steps must be an integer from 0 to 64, as a host"
        with pytest.raises(ConfigurationError, match=words):
            kind(steps)
    config = kind(2).get_config()
    assert config == {"method": kind.__name__, "steps": 2}
    assert checked_sync(config) == kind(2)


def test_a_run_without_late_sums_imports_no_file_of_theirs():
    """Imports within functions run only where the feature is used."""
    files = {"tfdp.step.late_sums", "tfdp.hosts.late_queue"}
    importers = set()
    for path in pathlib.Path(tfdp.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module in files:
                importers.add(path.name)
    assert importers == {"late_sums.py"}
