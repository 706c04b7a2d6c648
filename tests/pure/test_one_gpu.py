"""The report of one card: a group that crashes or hangs is one line of it."""

import json
import time

import pytest

from tests.support.package_source import REPOSITORY

SECONDS = 60
GOOD = "print('ROW ' + json.dumps(dict(row='a', state='ok', seconds=1.5, "
GOOD = f"import json; {GOOD}figures={{'ms': 2.0}}, device='CPU')))"
CRASH = f"{GOOD}; import os; os.kill(os.getpid(), 9)"
ALONE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "ready").touch()
print("READY", flush=True)
sys.stdin.readline()
state = "ok" if (folder / "done").exists() else "too early"
print("ROW " + json.dumps(dict(row="a", state=state, seconds=1.0, figures={})))
"""
BESIDE = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while not (folder / "ready").exists():
    time.sleep(0.01)
time.sleep(0.5)  # a turn that is given now would be too early
(folder / "done").touch()
"""
HANG = "import time; print('still here', flush=True); time.sleep(600)"


@pytest.fixture
def one_gpu():
    from benchmarks import one_gpu

    return one_gpu


def run(one_gpu, folder, groups, seconds=SECONDS):
    machine = one_gpu.report.machine_facts(REPOSITORY, ["one_gpu.py"])
    results = one_gpu.Results(folder, machine)
    until = time.monotonic() + seconds
    one_gpu.run_groups(groups, results, until, at_once=2, factor=1)
    results.write()
    rows = json.loads((folder / "rows.json").read_text("utf-8"))["rows"]
    states = {(row["group"], row["row"]): row["state"].split(":")[0] for row in rows}
    return states, (folder / "report.md").read_text("utf-8")


def group(one_gpu, name, program, *words, seconds=SECONDS, alone=False):
    return one_gpu.Group(name, "overhead", seconds, ("-c", program, *words), alone)


def test_what_crashes_or_hangs_is_one_line(one_gpu, tmp_path, capfd):
    groups = [
        group(one_gpu, "hang", HANG, seconds=2),
        group(one_gpu, "crash", CRASH),
        group(one_gpu, "program", "print('fine')"),
        group(one_gpu, "good", GOOD, alone=True),
    ]
    states, page = run(one_gpu, tmp_path, groups)
    assert states == {
        ("hang", ""): "TOO LONG",
        ("crash", "a"): "ok",
        ("crash", ""): "FAILED",
        ("program", ""): "ok",
        ("good", "a"): "ok",
    }
    assert page.startswith("**")  # no GPU was told of
    assert "- hang (" in page and "still here" in page
    assert "- crash (" in page and "exit code -9" in page
    assert "| good: a | 2 |" in page
    assert "good: a (1.5 s): ms 2" in capfd.readouterr().out


def test_the_total_time_leaves_a_report(one_gpu, tmp_path):
    groups = [
        group(one_gpu, "hang", HANG),
        group(one_gpu, "hang too", HANG, alone=True),
        group(one_gpu, "good", GOOD),
    ]
    states, page = run(one_gpu, tmp_path, groups, seconds=2)
    states_of = {name: state for (name, _), state in states.items()}
    assert states_of == {"hang": "TOO LONG", "hang too": "TOO LONG", "good": "NOT RUN"}
    assert "the total time was over" in page


def test_what_is_timed_waits_for_its_turn(one_gpu, tmp_path):
    groups = [
        group(one_gpu, "alone", ALONE, str(tmp_path), alone=True),
        group(one_gpu, "beside", BESIDE, str(tmp_path)),
    ]
    states, _ = run(one_gpu, tmp_path, groups)
    assert states == {("alone", "a"): "ok", ("beside", ""): "ok"}


def test_a_page_that_fails_loses_no_row(one_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(one_gpu.report, "report_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # when the run ends
        run(one_gpu, tmp_path, [group(one_gpu, "good", f"{GOOD}; {GOOD}")])
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    assert [row["state"] for row in rows] == ["ok", "ok"]


def test_a_figure_beside_its_plan(one_gpu):
    def row(group, case, **figures):
        return {
            "group": group,
            "section": "memory",
            "row": case,
            "state": "ok",
            "seconds": 1.0,
            "figures": figures,
        }

    rows = [
        row("plan", "remat", **{"planned MB": 95.0}),
        row("memory-remat", "remat", note="no reading"),
        row("plan", "none", **{"planned MB": 95.0}),
        row("memory-none", "none", **{"peak MB": 100.0}),
    ]
    machine = one_gpu.report.machine_facts(REPOSITORY, [])
    assert "| 95 | 100 | -5 |" in one_gpu.report.report_text(machine, rows, "")


def test_resnet_50_has_its_weights(one_gpu):
    from benchmarks.bench.gradient_sets import count_parameters
    from benchmarks.one_gpu_rows import resnet50_shapes

    assert len(resnet50_shapes()) == 214
    assert count_parameters(resnet50_shapes()) == 25_583_592
