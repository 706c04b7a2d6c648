"""`tfdp selftest`: which parts there are, what is told of them, and what is written."""

import json
import sys

import pytest

from tfdp.bench import worker_process
from tfdp.bench.worker_process import WorkerFailed, run_worker
from tfdp.commands import cli
from tfdp.errors import DeviceError
from tfdp.selftest import command
from tfdp.selftest.parts import parts_for

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

    monkeypatch.setattr(command, "run_worker", stand_in)
    monkeypatch.setattr(command, "gather_facts", lambda: FACTS)
    monkeypatch.setattr(command, "gpu_links", lambda: "GPU0 NV4 GPU1")
    asked_and_answers = asked, answers
    return asked_and_answers


def test_every_engine_and_stage_is_looked_at():
    titles = [part.title for part in parts_for(3)]
    assert len(set(titles)) == len(titles)
    for word in ("in_process", "tensorflow", "none", "optimizer", "gradients", "XLA"):
        assert any(word in title for title in titles), word
    assert not any(
        "two levels" in title for title in [*titles, *map(str, parts_for(5))]
    )
    assert sum("two levels" in part.title for part in parts_for(4)) == 2


def test_all_is_right(asked, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    report = json.loads(path.read_text("utf-8"))
    titles = [part.title for part in parts_for(2)]
    assert [part["title"] for part in report["parts"]] == titles
    assert report["gpu_links"] == "GPU0 NV4 GPU1" and report["facts"] == FACTS
    assert all(title in said for title in titles)
    assert f"all {len(titles)} right" in said and str(path) in said
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("cpu", 2)}


@pytest.mark.parametrize(
    "found, word",
    [
        ({"state": "WRONG", "said": "a sum is off"}, "a sum is off"),
        (WorkerFailed("no result within 300 s"), "no result within 300 s"),
    ],
)
def test_one_that_is_not_right_does_not_stop_the_others(
    asked, tmp_path, capsys, found, word
):
    title = parts_for(2)[1].title
    asked[1][title] = found
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--json", str(path)]) == 1
    said = capsys.readouterr().out
    parts = json.loads(path.read_text("utf-8"))["parts"]
    assert len(parts) == len(parts_for(2))
    assert [part["title"] for part in parts if part["state"] != "right"] == [title]
    assert f"1 of {len(parts)} NOT right: {title}" in said and word in said


def test_gpus_are_taken_where_there_are_two(asked, monkeypatch, tmp_path):
    gpus = {**FACTS, "devices": {"physical": [GPU] * 4, "logical": []}}
    monkeypatch.setattr(command, "gather_facts", lambda: gpus)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["selftest"]) == 0
    assert (tmp_path / command.REPORT).exists()
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("gpu", 4)}
    asked[0].clear()
    assert cli.main(["selftest", "--device-type", "cpu"]) == 0
    assert {(a["device_type"], a["devices"]) for a in asked[0]} == {("cpu", 2)}


def test_more_gpus_than_there_are_are_refused(asked, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["selftest", "--device-type", "gpu"]) == 1
    assert "2 GPUs were asked for, and TensorFlow sees 0" in capsys.readouterr().err
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


def worker(tmp_path, monkeypatch, source):
    (tmp_path / "stand_in_worker.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stand_in_worker"


def test_a_worker_answers(tmp_path, monkeypatch):
    name = worker(
        tmp_path,
        monkeypatch,
        "import json, sys\n"
        "open(sys.argv[2], 'w').write(json.dumps([json.loads(sys.argv[1]), 'x']))\n",
    )
    assert run_worker(name, {"a": 1}, 60) == [{"a": 1}, "x"]


@pytest.mark.parametrize(
    "source, seconds, word",
    [
        ("raise SystemExit('out of memory')", 60, "out of memory"),
        ("print('bye')", 60, "ended without a result\nbye"),
        ("import os; os.abort()", 60, "killed by signal 6"),
        ("import time; time.sleep(600)", 1, "no result within 1 s"),
    ],
)
def test_a_worker_that_leaves_no_result(tmp_path, monkeypatch, source, seconds, word):
    name = worker(tmp_path, monkeypatch, source)
    with pytest.raises(WorkerFailed, match=word):
        run_worker(name, {}, seconds)


def test_gpus_that_are_not_there_are_no_devices(monkeypatch):
    class Config:
        @staticmethod
        def list_physical_devices(kind):
            return []

    class TensorFlow:
        config = Config

    monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow)
    with pytest.raises(DeviceError, match="2 GPUs were asked for, but there are 0"):
        worker_process.set_up_devices("gpu", 2)
