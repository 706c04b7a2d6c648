"""`python -m tests.versions`: what it asks for, and what it makes of the answers."""

import datetime
import re

import pytest

from tests.support import newer_keras
from tests.support.package_source import REPOSITORY
from tests.versions import (
    CONTRACT,
    EXACTNESS,
    NIGHTLY,
    ROW,
    all_versions,
    closing_line,
    constraints_for_all,
    is_green,
    versions_by_name,
)


def test_every_combination_has_a_name_of_its_own():
    names = [str(versions) for versions in all_versions()]
    assert len(set(names)) == len(names) == 16
    assert "py3.10-tf2.20-keras3.12" in names


def test_pins_of_tensorflow_and_keras_are_left_to_what_is_asked_for():
    text = "# a\nkeras==3; python_version < '4'\nnumpy==2\nprotobuf==7\n"
    assert constraints_for_all(text + "tensorflow-cpu==2\n") == "# a\nnumpy==2\n"
    pins = REPOSITORY.joinpath("constraints.txt").read_text("utf-8")
    assert "\nrich==" in constraints_for_all(pins)


@pytest.mark.parametrize(
    ("line", "green"),
    [
        ("2800 passed, 1 warning in 216.27s (0:03:36)", True),
        ("1 failed, 2799 passed, 540 warnings in 406.13s (0:06:46)", False),
        ("===== 3 passed, 1 error in 1.2s =====", False),
        ("no tests ran in 0.1s", False),
    ],
)
def test_the_closing_line_is_found_before_what_libraries_say(line, green):
    said = closing_line(f"....\n{line}\nI0000 port.cc] oneDNN is on.\n")
    assert is_green({"result": said}) is green
    if "passed" in line:
        assert said == line.strip("= ")


def test_a_row_holds_what_was_run():
    result = {"python": "3.11.7", "tensorflow": "2.21.0", "keras": "3.15.1"}
    row = ROW.format(**result, result="3 passed in 1.0s", date="2026-11-23")
    assert row == "| 3.11.7 | 2.21.0 | 3.15.1 | 3 passed in 1.0s | 2026-11-23 |"


def test_the_nightly_runs_only_when_it_is_named():
    names = [str(versions) for versions in all_versions()]
    assert [*versions_by_name()] == [*names, NIGHTLY]
    assert "keras" in versions_by_name()[NIGHTLY].requirements()
    for file in (*CONTRACT, *EXACTNESS):
        assert REPOSITORY.joinpath(file).is_file()


def test_a_job_runs_the_nightly_each_week():
    path = REPOSITORY / ".github" / "workflows" / "nightly.yml"
    job = path.read_text("utf-8")
    assert "make versions VERSIONS=nightly" in job
    assert re.search(r'cron: "\d+ \d+ \* \* \d"', job)


@pytest.mark.parametrize("change", newer_keras.CHANGES, ids=lambda change: change.test)
def test_what_a_newer_keras_changes_is_dated_and_names_a_test(change):
    datetime.date.fromisoformat(change.day)
    file, _, rest = change.test.partition("::")
    function = rest.partition("[")[0]
    assert f"def {function}(" in REPOSITORY.joinpath(file).read_text("utf-8")
    assert change.why and change.since > (3, 15)
