"""`AsyncSums`: sums that are begun, looked at, taken, or let go."""

import threading

import numpy as np
import pytest

from tfdp.errors import WorkerLostError
from tfdp.hosts.async_exchanges import AsyncSums


class Link:
    """Two hosts that say the same; sums wait until they may go."""

    def __init__(self):
        self.may_go = threading.Event()
        self.labels, self.announced = [], []
        self.error = None

    def announce(self, exchanges, channel):
        assert channel == "late"
        self.announced.append(exchanges)

    def sum(self, arrays, label, channel="step", wire_dtype=None, packed=()):
        assert channel == "late" and len({array.dtype for array in arrays}) == 1
        assert self.may_go.wait(60)
        self.labels.append(label)
        if self.error:
            raise self.error
        return [2 * array for array in arrays]


@pytest.fixture
def link():
    link = Link()
    yield link
    link.may_go.set()


def test_sums_of_all_types_come_in_their_places(link):
    late = AsyncSums(link)
    mine = [np.float32([1, 2]), np.int64([3]), np.float32([[4]])]
    late.begin(7, mine, "a")
    mine[0][:] = 0  # the caller's memory is its own
    link.may_go.set()
    for sums in (late.look(7), late.take(7)):
        assert [s.tolist() for s in sums] == [[2, 4], [6], [[8]]]
        assert [s.dtype for s in sums] == [m.dtype for m in mine]
    assert late.take(7) is None and late.look(8) is None
    assert link.announced == [2]  # a sum for each type
    late.close()


def test_nobody_waits_who_begins_and_the_order_stays(link):
    late = AsyncSums(link)
    for ticket, label in enumerate("abc"):
        late.begin(ticket, [np.float32([ticket])], label)
    late.forget(1)
    assert not link.labels  # none could go yet, and `begin` came back
    link.may_go.set()
    assert late.take(2)[0] == 4 and late.take(1) is None and late.take(0)[0] == 0
    # The others got this host's part of what it let go, in turn.
    assert link.labels == ["a", "b", "c"]
    late.close()


def test_who_takes_learns_why_there_is_nothing(link):
    late = AsyncSums(link)
    link.error = WorkerLostError("worker 1 left")
    link.may_go.set()
    late.begin(0, [np.float32([1])], "a")
    with pytest.raises(WorkerLostError, match="worker 1 left"):
        late.take(0)
    late.close()
