"""Which rows a tier runs: as many as fit, of every test function one if it is quick."""

import json
import re
import subprocess
import types
import unittest.mock

import pytest

from tests import conftest, planted_faults
from tests.all_rows import Piece, Total, all_pieces
from tests.support import affected, tiers
from tests.support.package_source import REPOSITORY
from tests.support.tiers import (
    QUICKEST_ROW_SECONDS,
    ROUNDS,
    ROWS_SECONDS,
    Draw,
    read_durations,
    rows_that_fit,
    write_durations,
)


def table(count, function="tests/a.py::test_b"):
    return [f"{function}[{number}]" for number in range(count)]


def test_what_takes_no_time_runs():
    rows = table(100)
    assert rows_that_fit(rows, {}) == set(rows)


def test_of_a_long_table_a_sample_runs():
    rows = table(100)
    chosen = rows_that_fit(rows, dict.fromkeys(rows, ROWS_SECONDS / 4))
    assert len(chosen) == 4
    # Not the first ones: neighbours in a table are alike.
    assert chosen != set(rows[:4])
    assert chosen == rows_that_fit(rows[::-1], dict.fromkeys(rows, ROWS_SECONDS / 4))


def test_where_none_fits_the_quickest_row_runs():
    rows = table(3)
    seconds = dict(
        zip(rows, (ROWS_SECONDS + 2, ROWS_SECONDS + 0.5, 100.0), strict=True)
    )
    assert rows_that_fit(rows, seconds) == {rows[1]}
    assert rows_that_fit(rows, seconds, share=0.5) == set()
    kept = table(3, "tests/test_conformance.py::test_b")
    seconds = dict(zip(kept, seconds.values(), strict=True))
    assert rows_that_fit(kept, seconds, share=0.5) == {kept[1]}


def test_what_is_long_is_left_to_the_tier_of_all():
    assert rows_that_fit(["tests/a.py::b"], {"tests/a.py::b": 9.0}) == set()
    assert QUICKEST_ROW_SECONDS < 9.0


def test_a_function_may_be_worth_more():
    rows = table(10)
    seconds = dict.fromkeys(rows, 1.0)
    assert len(rows_that_fit(rows, seconds, {rows[0]: 7.0})) == 7


def test_functions_do_not_share_their_time():
    rows = table(1) + table(1, "tests/a.py::test_c")
    assert rows_that_fit(rows, dict.fromkeys(rows, ROWS_SECONDS)) == set(rows)


def test_the_rest_is_what_the_tier_test_leaves_out():
    names = [f"tests/a.py::b[{i}]" for i in range(9)]
    rows = [types.SimpleNamespace(nodeid=n, keywords=(), path=n) for n in names]
    rows[0].keywords = ("slow",)
    for row in rows:
        row.iter_markers = lambda name: [types.SimpleNamespace(args=[100])]
    seconds = dict.fromkeys(names, 20.0)

    def wanted(tier, *args):
        options = {"--tier": tier}
        stash = {conftest.DRAW: Draw(0)}
        config = types.SimpleNamespace(getoption=options.get, args=args, stash=stash)
        with unittest.mock.patch.object(tiers, "read_durations", lambda: seconds):
            return conftest.rows_of_tier(config, rows)

    assert len(wanted("test")) == 1 + sum(Draw(0).is_due(name) for name in names[1:])
    # Also of a file that is named, of which the tier `test` runs all that is not slow.
    assert wanted("rest", "tests/a.py") == wanted("all") - wanted("test")
    assert wanted("all") == set(names)


def test_every_row_runs_within_the_commits_of_a_cycle():
    """From whatever commit on, for the rows there are; a round is not much longer."""
    seconds = read_durations()
    rows = [*seconds, *table(100, "tests/devices/test_new.py::test_new")]
    core = {row for row in rows if not tiers.is_of_tools(row)}
    fixed = rows_that_fit(core, seconds, share=tiers.FIXED_SHARE)
    drawn = [Draw(number).rows(rows, seconds) for number in range(3 * ROUNDS)]
    for first in range(2 * ROUNDS):
        assert set.union(*drawn[first : first + ROUNDS]) >= core
    assert all(chosen >= fixed for chosen in drawn)
    rotating = [
        sum(seconds.get(row, 0.0) for row in chosen & core - fixed) for chosen in drawn
    ]
    assert max(rotating) < 1.5 * sum(rotating) / len(rotating)


def test_a_commit_and_its_seed_draw_the_same(repository, monkeypatch):
    first = tiers.round_of_commit()
    repository.commit("b.py")
    assert tiers.round_of_commit() == first + 1
    monkeypatch.setenv(tiers.SEED_VARIABLE, str(first))
    assert tiers.round_of_commit() == first


def test_a_clone_without_history_draws_by_its_hash(repository, monkeypatch, tmp_path):
    repository.commit("b.py")
    clone = tmp_path / "clone"
    repository.git(
        "clone", "-q", "--depth=1", f"file://{repository.folder}", str(clone)
    )
    monkeypatch.setattr(tiers, "REPOSITORY", clone)
    assert tiers.round_of_commit() == int(tiers.git("rev-parse", "HEAD")[:8], 16)
    assert tiers.changed_files() == set()


def test_without_git_rows_are_drawn_by_the_day(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "REPOSITORY", tmp_path)
    monkeypatch.delenv(tiers.SEED_VARIABLE, raising=False)
    assert 0 <= tiers.round_of_commit() - 20_000 < 100_000
    assert tiers.changed_files() == set()


def test_changes_are_those_of_the_branch_and_those_not_committed(repository):
    repository.commit("b.py")
    assert tiers.changed_files() == {"b.py"}
    repository.git("checkout", "-q", "-b", "topic")
    assert tiers.changed_files() == {"b.py"}
    repository.commit("c.py")
    repository.commit("d.py")
    repository.folder.joinpath("a.py").write_text("a = 2")
    repository.folder.joinpath("e.py").write_text("")
    assert tiers.changed_files() == {"a.py", "c.py", "d.py", "e.py"}


def test_what_imports_a_change_runs_up_to_a_cap_and_first():
    rows = table(50, "tests/far.py::test_a") + table(9, "tests/near.py::test_b")
    seconds = dict.fromkeys(rows, 5.0)
    nearness = {"tests/near.py": 1, "tests/far.py": 2}
    plain, draw = Draw(0).rows(rows, seconds), Draw(0, nearness)
    chosen = draw.rows(rows, seconds)
    assert chosen >= set(rows[50:]) | plain
    # A module that everything imports does not make all rows of all of them run.
    assert 5.0 * len(chosen - plain) <= tiers.AFFECTED_SECONDS < 5.0 * 40
    assert draw.distance(rows[50]) < draw.distance(rows[0]) < Draw(0).distance(rows[0])


def test_tools_are_a_smoke_test_until_one_changes():
    rows = [
        f"tests/devices/test_planning.py::test_{n}[{m}]"
        for n in "abcdefgh"
        for m in (1, 2)
    ]
    seconds = {row: 4.0 - 2 * row.endswith("[2]") for row in rows}
    for number in range(20):
        chosen = Draw(number).rows(rows, seconds)
        assert sum(map(seconds.get, chosen)) == tiers.TOOLS_SECONDS
        assert all(row.endswith("[2]") for row in chosen)
    near = Draw(0, {"tests/devices/test_planning.py": 1}, tools=True)
    assert near.rows(rows, seconds) == set(rows)
    assert Draw(0, tools=True).rows(rows, seconds) < set(rows)
    assert tiers.has_changed_tools(["tfdp/errors.py", "tfdp/tools/tune/space.py"])
    assert tiers.has_changed_tools(["benchmarks/links.py"])
    assert not tiers.has_changed_tools(["tfdp/errors.py", "tests/pure/test_waits.py"])


SOURCES = {
    "tfdp/__init__.py": "from tfdp import one\nfrom tfdp.two import Two",
    "tfdp/one/__init__.py": "from tfdp.one.inner import f",
    "tfdp/one/inner.py": "import tfdp.errors",
    "tfdp/one/other.py": "",
    "tfdp/two.py": "from tfdp.one import other",
    "tfdp/errors.py": "",
    "tests/test_facade.py": "import tfdp\ntfdp.one.f()",
    "tests/test_two.py": "import tfdp\ntfdp.Two.name",
    "tests/test_all.py": "import tfdp\nprint(tfdp)",
    "tests/test_inner.py": "def f():\n  from tfdp.one import inner as i\n  i.f()",
    "tests/program.py": "import tfdp.errors as errors",
    "tests/test_program.py": "run('tests.program')",
}


@pytest.mark.parametrize(
    "changed, expected",
    [
        ("tfdp/one/inner.py", {"facade": 1, "inner": 1, "all": 3}),
        ("tfdp/errors.py", {"facade": 2, "inner": 2, "all": 4, "program": 2}),
        ("tfdp/one/other.py", {"two": 2, "all": 3}),
        ("tfdp/__init__.py", {"all": 1}),
        ("tests/program.py", {"program": 1}),
        ("tests/test_two.py", {"two": 0}),
        ("docs/gone.py", {}),
    ],
)
def test_the_distance_of_a_test_from_a_change(changed, expected):
    found = affected.Imports(SOURCES).distances([changed])
    tests = {f"tests/test_{name}.py": n for name, n in expected.items()}
    assert {p: n for p, n in found.items() if p.startswith("tests/test_")} == tests


def test_the_tests_of_the_repository_are_in_the_graph():
    here, changed = "tests/pure/test_tiers.py", "tests/support/tiers.py"
    sources = affected.sources()
    assert "tfdp/__init__.py" in sources
    graph = affected.Imports({path: sources[path] for path in (here, changed)})
    assert graph.distances([changed]) == {here: 1, changed: 0}


def test_a_failure_says_how_it_runs_again():
    report = types.SimpleNamespace(failed=True, sections=[])
    config = types.SimpleNamespace(
        getoption={"--tier": "test"}.get, stash={conftest.DRAW: Draw(41)}
    )
    item = types.SimpleNamespace(nodeid="tests/a.py::b[1]", config=config)
    hook = conftest.pytest_runtest_makereport(item, None)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)
    ((_, text),) = report.sections
    assert "'tests/a.py::b[1]'" in text
    assert f"{tiers.SEED_VARIABLE}=41 make test" in text
    assert f"{tiers.SEED_VARIABLE}=41" in conftest.pytest_report_header(config)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a commit on its main branch, in the place of this one."""
    monkeypatch.delenv(tiers.SEED_VARIABLE, raising=False)
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.setattr(tiers, "REPOSITORY", folder)

    def git(*arguments):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *name, *arguments], cwd=folder, check=True)

    def commit(path):
        folder.joinpath(path).write_text("a = 1")
        git("add", path)
        git("commit", "-q", "-m", path)

    git("init", "-q", "-b", "main")
    commit("a.py")
    return types.SimpleNamespace(folder=folder, git=git, commit=commit)


def test_durations_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "durations.json"
    write_durations({"tests/a.py::b[x::y]": 1.23, "tests/a.py::c": 0.01}, path)
    assert read_durations(path) == {"tests/a.py::b[x::y]": 1.2}


def test_the_durations_are_of_tests_that_there_are():
    files = json.loads(tiers.DURATIONS.read_text("utf-8"))
    assert set(files) <= {piece.file for piece in all_pieces()}


def test_pieces_cover_every_file_once():
    pieces = all_pieces()
    assert len(set(pieces)) == len(pieces)
    assert "tests/pure/test_tiers.py" in {piece.file for piece in pieces}
    of_four = [pieces[part::4] for part in range(4)]
    assert sorted(map(str, sum(of_four, []))) == sorted(map(str, pieces))


RESULT = """<testsuites><testsuite>
<testcase classname="tests.pure.test_a" name="test_b[1]" time="1.5"/>
<testcase classname="tests.pure.test_a" name="test_c"><failure>no</failure></testcase>
<testcase classname="tests.pure.test_a" name="test_d"><skipped>no</skipped></testcase>
</testsuite></testsuites>"""


def test_a_result_is_counted(tmp_path):
    path = Piece("tests/pure/test_a.py").result(tmp_path)
    path.write_text(RESULT)
    total = Total()
    total.add(path)
    assert (total.passed, total.skipped) == (1, 1)
    assert total.failed == ["tests/pure/test_a.py::test_c"]
    assert total.seconds == {"tests/pure/test_a.py::test_b[1]": 1.5}


def test_every_function_marked_quick_has_a_row_in_make_quick():
    """Its quickest row must fit, or the mark would select nothing."""
    seconds = read_durations()
    marked = [
        f"{path.relative_to(REPOSITORY).as_posix()}::{name}"
        for path in REPOSITORY.joinpath("tests", "devices").glob("test_*.py")
        for name in re.findall(
            r"^@pytest.mark.quick\n(?:@.*\n(?:[ )\]].*\n)*)*def (\w+)",
            path.read_text("utf-8"),
            re.M,
        )
    ]
    assert len(marked) > 6
    for function in marked:
        rows = [row for row in seconds if row.partition("[")[0] == function]
        worth = dict.fromkeys(rows, tiers.TOUR_SECONDS)
        assert rows_that_fit(rows, seconds, worth) or not rows, function


def test_the_planted_faults_fit_their_files():
    assert [fault.file for fault in planted_faults.FAULTS if not fault.fits()] == []
