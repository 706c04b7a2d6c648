"""`python -m benchmarks.bench --workers 2` with real processes, on tiny subjects."""

import json

import pytest

from benchmarks.bench.cases import CASES
from benchmarks.bench.processes.arms import GROUP_ARMS
from benchmarks.bench.processes.group import Group
from benchmarks.bench.request import Request
from tests.support.fresh_python import run_python
from tfdp.errors import CollectiveError

# Containers run tests as root, which Open MPI refuses without these.
MAY_RUN_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def bench(path, *arguments):
    """The report of `python -m benchmarks.bench ARGUMENTS --workers 2 --quick`."""
    done = run_python(
        *("-m", "benchmarks.bench", *arguments, "--workers", "2"),
        *("--quick", "--repeats", "1", "--json", path),
        *("--timeout-seconds", "800"),
        environment=MAY_RUN_AS_ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text("utf-8")), done.stdout


def test_every_arm_sums_right_on_every_worker(tmp_path):
    report, text = bench(tmp_path / "report.json", "--case", "allreduce-resnet50")
    (result,) = report["results"]
    arms = result["arms"]
    left_out = set(result["left_out"])
    # A worker that finds a wrong sum fails its arm, and the command with it.
    ours = {
        name
        for name, arm in GROUP_ARMS.items()
        if arm.by_default and "allreduce" in arm.works
    }
    assert arms.keys() | left_out == ours
    assert left_out <= {"tfdp-mpi"}
    for arm in arms.values():
        assert [worker["sums_checked"] for worker in arm["facts"]["workers"]] == [6, 6]
        assert len(arm["seconds"]) == 1 and arm["seconds"][0] > 0
    assert result["settings"]["workers"] == 2
    assert "times as fast as stock-multi-worker" in text


def test_arms_train_the_same_weights_on_every_worker(tmp_path):
    arms = ["one-process", "stock-multi-worker", "tfdp-sockets"]
    report, text = bench(
        tmp_path / "report.json", "--case", "train-mlp", "--arms", *arms
    )
    (result,) = report["results"]
    norms = {
        name: [w["weight_norm_after_warm_up"] for w in arm["facts"]["workers"]]
        for name, arm in result["arms"].items()
    }
    assert list(norms) == arms
    for arm in arms[1:]:
        assert norms[arm][0] == norms[arm][1]
    # Eight steps of 0.01 on weights of norm 6, each rounded to 2^-24 in some hundred
    # additions: 1e-5 of them at most. One process has half the batch: 3e-4 off.
    stock, ours = norms["stock-multi-worker"][0], norms["tfdp-sockets"][0]
    assert ours == pytest.approx(stock, rel=1e-5)
    assert norms["one-process"][0] != pytest.approx(stock, rel=1e-4)
    assert result["arms"]["tfdp-sockets"]["items_per_call"] == 128
    assert result["arms"]["one-process"]["efficiency"]["median"] == 1.0
    assert "efficiency" in text


def test_an_arm_that_takes_too_long_is_stopped():
    request = Request(CASES["allreduce-resnet50"], devices=1, workers=2, quick=True)
    group = Group(request, "tfdp-sockets", budget_seconds=0.5)
    try:
        with pytest.raises(CollectiveError, match=r"not done within its 0\.5 s"):
            group.start()
    finally:
        group.close()
    for process in group.children.processes:
        assert process.returncode != 0


def test_an_arm_whose_worker_dies_is_told_with_its_last_lines():
    # The command line refuses 0 devices; here the worker does, where it reads them.
    request = Request(CASES["allreduce-resnet50"], devices=0, workers=2, quick=True)
    group = Group(request, "tfdp-sockets", budget_seconds=60)
    try:
        with pytest.raises(CollectiveError, match="TFDP_DEVICES_PER_WORKER"):
            group.start()
    finally:
        group.close()
