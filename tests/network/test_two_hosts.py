"""Two hosts over a real, limited link: right numbers, and no byte more than needed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support import host_training
from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS
from tfdp.tools.measuring.two_hosts import ADDRESSES, two_hosts, why_no_hosts

REASON = why_no_hosts()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PORT = 21077


@pytest.fixture(scope="module")
def hosts():
    with two_hosts("1gbit") as made:
        yield made


def run_on_both(hosts, *module_and_arguments, variables=None):
    processes = [
        subprocess.Popen(
            hosts.command(rank, sys.executable, "-m", *module_and_arguments),
            cwd=REPOSITORY,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TFDP_WORKERS": "2",
                "TFDP_RANK": str(rank),
                "TFDP_COORDINATOR": f"{ADDRESSES[0]}:{PORT}",
                "TFDP_DEVICES_PER_WORKER": "2",
                **(variables or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=LONGEST_SECONDS)[0] for process in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(outputs)[-3000:]
    return outputs


def test_training_equals_one_device(hosts, tmp_path):
    path = tmp_path / "run"
    names = ("sgd", "accumulation")
    run_on_both(hosts, "tests.support.host_training", str(path), "none", *names)
    for name in names:
        expected = host_training.run(name, tf.distribute.get_strategy())
        for rank in range(2):
            with np.load(f"{path}.{name}.{rank}.npz") as got:
                for key, value in expected.items():
                    # As in tests/processes/test_multi_host.py.
                    np.testing.assert_allclose(got[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("wire_dtype, share", [("", 1.0), ("bfloat16", 0.5)])
def test_each_host_sends_its_share_once(hosts, wire_dtype, share):
    megabytes, repeats = 4.0, 3
    before = [hosts.sent_bytes(host) for host in (0, 1)]
    processes = [
        subprocess.Popen(
            hosts.command(
                *(rank, sys.executable, "-m", "tests.support.link_timing"),
                *(str(rank), "2", f"{ADDRESSES[0]}:{PORT + 1}"),
                *(str(megabytes), str(repeats)),
            ),
            cwd=REPOSITORY,
            env={**os.environ, "DEVICES": "2", "WIRE_DTYPE": wire_dtype},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=LONGEST_SECONDS) for process in processes] == [0, 0]
    # 2 n (H - 1) / H = n bytes from each host and sum, half of them in 16 bits, and
    # what TCP, heartbeats and the meeting add: below 8%.
    for host in (0, 1):
        sent = hosts.sent_bytes(host) - before[host]
        assert share < sent / (megabytes * 1e6 * repeats) < 1.08 * share


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("engine", ["sockets", "tensorflow"])
def test_the_callback_counts_what_the_link_carries(hosts, engine):
    """The kernel counts the cards' bytes, with TCP's headers (66 bytes to at most
    1,448), acknowledgements (66 to two such segments of the other direction) and
    heartbeats (under 1 kB a second)."""
    outputs = run_on_both(hosts, "tests.support.traffic_workers", "512", engine)
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("counts ")]
        counts = json.loads(line.partition(" ")[2])
        for sent, by_card in zip(counts["between"], counts["cards"], strict=True):
            # Two replicas to a host, and 2 n (H - 1) / H = n bytes.
            assert 1.0 < sent / counts["gradients"] < 1.001
            assert 1.0 < by_card / sent < 1.08


def test_the_benchmark_counts_two_levels_and_one(tmp_path):
    path = tmp_path / "report.json"
    arms = ["tfdp-sockets-flat", "tfdp-sockets"]
    done = run_python(
        *("-m", "benchmarks.workers", "--arms", *arms),
        *("--case", "network-allreduce-100mbit", "--repeats", "1"),
        *("--json", path, "--timeout-seconds", "150"),
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text("utf-8"))["results"]
    flat, two_level = (
        result["arms"][arm]["facts"]["sent_bytes_per_call"][0] for arm in arms
    )
    # One ring of 4 sends 2 n 3/4 = 1.5 n over the link each way, two levels n, of n =
    # 4 x 1,199,882 bytes; frames, acknowledgements and heartbeats add below 8%.
    assert 1.0 < two_level / (4 * 1_199_882) < 1.08
    assert 1.0 < flat / (1.5 * 4 * 1_199_882) < 1.08
    assert result["settings"]["link_rate"] == "100mbit"
