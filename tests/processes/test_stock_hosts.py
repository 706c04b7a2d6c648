"""Defect D3: an infinity on one worker locks the stock strategy of several workers.

tfdp's side is the row `loss-scaling` of test_multi_host.py.
"""

import json
import os
import subprocess
import sys

from tests.support.package_source import REPOSITORY
from tests.support.workers import free_port


def trained(bad_worker):
    """What two workers printed."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.stock_hosts", str(bad_worker)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": addresses},
                        "task": {"type": "worker", "index": rank},
                    }
                ),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=40)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate()[0])
    return outputs


def test_stock_locks_where_one_worker_meets_an_infinity():
    assert ["done" in output for output in trained(-1)] == [True, True]
    mended = "D3 seems to be mended in the stock strategy"
    assert ["done" in output for output in trained(1)] != [True, True], mended
