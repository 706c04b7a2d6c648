"""Which processes are helpers of a worker, and which are workers themselves."""

import dataclasses
import multiprocessing

from tfdp.cluster import Cluster
from tfdp.cluster.helper_process import (
    is_helper,
    is_started_by_multiprocessing,
    note_joined,
)

ONE = Cluster(2, 0, "host:20000")
OTHERS = [
    dataclasses.replace(ONE, rank=1),
    dataclasses.replace(ONE, coordinator="host:20001"),
    dataclasses.replace(ONE, workers=3),
]


def _tell(queue):
    found = [is_helper(cluster) for cluster in (ONE, *OTHERS)]
    queue.put((is_started_by_multiprocessing(), found))


def test_a_child_helps_the_worker_that_its_parent_is(monkeypatch):
    monkeypatch.setenv("TFDP_JOINED", "")  # restores it
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def told():
        child = context.Process(target=_tell, args=(queue,))
        child.start()
        child.join()
        return queue.get()

    # Whatever starts the workers of a cluster is none itself.
    assert told() == (True, [False, False, False, False])
    note_joined(ONE)
    assert told() == (True, [True, False, False, False])
    assert not is_started_by_multiprocessing()
    assert not is_helper(ONE)


def test_what_is_made_while_a_child_imports_the_script_is_a_helper(monkeypatch):
    current = multiprocessing.current_process()
    monkeypatch.setattr(current, "_inheriting", True, raising=False)
    assert is_started_by_multiprocessing()
    assert is_helper(ONE)
