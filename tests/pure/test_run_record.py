"""The files of a run: lines that stand for themselves, and what is read of damage."""

import dataclasses
import json
import os

import pytest

from tests.support.made_runs import MadeRun, write_trace
from tfdp.errors import ConfigurationError, DataError
from tfdp.tools.runs.entries import End, Steps, content_from, entry_from
from tfdp.tools.runs.lines import MOST_LINE_BYTES, content_of, line_of
from tfdp.tools.runs.read import read_run
from tfdp.tools.runs.run_file import LINES, RunFile, steps_of_line
from tfdp.tools.runs.traces import read_trace


def steps(**changes):
    entry = Steps("one", 3, 1, 0, 3, 1.5, 0.5, 0.4, 0.0, 0.5)
    return dataclasses.replace(entry, **changes)


@pytest.mark.parametrize("loss", [0.5, float("inf"), -float("inf"), None])
def test_a_line_says_what_was_written(loss):
    entry = steps(loss=loss, samples=8)
    line = line_of(content_from(entry))
    assert line.endswith(b"}\n")
    json.loads(line, parse_constant=pytest.fail)  # other readers know no NaN
    assert entry_from(content_of(line)) == entry


def test_a_loss_that_is_not_a_number_is_kept():
    found = entry_from(content_of(line_of(content_from(steps(loss=float("nan"))))))
    assert found.loss != found.loss


@pytest.mark.parametrize("place", range(0, 185, 7))
def test_every_changed_byte_is_seen(place):
    line = bytearray(line_of(content_from(steps())))
    line[place] ^= 1
    with pytest.raises(ValueError):
        content_of(bytes(line))


@pytest.mark.parametrize(
    "field, value",
    [
        *[("seconds", v) for v in (-1, float("nan"), "1", None, True, 1e300, 10**400)],
        *[("step", v) for v in (-1, 1.5, "3", None, True, 2**63)],
        *[("steps", v) for v in (0, None)],
        *[("samples", v) for v in (-1, 0.5, [])],
        *[("session", v) for v in (None, 3, "x" * 2000, "\ud800")],
        ("loss", {}),
    ],
)
def test_what_means_nothing_is_refused(field, value):
    content = {**content_from(steps()), field: value}
    with pytest.raises(ValueError, match=f"its {field} means nothing"):
        entry_from(content)


def test_signs_that_a_terminal_obeys_are_left_out():
    content = {**content_from(steps()), "session": "a\x1b[2J\nb"}
    assert entry_from(content).session == "a [2J b"


@pytest.mark.parametrize("version", [0, 2, True, "1", None])
def test_another_version_is_told(tmp_path, version):
    content = {**content_from(MadeRun().start(0)), "version": version}
    tmp_path.joinpath("worker-0.jsonl").write_bytes(line_of(content))
    with pytest.raises(DataError, match="its version is .*, this reads 1"):
        read_run(tmp_path)


def test_lines_become_fewer_and_hold_every_step():
    made, lines = 0, 0
    while made < 1_000_000:
        made += steps_of_line(made)
        lines += 1
    # 1000 lines of each width 1, 2, 4 ... 512, which are 1,023,000 steps.
    assert 9 * LINES < lines < 10 * LINES


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(MadeRun(2, steps=60).write(tmp_path))
    (session,) = run.sessions
    assert run.notes == [] and sorted(session.workers) == [0, 1]
    for rank, worker in session.workers.items():
        assert [line.step for line in worker.steps] == list(range(1, 61))
        assert worker.start.host == f"host-{rank}"
        assert [epoch.epoch for epoch in worker.epochs] == [0, 1, 2]
        assert isinstance(worker.end, End) and worker.first_step == 0


def test_long_runs_share_lines(tmp_path):
    made = MadeRun(steps=2400, epochs=2)
    (session,) = read_run(made.write(tmp_path)).sessions
    lines = session.first.steps
    # 1,000 of one step, 100 of two until the epoch ends, and 600 of two in the second.
    assert [line.steps for line in lines] == [1] * 1000 + [2] * 700
    assert sum(line.samples for line in lines) == 32 * 2400


def test_a_missing_worker_is_named_with_its_host(tmp_path):
    run = read_run(MadeRun(3, present=(0, 2)).write(tmp_path))
    (note,) = run.notes
    assert "1 of 3 workers are missing: worker-1.jsonl (host host-1)" in note


def test_a_torn_last_line_is_left_out_and_the_next_start_begins_a_new_one(tmp_path):
    MadeRun(steps=30).write(tmp_path)
    path = tmp_path / "worker-0.jsonl"
    path.write_bytes(path.read_bytes()[:-300])
    run = read_run(tmp_path)
    assert "ends within a line" in run.notes[0]
    MadeRun(session="two", began_seconds=1_790_000_100.0).write(tmp_path)
    run = read_run(tmp_path)
    assert [session.first.start.session for session in run.sessions] == ["one", "two"]
    assert len(run.sessions[1].first.steps) == 60
    assert "1 of" in run.notes[0] and "damaged and left out" in run.notes[0]


def test_huge_lines_are_left_out(tmp_path):
    MadeRun().write(tmp_path)
    path = tmp_path / "worker-0.jsonl"
    path.write_bytes(path.read_bytes() + b"x" * (3 * MOST_LINE_BYTES) + b"\n")
    with path.open("ab") as file:
        file.write(line_of(content_from(steps(session="one", step=61))))
    run = read_run(tmp_path)
    assert run.sessions[0].first.steps[-1].step == 61
    assert "1 of" in run.notes[0]


def test_lines_of_other_kinds_and_of_no_start_are_counted(tmp_path):
    MadeRun().write(tmp_path)
    with tmp_path.joinpath("worker-0.jsonl").open("ab") as file:
        file.write(line_of({"kind": "later"}))
        file.write(line_of(content_from(steps(session="nobody's"))))
    notes = " ".join(read_run(tmp_path).notes)
    assert "of a kind that this version does not know" in notes
    assert "of no start that can be read" in notes


def test_a_file_of_another_worker_is_not_taken(tmp_path):
    MadeRun(2).write(tmp_path)
    os.replace(tmp_path / "worker-0.jsonl", tmp_path / "worker-1.jsonl")
    with pytest.raises(DataError, match="of no start"):
        read_run(tmp_path)


def test_pipes_and_folders_are_not_waited_for(tmp_path):
    MadeRun(3, present=(0,)).write(tmp_path)
    os.mkfifo(tmp_path / "worker-1.jsonl")
    (tmp_path / "worker-2.jsonl").mkdir()
    os.mkfifo(tmp_path / "step.trace.json")
    run = read_run(tmp_path)
    assert sum("cannot be read" in note for note in run.notes) == 2
    with pytest.raises(DataError, match="no regular file"):
        read_trace(run.traces[0])


@pytest.mark.parametrize(
    "text", [None, b"", b"[]", b"{}\n", b"\xff" * 100, b"[" * 9999]
)
def test_nothing_that_can_be_read_is_an_error(tmp_path, text):
    if text is not None:
        tmp_path.joinpath("worker-0.jsonl").write_bytes(text)
    with pytest.raises(DataError, match="no run that can be read"):
        read_run(tmp_path)


def test_no_directory_is_an_error(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_run(tmp_path / "nowhere")
    tmp_path.joinpath("file").write_text("", "utf-8")
    with pytest.raises(DataError, match="Not a directory"):
        read_run(tmp_path / "file")


def test_where_nothing_can_be_written_is_said_before_the_training(tmp_path):
    tmp_path.joinpath("file").write_text("", "utf-8")
    with pytest.raises(ConfigurationError, match="cannot be recorded"):
        RunFile(tmp_path / "file" / "run", 0)


def test_a_full_disk_is_an_error_of_the_system():
    file = RunFile.__new__(RunFile)
    file._descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError):
        file.add(steps())
    file.close()


def test_the_parts_of_a_trace_by_replica(tmp_path):
    first, second = read_trace(write_trace(tmp_path / "step.trace.json"))
    assert (first.rank, second.rank) == (0, 1)
    milliseconds = [
        [round(1e3 * s) for s in replica.part_seconds.values()]
        for replica in (first, second)
    ]
    # computing, exchange behind computing, exchange alone, update, nothing
    assert milliseconds == [[40, 20, 20, 10, 10], [40, 0, 40, 20, 0]]
    assert (first.hidden_share, second.hidden_share) == (0.5, 0.0)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"traceEvents": {}},
        {"traceEvents": []},
        {"traceEvents": [{"ph": "X"}]},
        {"traceEvents": [{"ph": "X", "args": {"replica": "0"}, "cat": "x"}]},
        {"traceEvents": [{"ph": "X", "args": {"replica": 0}, "cat": 3}]},
        *(
            {"traceEvents": [{"ph": "X", "args": {"replica": 0}, "cat": "x", **times}]}
            for times in ({"ts": 0}, {"ts": -1, "dur": 1}, {"ts": 0, "dur": 1e400})
        ),
    ],
)
def test_other_traces_are_refused(tmp_path, content):
    path = tmp_path / "step.trace.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(DataError, match="StepTimeline"):
        read_trace(path)
