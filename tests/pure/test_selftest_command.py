"""`tfdp selftest`: which parts there are, what is told of them, and what is written."""

import json
import os
import sys

import pytest

from tfdp.errors import DeviceError
from tfdp.tools.commands import cli
from tfdp.tools.processes import devices
from tfdp.tools.processes.children import ProcessFailed
from tfdp.tools.selftest import command
from tfdp.tools.selftest.parts import parts_for

FACTS = {
    "versions": {"tfdp": "1"},
    "checked_versions": None,
    "machine": {
        "system": "Linux",
        "processor": "x",
        "usable_cores": 2,
        "memory_bytes": None,
    },
    "devices": {"physical": [], "logical": []},
    "strategy": None,
    "cluster": None,
    "warnings": [],
}
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
GPU = {"name": "/physical_device:GPU:0", "type": "GPU", "model": "A100"}


@pytest.fixture
def asked(monkeypatch):
    """What workers are asked; each finds its part right, unless told otherwise."""
    answers, asked = {}, []

    def stand_in(module, what, timeout_seconds):
        asked.append(what)
        found = answers.get(what["part"]["title"], {"state": "right", "said": "fine"})
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(command, "ask_child", stand_in)
    monkeypatch.setenv(GROWTH, "before")  # and set back afterwards
    monkeypatch.delenv(GROWTH)
    monkeypatch.setattr(command, "gather_facts", lambda: FACTS)
    monkeypatch.setattr(command, "gpu_links", lambda: "GPU0 NV4 GPU1")
    asked_and_answers = asked, answers
    return asked_and_answers


def test_every_engine_and_stage_is_looked_at():
    titles = [part.title for part in parts_for("cpu", 3)]
    assert len(set(titles)) == len(titles)
    for word in ("in_process", "tensorflow", "none", "optimizer", "gradients", "XLA"):
        assert any(word in title for title in titles), word
    assert not any(
        "two levels" in title for title in [*titles, *map(str, parts_for("cpu", 5))]
    )
    assert sum("two levels" in part.title for part in parts_for("cpu", 4)) == 2


def test_on_gpus_one_replica_is_looked_at_too():
    on_cpus, on_gpus = (parts_for(kind, 2) for kind in ("cpu", "gpu"))
    more = [part for part in on_gpus if part not in on_cpus]
    assert len(on_gpus) == len(on_cpus) + len(more)
    assert all(part.one_replica for part in more)
    trained = {(p.policy, p.jit_compile) for p in more if p.kind == "training"}
    assert trained == {
        *(("float32", False), ("float32", True)),
        *(("mixed_bfloat16", False), ("mixed_float16", False)),
    }
    # A CPU has no allocator that tells its peak.
    assert [part.kind for part in more if part.kind != "training"] == ["memory"]


def test_all_is_right(asked, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    report = json.loads(path.read_text("utf-8"))
    titles = [part.title for part in parts_for("cpu", 2)]
    assert [part["title"] for part in report["parts"]] == titles
    assert report["gpu_links"] == "GPU0 NV4 GPU1" and report["facts"] == FACTS
    assert all(title in said for title in titles)
    assert f"all {len(titles)} right" in said and str(path) in said
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("cpu", 2)}


@pytest.mark.parametrize(
    "found, word",
    [
        ({"state": "WRONG", "said": "a sum is off"}, "a sum is off"),
        (ProcessFailed("no result within 300 s", [], True), "no result within 300 s"),
    ],
)
def test_one_that_is_not_right_does_not_stop_the_others(
    asked, tmp_path, capsys, found, word
):
    title = parts_for("cpu", 2)[1].title
    asked[1][title] = found
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--json", str(path)]) == 1
    said = capsys.readouterr().out
    parts = json.loads(path.read_text("utf-8"))["parts"]
    assert len(parts) == len(parts_for("cpu", 2))
    assert [part["title"] for part in parts if part["state"] != "right"] == [title]
    assert f"1 of {len(parts)} NOT right: {title}" in said and word in said


def with_gpus(monkeypatch, tmp_path, count):
    found = {**FACTS, "devices": {"physical": [GPU] * count, "logical": []}}
    monkeypatch.setattr(command, "gather_facts", lambda: found)
    monkeypatch.chdir(tmp_path)


def test_all_gpus_are_taken(asked, monkeypatch, tmp_path):
    with_gpus(monkeypatch, tmp_path, 4)
    assert cli.main(["selftest"]) == 0
    assert (tmp_path / command.REPORT).exists()
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("gpu", 4)}
    asked[0].clear()
    assert cli.main(["selftest", "--device-type", "cpu"]) == 0
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("cpu", 2)}


@pytest.mark.parametrize("words, devices", [([], 2), (["--devices", "4"], 4)])
def test_a_single_gpu_is_split(asked, monkeypatch, tmp_path, capsys, words, devices):
    with_gpus(monkeypatch, tmp_path, 1)
    assert cli.main(["selftest", *words]) == 0
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("gpu", devices)}
    titles = [a["part"]["title"] for a in asked[0]]
    assert titles == [part.title for part in parts_for("gpu", devices)]
    assert f"{devices} logical GPUs of one GPU" in capsys.readouterr().out
    # Or the command would keep all memory of the GPU from the workers.
    assert os.environ[GROWTH] == "true"


def test_what_the_user_says_of_growth_stays(asked, monkeypatch, tmp_path):
    with_gpus(monkeypatch, tmp_path, 1)
    monkeypatch.setenv(GROWTH, "false")
    assert cli.main(["selftest"]) == 0
    assert os.environ[GROWTH] == "false"


def test_more_gpus_than_there_are_are_refused(asked, capsys, tmp_path, monkeypatch):
    with_gpus(monkeypatch, tmp_path, 2)
    assert cli.main(["selftest", "--devices", "3"]) == 2
    assert "3 GPUs were requested, and TensorFlow sees 2" in capsys.readouterr().err
    with_gpus(monkeypatch, tmp_path, 0)
    assert cli.main(["selftest", "--device-type", "gpu"]) == 2
    assert "2 GPUs were requested, and TensorFlow sees 0" in capsys.readouterr().err
    assert not asked[0]
    with pytest.raises(SystemExit):
        cli.main(["selftest", "--devices", "1"])


def test_a_missing_folder_is_refused_before_the_work(asked, capsys, tmp_path):
    path = tmp_path / "none" / "report.json"
    assert cli.main(["selftest", "--json", str(path)]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert not asked[0]


def test_a_report_that_cannot_be_written_is_said_after_what_was_found(
    asked, capsys, tmp_path
):
    path = tmp_path / ("n" * 300)
    assert cli.main(["selftest", "--json", str(path)]) == 2
    said = capsys.readouterr()
    assert " right" in said.out and "written to" not in said.out
    assert f"tfdp selftest: --json {path} cannot be written (File name" in said.err


def pretend_gpus(monkeypatch, count):
    """TensorFlow sees so many; gives how each was split."""
    split = []

    class Config:
        @staticmethod
        def list_physical_devices(kind):
            return [f"{kind}:{number}" for number in range(count)]

        @staticmethod
        def LogicalDeviceConfiguration(memory_limit):
            return memory_limit

        @staticmethod
        def set_logical_device_configuration(gpu, parts):
            split.append((gpu, parts))

    class TensorFlow:
        config = Config

    monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow)
    return split


@pytest.mark.parametrize("gpus, may_split", [(0, True), (1, False), (2, True)])
def test_gpus_that_are_not_there_are_no_devices(monkeypatch, gpus, may_split):
    split = pretend_gpus(monkeypatch, gpus)
    words = f"3 GPUs were requested, but there are {gpus}"
    with pytest.raises(DeviceError, match=words):
        devices.set_up_devices("gpu", 3, may_split=may_split)
    assert not split


def test_a_worker_splits_the_only_gpu_if_it_may(monkeypatch):
    split = pretend_gpus(monkeypatch, 1)
    found = devices.set_up_devices("gpu", 3, may_split=True)
    assert found == ["GPU:0", "GPU:1", "GPU:2"]
    assert split == [("GPU:0", [devices.SPLIT_GPU_MIB] * 3)]
    split.clear()
    assert devices.set_up_devices("gpu", 1, may_split=True) == ["GPU:0"]
    assert not split
