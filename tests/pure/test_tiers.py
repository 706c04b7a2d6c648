"""Which rows a tier runs: as many as fit, of every test function one if it is quick."""

import json
import re
import types
import unittest.mock

from tests import conftest
from tests.all_rows import Piece, Total, all_pieces
from tests.support import tiers
from tests.support.package_source import REPOSITORY
from tests.support.tiers import (
    QUICKEST_ROW_SECONDS,
    ROWS_SECONDS,
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
    seconds = dict(zip(rows, (ROWS_SECONDS + 2, ROWS_SECONDS + 1, 100.0), strict=True))
    assert rows_that_fit(rows, seconds) == {rows[1]}


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
        row.iter_markers = lambda name: [types.SimpleNamespace(args=[60])]
    seconds = dict.fromkeys(names, 20.0)

    def wanted(tier, *args):
        options = {"--tier": tier}
        config = types.SimpleNamespace(getoption=options.get, args=args)
        with unittest.mock.patch.object(tiers, "read_durations", lambda: seconds):
            return conftest.rows_of_tier(config, rows)

    assert len(wanted("test")) == 3
    # Also of a file that is named, of which the tier `test` runs all that is not slow.
    assert wanted("rest", "tests/a.py") == wanted("all") - wanted("test")
    assert wanted("all") == set(names)


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
