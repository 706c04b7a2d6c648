"""Checkpoints of two hosts whose link is slow, or is cut while they save and restore.

The reference is the same training over a link of 1 Gbit/s that nothing happens to: each
ends with the same bits, and has trained on every sample once in each epoch.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.fault_plans import check_samples, numbers_of
from tests.support.package_source import REPOSITORY
from tests.support.resumed_training import Options
from tests.support.workers import LONGEST_SECONDS, end
from tfdp.tools.measuring.two_hosts import ADDRESSES, two_hosts, why_no_hosts

REASON = why_no_hosts()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.slow,
]
PORT = 21090
# 22 kB of weights, gathered, and their gradients in each of 24 steps: as many bytes as
# 1 Mbit/s carries in some seconds.
TRAINING = {"shard": "parameters", "width": 500}
BREAK_OFF = {"where": "after", "how": "raise", "rank": 1, "number": 10, "seconds": 0}


class Training:
    """One training on both hosts, started again and again.

    Args:
      hosts: what `two_hosts` gave.
      folder: of everything that is written.
    """

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.starts = hosts, folder, 0
        self.result = str(folder / "run")
        self.processes = []

    def start(self, fault=None, **options):
        given = Options(
            folder=str(self.folder / "checkpoints"),
            result=self.result,
            start=self.starts,
            fault=fault,
            **TRAINING,
            **options,
        )
        self.starts += 1
        self.processes = [
            subprocess.Popen(
                self.hosts.command(
                    *(rank, sys.executable, "-m", "tests.support.resumed_training"),
                    json.dumps(vars(given)),
                ),
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    "TFDP_WORKERS": "2",
                    "TFDP_RANK": str(rank),
                    "TFDP_COORDINATOR": f"{ADDRESSES[0]}:{PORT + self.starts}",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]

    def outputs(self):
        return [p.communicate(timeout=LONGEST_SECONDS)[0] for p in self.processes]

    def codes(self):
        return [process.returncode for process in self.processes]

    def succeed(self):
        outputs = self.outputs()
        assert self.codes() == [0, 0], "\n".join(outputs)[-4000:]

    def fail(self):
        outputs = self.outputs()
        assert all(self.codes()), "\n".join(outputs)[-4000:]
        return outputs

    def close(self):
        for process in self.processes:
            end(process)
            process.stdout.close()


@pytest.fixture
def training_over(tmp_path):
    """From a rate, a training; ended, and its link taken away, at the end."""
    made = []

    def make(rate):
        hosts = two_hosts(rate)
        made.append((hosts, Training(hosts.__enter__(), tmp_path)))
        return made[-1][1]

    yield make
    for hosts, training in made:
        training.close()
        hosts.__exit__(None, None, None)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with two_hosts("1gbit") as hosts:
        training = Training(hosts, tmp_path_factory.mktemp("undisturbed"))
        training.start()
        training.succeed()
    return numbers_of(training.result, 0)


def assert_ends_as(expected, training):
    for rank in range(2):
        found = numbers_of(training.result, rank)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    check_samples(training.result, 3)
    left = training.folder / "checkpoints"
    assert not list(left.rglob(".writing-*"))


def wait_for(path, training):
    deadline = time.monotonic() + LONGEST_SECONDS
    while not path.exists():
        ended = [code for p in training.processes if (code := p.poll()) is not None]
        assert not ended, "\n".join(training.outputs())[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fault_at(where, folder):
    """Worker 1 comes to a place and waits there for the link to be cut."""
    return {
        **{"where": where, "how": "wait", "rank": 1, "path": str(folder / "there")},
        "number": 1 if where == "restoring" else 2 if where == "saving" else 8,
        "seconds": 0,
    }


def cut_at(where, training, **options):
    """Starts, and cuts the link when worker 1 is at that place."""
    if where == "restoring":
        training.start(BREAK_OFF)
        training.fail()
    training.start(fault_at(where, training.folder), **options)
    wait_for(training.folder / "there", training)
    training.hosts.cut()
    (training.folder / "there.go").touch()


def test_a_link_of_one_megabit(expected, training_over):
    training = training_over("1mbit")
    training.start(BREAK_OFF)
    training.fail()
    training.start()
    training.succeed()
    assert_ends_as(expected, training)
    # What crossed it takes the link longer than a second: it was a slow one.
    assert training.hosts.sent_bytes(0) * 8 > 1e6


@pytest.mark.parametrize("where", ["saving", "restoring", "after"])
def test_a_link_that_is_gone_for_three_seconds(expected, training_over, where):
    training = training_over("1gbit")
    cut_at(where, training)
    time.sleep(3.0)
    training.hosts.join()
    training.succeed()
    assert_ends_as(expected, training)


@pytest.mark.parametrize("where", ["saving", "restoring", "after"])
def test_a_link_that_is_gone_for_good(expected, training_over, where):
    training = training_over("1gbit")
    cut_at(where, training, silence_seconds=4, timeout_seconds=30)
    outputs = training.fail()
    for rank, output in enumerate(outputs):
        assert f"orker {1 - rank}" in output, output[-4000:]
    training.hosts.join()
    training.start()
    training.succeed()
    assert_ends_as(expected, training)
