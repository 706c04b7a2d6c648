"""Rounds that a quorum decides, each host in a thread; nothing depends on speed."""

import concurrent.futures
import contextlib
import socket
import threading

import numpy as np
import pytest

from tfdp.errors import CollectiveError, ConfigurationError, WorkerLostError
from tfdp.hosts.elastic_all_reduce import weighted_mean_of
from tfdp.hosts.elastic_group import GIVES, LEFT_OUT, MET, ElasticHosts
from tfdp.hosts.quorum_values import QuorumRules

SECONDS = 60  # of a wait that ends by an event


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Host:
    """One host whose meetings run in a thread of its own."""

    def __init__(self, rank, hosts, **rules):
        self.rank, self.hosts = rank, hosts
        defaults = {"quorum": 2, "grace_seconds": 0.0, "every": 10, "kept_rounds": 2}
        like = [np.zeros(3, np.float32)]
        hosts.begin_quorum(QuorumRules(**{**defaults, **rules}), like)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._thread.submit(hosts.exchange_state, [np.zeros(1)]).result(SECONDS)

    def come(self, update, value, rows=1.0):
        """Begins to meet; the result is (outcome, rounds, skipped)."""

        def meet():
            arrays = [np.full(3, value, np.float32)]
            means, outcome, skipped = self.hosts.meet_quorum(update, rows, arrays)
            return outcome, means[0][:, 0].tolist(), skipped

        return self._thread.submit(meet)

    def state(self, value):
        return self._thread.submit(
            lambda: float(self.hosts.exchange_state([np.array([value])])[0][0])
        )


@contextlib.contextmanager
def group(count, min_hosts=1, timeout_seconds=60.0, **rules):
    port, said = free_port(), []

    def start(rank):
        hosts = ElasticHosts(
            rank,
            count,
            f"127.0.0.1:{port}",
            timeout_seconds=timeout_seconds,
            silence_seconds=2.0,
            min_hosts=min_hosts,
            secret=b"key",
            say=said.append,
        )
        opened.append(hosts)
        return Host(rank, hosts, **rules)

    opened = []
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        try:
            yield list(threads.map(start, range(count))), said
        finally:
            for hosts in opened:
                hosts.close()


def results(*futures):
    return [future.result(SECONDS) for future in futures]


@pytest.mark.parametrize("late", [0, 2], ids=["leader", "member"])
def test_a_late_host_gets_the_mean_of_those_that_came(late):
    """Weighted by rows: (1 x 2 + 3 x 6) / 4 = 5; it then starts at the others' weights,
    and the next round, for which all come, is the mean of three again."""
    with group(3) as (hosts, said):
        others = [host for host in hosts if host.rank != late]
        first, second = others[0].come(10, 2.0, 1.0), others[1].come(10, 6.0, 3.0)
        assert results(first, second) == [(MET, [5.0], 0)] * 2
        outcome, rounds, skipped = results(hosts[late].come(10, 100.0))[0]
        assert (outcome, rounds) == (MET, [5.0]) and 0 <= skipped < 10
        assert any(f"without workers {late}" in line for line in said)
        assert all(host.hosts.present == (0, 1, 2) for host in hosts)


def test_hosts_within_the_grace_window_count():
    with group(3, grace_seconds=SECONDS) as (hosts, _):
        came = [host.come(10, float(host.rank)) for host in hosts[:2]]
        assert not concurrent.futures.wait(came, timeout=0.3).done  # the window is open
        assert results(*came, hosts[2].come(10, 5.0)) == [(MET, [2.0], 0)] * 3


def test_one_that_missed_two_rounds_applies_both():
    with group(3) as (hosts, _):
        for update, value in ((10, 1.0), (20, 3.0)):
            assert results(*(h.come(update, value) for h in hosts[:2]))[0][1] == [value]
        hosts[0].hosts._quorum._round_seconds = 1e-6  # the next round is nearly due
        # Both rounds, and all updates of the running one but the last.
        assert results(hosts[2].come(10, 9.0)) == [(MET, [1.0, 3.0], 10 + 9)]
        assert hosts[2].hosts.skipped_updates == 19


def test_one_that_missed_more_than_is_kept_gets_the_state():
    with group(3) as (hosts, _):
        for update in (10, 20, 30):
            results(*(host.come(update, 1.0) for host in hosts[:2]))
        assert results(hosts[2].come(10, 9.0))[0][0] == LEFT_OUT
        state = hosts[2].state(0.0)
        update, outcomes = 40, [MET]
        while GIVES not in outcomes:  # it may need a moment to knock
            outcomes = [
                r[0] for r in results(*(h.come(update, 1.0) for h in hosts[:2]))
            ]
            update += 10
        results(hosts[0].state(7.0))
        assert results(state) == [7.0]
        came = [host.come(update, float(host.rank)) for host in hosts[1:]]
        assert results(*came) == [(MET, [1.5], 0)] * 2
        assert hosts[1].hosts.present == (0, 1, 2)


def test_the_next_leader_takes_over_what_the_last_one_decided():
    """Worker 1 is late, worker 0 decides with worker 2 and ends: worker 1 leads now,
    and must not decide the same round again."""
    with group(3) as (hosts, _):
        decided = results(hosts[0].come(10, 1.0), hosts[2].come(10, 3.0))
        assert decided == [(MET, [2.0], 0)] * 2
        hosts[0].hosts.close()
        assert results(hosts[1].come(10, 50.0))[0][1] == [2.0]
        both = results(hosts[1].come(20, 4.0), hosts[2].come(20, 6.0))
        assert [result[1] for result in both] == [[5.0], [5.0]]
        assert hosts[2].hosts.present == (1, 2)


def test_a_host_that_ended_is_not_waited_for():
    """Fewer than the quorum are left: all of them count."""
    with group(3, quorum=3, timeout_seconds=600.0) as (hosts, _):
        hosts[2].hosts.close()
        came = results(hosts[0].come(10, 1.0), hosts[1].come(10, 3.0))
        assert came == [(MET, [2.0], 0)] * 2
        assert hosts[0].hosts.present == (0, 1)


def test_too_few_hosts_end_with_an_error_on_all():
    with group(3, min_hosts=3, timeout_seconds=2.0) as (hosts, _):
        hosts[2].hosts.close()
        for future in [host.come(10, 1.0) for host in hosts[:2]]:
            with pytest.raises(WorkerLostError, match="2 of 3 hosts are left"):
                future.result(SECONDS)


def test_another_sync_on_one_host_is_refused():
    with group(2) as (hosts, _):
        waits = hosts[0].come(10, 1.0)
        with pytest.raises(CollectiveError, match="same sync"):
            hosts[1].come(20, 1.0).result(SECONDS)
        hosts[1].hosts.close()
        assert waits.result(SECONDS)[1] == [1.0]


def test_random_lateness_never_splits_the_group():
    """Each host comes when it likes; the means after an update are the same bits on all
    hosts that have them, and every host has all rounds, in order, or is left out."""
    updates, seen = 40, [{} for _ in range(3)]
    with group(3, every=1, kept_rounds=100) as (hosts, _):

        def train(host):
            random, update = np.random.default_rng(host.rank), 0
            while update < updates:
                update += 1
                threading.Event().wait(random.exponential(0.005))
                _, rounds, skipped = host.come(update, random.normal()).result(SECONDS)
                for number, mean in enumerate(rounds):
                    seen[host.rank][update + number] = mean
                update += skipped

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            list(threads.map(train, hosts))
    assert all(sorted(s)[:updates] == list(range(1, updates + 1)) for s in seen)
    assert seen[0].items() >= dict(list(seen[1].items())[:updates]).items()
    assert dict(list(seen[1].items())[:updates]) == dict(
        list(seen[2].items())[:updates]
    )


def test_equal_weights_give_the_bits_of_the_plain_mean():
    random = np.random.default_rng(1)
    brought = [[random.normal(size=5).astype("float32")] for _ in range(3)]
    plain = (brought[0][0] + brought[1][0] + brought[2][0]) / 3
    for weights in ([7.0] * 3, [0.0] * 3):
        np.testing.assert_array_equal(weighted_mean_of(weights, brought)[0], plain)
    (mean,) = weighted_mean_of([1.0, 0.0, 3.0], brought)
    wanted = 0.25 * brought[0][0] + 0.75 * brought[2][0]
    np.testing.assert_array_equal(mean, wanted)  # 1/4 and 3/4 are exact
    assert mean.dtype == np.float32


GOOD = {"rounds": [[0, 10]], "part": 0.5, "epoch": 2, "done": 10}
GOOD |= {"members": [0, 1], "addresses": {}, "place": [0, 0]}


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": None},
        {"rounds": []},
        {"rounds": [[0, 10]] * 3},  # more than a host keeps
        {"rounds": [[0]]},
        {"rounds": [[0, -10]]},
        {"rounds": [["0", 10]]},
        {"part": float("nan")},
        {"part": 1.5},
        {"part": None},
        {"epoch": -1},
        {"members": [1, 0]},
        {"members": [9]},
        {"addresses": {"0": ["h"]}},
    ],
)
def test_rounds_that_no_host_sends_are_a_value_error(change):
    class Wire:
        def receive_line(self):
            return {**GOOD, **change}

        def fill(self, arrays):
            arrays[0][:] = 1.0

    with group(2) as (hosts, _), pytest.raises(ValueError):
        hosts[1].hosts._quorum._read_rounds(Wire())


def test_rounds_of_a_second_optimizer_are_refused():
    """It would get the first one's rounds."""
    with group(1) as (hosts, _):
        other = QuorumRules(2, 0.0, 10, 2)
        with pytest.raises(ConfigurationError, match="A second optimizer"):
            hosts[0].hosts.begin_quorum(other, [np.zeros(3, np.float32)])
