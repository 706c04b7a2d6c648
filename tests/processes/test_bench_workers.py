"""`tfdp bench --workers 2` with real processes, on tiny subjects."""

import json

import pytest

from tests.support.fresh_python import run_python
from tfdp.bench.processes.arms import GROUP_ARMS
from tfdp.bench.processes.group import Group
from tfdp.bench.request import Request
from tfdp.errors import CollectiveError

# Containers run tests as root, which Open MPI refuses without these.
MAY_RUN_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def bench(path, *arguments):
    """The report of `tfdp bench ARGUMENTS --workers 2 --quick`."""
    done = run_python(
        *("-m", "tfdp", "bench", *arguments, "--workers", "2"),
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
    assert left_out <= {"tfdp-mpi", "torch-gloo"}
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


def test_bucket_sizes_and_16_bits_train_as_the_default_does(tmp_path):
    arms = [
        "tfdp-sockets",
        "tfdp-sockets-no-overlap",
        "tfdp-sockets-small-buckets",
        "tfdp-sockets-bfloat16",
    ]
    report, _ = bench(tmp_path / "report.json", "--case", "train-mlp", "--arms", *arms)
    (result,) = report["results"]
    norms = [
        [
            w["weight_norm_after_warm_up"]
            for w in result["arms"][arm]["facts"]["workers"]
        ]
        for arm in arms
    ]
    assert all(mine == theirs for mine, theirs in norms)
    ours, large, small, rounded = (mine for mine, _ in norms)
    # Two numbers added are the same in any bucket.
    assert large == small == ours
    # Eight steps of 0.01 move the norm by some 0.1; each is off by 2^-8 at most.
    assert rounded != ours
    assert rounded == pytest.approx(ours, abs=0.1 * 2**-8)


def test_pytorch_sums_and_trains_alike_on_every_worker(tmp_path):
    pytest.importorskip("torch")
    arms = ["torch-one-process", "torch-gloo"]
    report, _ = bench(tmp_path / "report.json", "--case", "train-cnn", "--arms", *arms)
    (result,) = report["results"]
    norms = [
        w["weight_norm_after_warm_up"]
        for w in result["arms"]["torch-gloo"]["facts"]["workers"]
    ]
    assert norms[0] == norms[1]
    assert result["arms"]["torch-one-process"]["efficiency"]["median"] == 1.0
    assert result["arms"]["torch-gloo"]["items_per_call"] == 128


def test_an_arm_that_takes_too_long_is_stopped():
    request = Request("allreduce-resnet50", devices=1, workers=2, quick=True)
    group = Group(request, "tfdp-sockets", budget_seconds=0.5)
    try:
        with pytest.raises(CollectiveError, match=r"not done within its 0\.5 s"):
            group.start()
    finally:
        group.close()
    for process in group._processes:
        assert process.returncode != 0


def test_an_arm_whose_worker_dies_is_told_with_its_last_lines():
    # The command line refuses 0 devices; here the worker does, where it reads them.
    request = Request("allreduce-resnet50", devices=0, workers=2, quick=True)
    group = Group(request, "tfdp-sockets", budget_seconds=60)
    try:
        with pytest.raises(CollectiveError, match="TFDP_DEVICES_PER_WORKER"):
            group.start()
    finally:
        group.close()


def test_links_of_light_processes_are_timed_and_drawn(tmp_path):
    report, plot = tmp_path / "links.json", tmp_path / "links.html"
    asked = ("links", "--quick", "--json", report, "--plot", plot)
    done = run_python("-m", "tfdp", "bench", *asked)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text("utf-8"))["rows"]
    assert [row["workers"] for row in rows] == [2, 3]
    for row in rows:
        for of_sum in (row["sum_seconds"], row["processor_seconds"]):
            assert set(of_sum) == {"1", "100"}
            assert all(set(arms) == {"ring", "chosen"} for arms in of_sum.values())
        assert row["ways"]["1"] == "gather"
    # A picture for each size, with a point for each number of processes.
    page = plot.read_text("utf-8")
    assert page.count("<svg") == 2 and page.count("<circle") == 2 * 2 * 2
    assert ">3</text>" in page and ">processes</text>" in page


@pytest.mark.parametrize("options", [["train"], ["links", "--list"]])
def test_a_picture_that_nothing_draws_is_refused(tmp_path, options):
    done = run_python("-m", "tfdp", "bench", *options, "--plot", tmp_path / "x.html")
    assert done.returncode == 2 and "only `tfdp bench links`" in done.stderr
