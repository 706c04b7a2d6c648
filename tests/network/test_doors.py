"""Ports are open on the interface that leads to worker 0, and to the workers only."""

import json
import subprocess
import sys

import pytest

from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS
from tfdp.tools.measuring.two_hosts import ADDRESSES, two_hosts, why_no_hosts

REASON = why_no_hosts()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# Of each worker: two on the first.
HOSTS = (0, 0, 1)


def test_ports_are_open_where_the_workers_are():
    with two_hosts("1gbit") as hosts:
        processes = [
            subprocess.Popen(
                hosts.command(
                    *(host, sys.executable, "-m", "tests.support.network_doors"),
                    *(str(rank), f"{ADDRESSES[0]}:21078"),
                ),
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(HOSTS)
        ]
        ends = [process.communicate(timeout=LONGEST_SECONDS) for process in processes]
    assert [p.returncode for p in processes] == [0, 0, 0], ends
    expected = [ADDRESSES[host] for host in HOSTS]
    for rank, (output, _) in enumerate(ends):
        facts = json.loads(output)
        assert facts["total"] == 6.0
        assert facts["hosts"] == expected
        # Worker 0 has the port of the meeting, too.
        assert facts["open_at"] == [expected[rank]] * (2 if rank == 0 else 1)
        # Nobody was shut out who is a worker.
        assert facts["is_closed"]
