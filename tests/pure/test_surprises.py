"""docs/surprises.md names tests and scripts that exist, and enough of them."""

import re

from tests.support.package_source import REPOSITORY

PAGE = REPOSITORY / "docs" / "surprises.md"
FINDINGS = REPOSITORY / "findings"
TEST = re.compile(r"`(tests/\S+?\.py)`")
FINDING = re.compile(r"`findings/(\S+?\.sh)`")
COLUMNS = 4


def rows():
    """The cells of each row, without heads and rules."""
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text("utf-8"), re.M)
    cells = [line.split(" | ") for line in lines]
    return [row for row in cells if row[0] not in ("library", "---")]


def test_every_row_is_whole():
    assert len(rows()) >= 30
    assert [row for row in rows() if len(row) != COLUMNS or not all(row)] == []


def test_the_tests_are_there():
    guarded = [TEST.findall(row[-1]) for row in rows()]
    assert sum(map(bool, guarded)) >= 12
    named = {name for names in guarded for name in names}
    assert [name for name in sorted(named) if not (REPOSITORY / name).is_file()] == []


def test_the_scripts_are_there_and_all_are_told_of():
    told = FINDING.findall(PAGE.read_text("utf-8"))
    assert sorted(told) == sorted(path.name for path in FINDINGS.glob("*.sh"))
