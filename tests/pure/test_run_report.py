"""`tfdp report` over made-up records: who was slow, where the time went, what to do."""

import html.parser
import json
import random
import re
import sys

import pytest

from tests.support import mutations
from tests.support.made_runs import (
    BATCH,
    BETWEEN_SECONDS,
    EXCHANGE_SECONDS,
    STEP_SECONDS,
    MadeRun,
    write_trace,
)
from tests.support.pictures import SOURCE, pictures_in
from tfdp.errors import DataError
from tfdp.plan.stragglers import SlowWorker
from tfdp.tools.commands.cli import main
from tfdp.tools.runs.entries import CHECKS, Said, content_from
from tfdp.tools.runs.facts import facts_of
from tfdp.tools.runs.in_words import advice, summary
from tfdp.tools.runs.lines import content_of, line_of
from tfdp.tools.runs.page import draw_run
from tfdp.tools.runs.read import read_run

USUAL_SECONDS = STEP_SECONDS + BETWEEN_SECONDS


class Tags(html.parser.HTMLParser):
    """What a browser would make of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [
            v
            for name, v in attributes
            if name in ("src", "href") and not v.startswith(SOURCE)
        ]
        assert not any(name.startswith("on") for name, _ in attributes)

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    tags = Tags()
    tags.feed(page)
    assert not {"script", "iframe", "link", "object", "b1"} & set(tags.tags)
    for picture in pictures_in(page):
        tags.text.append(picture)
    return tags


def facts(made, folder):
    return facts_of(read_run(made.write(folder)))


def test_throughput_is_the_samples_over_the_time_without_the_first_step(tmp_path):
    found = facts(MadeRun(2), tmp_path)
    # Each of two workers has 32 rows in a step.
    assert found.samples_per_second == pytest.approx(2 * BATCH / USUAL_SECONDS)
    assert found.step_seconds == pytest.approx(USUAL_SECONDS)
    assert (found.steps, len(found.steady)) == (60, 59)


def test_the_parts_of_the_time_are_the_whole_of_it(tmp_path):
    found = facts(MadeRun(2, slow={1: 0.02}), tmp_path)
    seconds = found.run.sessions[0].first.last_seconds
    for parts in found.part_seconds.values():
        assert sum(parts.values()) == pytest.approx(seconds)
    fast, slow = found.part_seconds[0], found.part_seconds[1]
    assert fast["waiting for workers"] == pytest.approx(59 * 0.02)
    assert slow["waiting for workers"] == 0
    assert fast["exchanging"] == pytest.approx(59 * EXCHANGE_SECONDS)
    assert slow["computing"] - fast["computing"] == pytest.approx(59 * 0.02)
    assert fast["first step"] == slow["first step"] == 3.0


@pytest.mark.parametrize(
    "slow_in, cause",
    [
        ("computing", "computing"),
        ("input", "waiting for input"),
        ("between", "between steps"),
    ],
)
@pytest.mark.parametrize("workers, slow", [(2, 1), (2, 0), (5, 3)])
def test_the_slow_worker_is_named_with_its_cause(
    tmp_path, workers, slow, slow_in, cause
):
    made = MadeRun(workers, slow={slow: 0.02}, slow_in=slow_in, every=3)
    (straggler,) = facts(made, tmp_path).stragglers.found
    assert (straggler.worker, straggler.cause) == (slow, cause)
    # 20 of the steps 3, 6 ... 60, of the 59 that are looked at.
    assert straggler.share == pytest.approx(20 / 59)
    assert straggler.lost_seconds == pytest.approx(20 * 0.02)
    total = 59 * USUAL_SECONDS + 20 * 0.02
    assert straggler.lost_share == pytest.approx(20 * 0.02 / total)


def test_two_slow_workers_are_told_apart(tmp_path):
    found = facts(MadeRun(3, slow={0: 0.01, 2: 0.03}), tmp_path).stragglers
    assert [straggler.worker for straggler in found.found] == [2]
    assert list(found.waited_seconds) == [0, 1, 2]
    assert found.waited_seconds[0] == pytest.approx(59 * 0.02)
    assert found.waited_seconds[1] == pytest.approx(59 * 0.03)
    assert found.waited_seconds[2] == 0


def test_workers_that_are_alike_are_not_accused(tmp_path):
    found = facts(MadeRun(4, slow={2: 0.001}), tmp_path)
    assert found.stragglers.found == []
    assert "no worker held up the others" in summary(found)


@pytest.mark.parametrize(
    "made, why",
    [
        (MadeRun(1), "one worker"),
        (MadeRun(2, present=(1,)), "one worker alone is here"),
        (MadeRun(2, knows_exchange=False), "over sockets and MPI only"),
    ],
)
def test_what_cannot_be_known_is_said(tmp_path, made, why):
    found = facts(made, tmp_path)
    assert found.stragglers.found == () and why in found.stragglers.unknown
    assert why in summary(found)
    assert why in draw_run(found, "x").replace("&quot;", '"')


@pytest.mark.parametrize(
    "made, words",
    [
        (MadeRun(2, slow={1: 0.02}), "Look at worker 1, for which the others wait"),
        (MadeRun(slow={0: 0.02}, slow_in="input"), "Make the input faster"),
        (MadeRun(slow={0: 0.02}, slow_in="between"), "Do less between steps"),
        (MadeRun(), "Nothing stands out"),
        (MadeRun(steps=1, epochs=1), "No step was made after the first one"),
    ],
)
def test_the_advice_is_about_what_costs_most(tmp_path, made, words):
    assert advice(facts(made, tmp_path)).startswith(words)


def test_short_steps_are_advised_to_start_together(tmp_path):
    short = {"slow": {0: -0.038}}
    advised = advice(facts(MadeRun(**short), tmp_path / "one"))
    assert "a step takes 3 ms, a good part of it to be started" in advised
    advised = advice(facts(MadeRun(**short, executed=32), tmp_path / "32"))
    assert "started" not in advised


def test_what_the_callback_named_while_training_is_shown(tmp_path):
    MadeRun(2).write(tmp_path)
    said = SlowWorker(18, 1, "link", 0.04, 0.4, 2.0, 1.5)
    with tmp_path.joinpath("worker-0.jsonl").open("ab") as file:
        for text in (HOSTILE, str(said)):
            file.write(line_of(content_from(Said("one", said.step, text))))
    found = facts_of(read_run(tmp_path))
    assert found.notes == []
    last = "step 18: worker 1 is slow, mostly on its network link: it needs 2.0 times"
    assert last in " ".join(summary(found).split())
    text = " ".join(parsed(draw_run(found, "A run")).text)
    assert "While it trained:" in text and text.count("worker 1 is slow, mostly") == 2
    assert "<script>" in text  # as words: `parsed` found no such tag


def test_an_epoch_may_have_any_number_of_steps():
    for name in ("steps", "steps_per_epoch"):
        assert CHECKS[name](2_000_000_000) == 2_000_000_000
    with pytest.raises(ValueError, match="no whole number from 1 to"):
        CHECKS["workers"](2_000_000_000)


def test_a_run_that_becomes_slower_is_told(tmp_path):
    made = MadeRun(steps=200, epochs=1)
    entries = list(made.entries(0))
    with tmp_path.joinpath("worker-0.jsonl").open("wb") as file:
        for entry in entries:
            content = content_from(entry)
            if content["kind"] == "steps" and content["step"] > 150:
                for name in ("seconds", "step_seconds"):
                    content[name] *= 2
            file.write(line_of(content))
    assert "made 50% fewer steps per second" in advice(facts_of(read_run(tmp_path)))


def interrupted(folder):
    """Killed after 50 of 60 steps, and gone on with the third epoch: 10 again."""
    MadeRun(2, killed_at=50).write(folder)
    later = MadeRun(2, 20, 1, session="two", began_seconds=1_790_000_060.0)
    later.first_epoch = 2
    return later.write(folder)


def test_a_restart_is_seen_with_what_it_cost(tmp_path):
    found = facts_of(read_run(interrupted(tmp_path)))
    first, second = found.starts
    assert not first.has_ended and second.has_ended
    assert (first.first_step, second.first_step) == (0, 40)
    assert (first.steps, first.lost_steps, second.lost_steps) == (50, 10, None)
    assert second.from_seconds == 60.0
    assert found.steps == 70
    text = summary(found)
    assert "started again once" in text and "made 10 steps again" in text
    assert "started again" in draw_run(found, "x")


def test_a_clock_that_went_back_does_not_overlap_starts(tmp_path):
    MadeRun().write(tmp_path)
    MadeRun(session="two", began_seconds=1_790_000_001.0).write(tmp_path)
    first, second = facts_of(read_run(tmp_path)).starts
    assert second.from_seconds == first.to_seconds


def test_two_trainings_in_one_directory_are_told_of(tmp_path):
    MadeRun().write(tmp_path)
    MadeRun(session="two", began_seconds=1_790_000_001.0).write(tmp_path)
    [note] = facts_of(read_run(tmp_path)).notes
    assert re.search(r"began in this directory \d+ s before another one ended", note)
    assert not facts_of(read_run(interrupted(tmp_path / "again"))).notes


def test_trainings_of_two_models_are_told_of(tmp_path):
    for session, began, weights in (("one", 0, "1,200"), ("two", 9e3, "1,251")):
        model = f"net: {weights} weights, 12 of them trained"
        began += 1_790_000_000.0
        MadeRun(session=session, began_seconds=began, model=model).write(tmp_path)
    [note] = facts_of(read_run(tmp_path)).notes
    assert "models of 1,200 weights and 1,251 weights" in note


def test_the_page_shows_it_all(tmp_path):
    interrupted(tmp_path)
    write_trace(tmp_path / "step.trace.json")
    found = facts_of(read_run(tmp_path))
    page = draw_run(found, "A run")
    tags = parsed(page)
    text = " ".join(tags.text)
    for words in (
        *("A run", "Next:", "samples per second", "ms per step", "Stragglers"),
        *("worker 0", "worker 1", "replica 1", "50% of exchanges hidden"),
        *("memory of the process in GB", "MB per step between hosts", "val_loss"),
        *("loss (of the epoch so far)", "Settings", "Versions", "host-1", "made up"),
        *("no end was written", "steps made again", "2026-"),
    ):
        assert words in text or words in page, words
    assert tags.addresses == ["./step.trace.json"]
    assert "http" not in page


HOSTILE = '<script>alert(1)</script><b1 onclick="x">&"\'\x1b[31m'


def test_nothing_of_a_file_becomes_html(tmp_path):
    made = MadeRun(2, present=(0,))
    with tmp_path.joinpath("worker-0.jsonl").open("wb") as file:
        for entry in made.entries(0):
            content = content_from(entry)
            if content["kind"] == "start":
                content |= {
                    "host": HOSTILE,
                    "hosts": [HOSTILE] * 2,
                    "settings": {HOSTILE: HOSTILE, "model": HOSTILE},
                    "versions": {HOSTILE: HOSTILE},
                    "machine": {"processor": HOSTILE, "usable_cores": HOSTILE},
                }
            if content["kind"] == "epoch":
                content["logs"] = {HOSTILE: 0.5, f"val_{HOSTILE}": 1.0}
            file.write(line_of(content))
    name = "<b1>.trace.json"
    write_trace(tmp_path / name)
    found = facts_of(read_run(tmp_path))
    page = draw_run(found, "<b1>")
    tags = parsed(page)
    assert "\x1b" not in page
    assert tags.addresses == ["./%3Cb1%3E.trace.json"]
    assert "\x1b" not in summary(found)


def test_values_without_end_are_drawn(tmp_path):
    with tmp_path.joinpath("worker-0.jsonl").open("wb") as file:
        for entry in MadeRun().entries(0):
            content = content_from(entry)
            if content["kind"] == "epoch":
                content["logs"] = {
                    "a": 1e308,
                    "b": float("nan"),
                    "c": 5e-324,
                    "d": -0.0,
                }
                content["logs"]["e"] = -1e308 if content["epoch"] else 1e308
            if content["kind"] == "steps":
                content["loss"] = [float("inf"), 1e308, -1e308][content["step"] % 3]
            file.write(line_of(content))
    parsed(draw_run(facts_of(read_run(tmp_path)), "x"))


def test_the_command_writes_the_page_and_the_figures(tmp_path, capsys):
    run = tmp_path / "my run"
    MadeRun(2, slow={1: 0.02}).write(run)
    figures = tmp_path / "figures.json"
    assert main(["report", str(run), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "net on 2 workers (2 replicas): 60 steps in" in out
    assert "worker 1: the last one in 100% of the steps" in out
    assert str(run / "report.html") in out
    parsed((run / "report.html").read_text("utf-8"))
    content = json.loads(figures.read_text("utf-8"), parse_constant=pytest.fail)
    assert content["my run"]["stragglers"]["found"][0]["worker"] == 1
    assert content["my run"]["samples_per_second"] > 0
    # A second time: its own page is no part of the run.
    assert main(["report", str(run)]) == 0


def test_the_page_finds_traces_from_where_it_lies(tmp_path):
    MadeRun().write(tmp_path / "run")
    write_trace(tmp_path / "run" / "step.trace.json")
    (tmp_path / "pages").mkdir()
    page = tmp_path / "pages" / "x.html"
    assert main(["report", str(tmp_path / "run"), "--page", str(page)]) == 0
    assert parsed(page.read_text("utf-8")).addresses == ["../run/step.trace.json"]


def test_a_name_moves_nothing_on_the_terminal(tmp_path, capsys):
    runs = [tmp_path / f"{name}\x1b[2J\x07" for name in "ab"]
    for run in runs:
        MadeRun(2).write(run)
    assert main(["report", *map(str, runs)]) == 0
    assert main(["report", str(runs[0])]) == 0
    out = capsys.readouterr().out
    assert "a [2J" in out
    assert "\x1b" not in out and "\x07" not in out


def test_two_runs_stand_side_by_side(tmp_path, capsys):
    fast, slow = tmp_path / "<b1>fast", tmp_path / "slow"
    MadeRun(2).write(fast)
    MadeRun(2, slow={0: USUAL_SECONDS}).write(slow)
    assert main(["report", str(fast), str(slow)]) == 0
    out = capsys.readouterr().out
    assert "0.50x" in out and "1.00x" in out
    text = " ".join(parsed((fast / "report.html").read_text("utf-8")).text)
    assert "<b1>fast vs slow" in text and "ms per step" in text


def test_without_matplotlib_there_are_the_text_and_the_figures(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    MadeRun(2).write(tmp_path / "run")
    figures = tmp_path / "figures.json"
    assert main(["report", str(tmp_path / "run"), "--json", str(figures)]) == 1
    printed = capsys.readouterr()
    assert "net on 2 workers" in printed.out and figures.exists()
    assert "pip install 'tfdp[plots]'" in printed.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "No such file"),
        (["run", "--page", "nowhere/x.html"], "there is no such folder"),
        (["run", "--json", "nowhere/x.json"], "there is no such folder"),
        (["run", "run"], "given twice"),
        (["run", "./run/"], "given twice"),
        (["run", "link"], "given twice"),
        (["run", "--json", "run/worker-0.jsonl"], "own record"),
        (["run", "--page", "link/worker-1.jsonl"], "own record"),
        (["run", "--json", "run/a.trace.json"], "own record"),
        (["run", "--page", "run"], "that is a folder"),
        (["run", "--json", "run"], "that is a folder"),
        (["run", "--json", "n" * 300], "cannot be written"),
        (["run", "--json", "link/report.html"], "the page is written to the same file"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    MadeRun().write(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    assert main(["report", *arguments]) == 1
    assert words in capsys.readouterr().err


def damaged_lines(source, content):
    """A line's JSON is edited, and its checksum fits: a stranger's work."""
    lines = content.splitlines(keepends=True)
    place = source.randrange(len(lines))
    edited = mutations.edit_json(source, json.dumps(content_of(lines[place])).encode())
    try:
        lines[place] = line_of(json.loads(edited))
    except (ValueError, RecursionError, TypeError):
        lines[place] = edited + b"\n"
    return b"".join(lines)


@pytest.mark.parametrize("seed", range(300))
def test_damaged_files_make_a_page_or_an_error(pristine, tmp_path, seed):
    source = random.Random(seed)
    for path in pristine.iterdir():
        content = path.read_bytes()
        if source.random() < 0.6:
            kinds = [*mutations.BYTES, damaged_lines, damaged_lines, damaged_lines]
            if path.suffix == ".json":
                kinds = [*mutations.BYTES, mutations.edit_json, mutations.edit_json]
            for _ in range(source.choice([1, 1, 3])):
                try:
                    content = source.choice(kinds)(source, content) or b"\n"
                except ValueError:  # it is no JSON any more
                    content = mutations.flip_bit(source, content)
        tmp_path.joinpath(path.name).write_bytes(content)
    try:
        found = facts_of(read_run(tmp_path))
    except DataError:
        return
    summary(found).encode()
    json.dumps(found.to_json(), allow_nan=False)
    # A page takes seconds.
    if seed < 20:
        parsed(draw_run(found, "damaged"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    MadeRun(2, steps=12, killed_at=9).write(folder)
    MadeRun(2, 12, session="two", began_seconds=1_790_000_060.0).write(folder)
    write_trace(folder / "step.trace.json")
    return folder
