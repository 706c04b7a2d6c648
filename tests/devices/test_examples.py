"""The examples, run as a person runs them: a process of their own, an empty folder."""

import re
import resource

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

pytest.importorskip("sklearn")

DIGITS = REPOSITORY / "examples" / "digits.py"


def _run_digits(folder, *arguments):
    done = run_python(DIGITS, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def _accuracy(lines):
    found = re.fullmatch(r"test accuracy: (\d\.\d{4})", lines[-1])
    assert found, lines[-1]
    return float(found[1])


@pytest.mark.worth_seconds(300)
def test_digits_learns_says_what_it_does_and_repeats_itself(tmp_path):
    settings = ("--epochs", "4", "--batch", "96", "--replicas", "3", "--out", "run")
    first = _run_digits(tmp_path, *settings)
    assert "3 replicas, global batch 96, 15 steps per epoch" in first
    assert sum("wrote" in line for line in first) == 2
    assert any(re.fullmatch(r"[\d,]+ samples/s", line) for line in first)
    (picture,) = (line for line in first if line.startswith("learning curve: "))
    assert (tmp_path / picture.removeprefix("learning curve: ")).is_file()
    # Ten classes: 0.1 is chance.
    assert _accuracy(first) > 0.5

    second = _run_digits(tmp_path, *settings)
    assert not any("wrote" in line for line in second)
    # The same seed, the same records, the same devices: the same model.
    assert _accuracy(second) == _accuracy(first)


@pytest.mark.slow
def test_digits_reaches_97_percent_within_a_minute(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = _run_digits(tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert _accuracy(lines) >= 0.97
    # The clock on the wall also counts what other programs do; this does not.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
