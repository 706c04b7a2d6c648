"""Who waits for long says so, once, and for whom."""

import concurrent.futures
import re
import threading

import numpy as np
import pytest

from tests.support.workers import free_port
from tfdp.cluster.worker_names import name_workers
from tfdp.hosts import exchange_watch, waits
from tfdp.hosts.exchange_watch import ExchangeWatch
from tfdp.hosts.socket_link import SocketLink

# Worker 2; on a busy machine the word of another may be late, too.
LATE = r"for workers? (\d, )?2\."


@pytest.fixture
def said(monkeypatch):
    """What was logged: a list, and an event for each text that a test waits for."""

    class Said(list):
        def __init__(self):
            self.changed = threading.Condition()

        def note(self, text, *values):
            with self.changed:
                self.append(text % values)
                self.changed.notify_all()

        def wait_for(self, *patterns):
            def is_there():
                return any(all(re.search(p, text) for p in patterns) for text in self)

            with self.changed:
                assert self.changed.wait_for(is_there, 60), (patterns, self)

    said = Said()
    monkeypatch.setattr(waits.logging, "warning", said.note)
    for module in (waits, exchange_watch):
        monkeypatch.setattr(module, "NOTICE_SECONDS", 1.5)
    return said


def test_who_waits_says_so(said):
    address = f"127.0.0.1:{free_port()}"
    links = [None] * 3

    def meet(rank):
        links[rank] = SocketLink(rank, 3, address, timeout_seconds=60)

    def on_both(work):
        return [threads.submit(work, links[rank]) for rank in (0, 1)]

    def end(futures, work):
        work(links[2])
        return [future.result(60) for future in futures]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        early = [threads.submit(meet, rank) for rank in (0, 1)]
        said.wait_for("Worker 0 has waited", f"the rendezvous at {address}", LATE)
        said.wait_for(
            "Worker 1 has waited", f"the rendezvous at {address}", "the others"
        )
        end(early, lambda _: meet(2))

        for label, channel in (("bucket 1 of 2", "step"), ("barrier", "host")):

            def exchange(link, label=label, channel=channel):
                link.sum([np.ones(3)], label, channel)

            waiting = on_both(exchange)
            for rank in (0, 1):
                said.wait_for(f"Worker {rank} has", rf"exchange 1 \({label}\) {LATE}")
            end(waiting, exchange)

        def share(link):
            link.share_note("dataset 0", "here")

        waiting = on_both(share)
        for rank in (0, 1):
            said.wait_for(f"Worker {rank} has", rf"a comparison \(dataset 0\) {LATE}")
        end(waiting, share)
        list(threads.map(lambda link: link.close(), links))
    # Once each: two in the meeting, the exchanges and the note. A busy machine may make
    # worker 2 wait as well.
    texts = [text for text in said if not text.startswith("tfdp: Worker 2")]
    waited = [re.sub(r"waited \d+ seconds| for workers? .*", "", t) for t in texts]
    assert len(waited) == len(set(waited)) == 8


def test_who_waits_in_a_collective_says_so(said):
    class Link:
        rank, workers, timeout_seconds = 0, 3, 1e6

        def on_failure(self, listener):
            pass

        def leave_note(self, key, note):
            pass

        def wait_for_notes(self, key, enough):
            return {1: "1", 2: "0"}

        def news(self):
            return None

    watch = ExchangeWatch(Link(), lambda message: None)
    number = watch.begin("bucket 1 of 2")
    said.wait_for("Worker 0 has", r"an exchange \(bucket 1 of 2\) for worker 2\.")
    watch.end(number)
    watch.begin("bucket 2 of 2")
    said.wait_for("Worker 0 has", r"\(bucket 2 of 2\) for workers 1, 2\.")
    assert len(said) == 2
    watch.close()


@pytest.mark.parametrize(
    "ranks, words",
    [
        ([0], "worker 0"),
        ([1, 2, 3], "workers 1, 2, 3"),
        ([0, 1, 2, 3], "workers 0 to 3"),
        ([5, 128, *range(130, 256)], "workers 5, 128, 130 to 255"),
    ],
)
def test_many_workers_are_named_in_few_words(ranks, words):
    assert name_workers(ranks) == words
