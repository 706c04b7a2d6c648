"""The examples, run as a person runs them: a process of their own, an empty folder."""

import re
import time

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

pytest.importorskip("sklearn")

DIGITS = REPOSITORY / "examples" / "digits.py"


def _run_digits(folder, *arguments):
    done = run_python(DIGITS, *arguments, cwd=folder, timeout_seconds=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def _accuracy(lines):
    found = re.fullmatch(r"test accuracy: (\d\.\d{4})", lines[-1])
    assert found, lines[-1]
    return float(found[1])


def test_digits_learns_and_writes_what_it_says(tmp_path):
    lines = _run_digits(tmp_path, "--epochs", "5", "--out", "run")
    # Ten classes: 0.1 is chance. Six seeds of 5 epochs gave 0.95 to 0.97.
    assert _accuracy(lines) > 0.9
    assert any(re.fullmatch(r"[\d,]+ samples/s", line) for line in lines)
    assert "2 replicas, global batch 128, 12 steps per epoch" in lines
    (picture,) = (line for line in lines if line.startswith("learning curve: "))
    assert (tmp_path / picture.removeprefix("learning curve: ")).is_file()
    assert len(list((tmp_path / "run" / "records").glob("train-*.tfrecord"))) == 4
    assert sum("wrote" in line for line in lines) == 2


def test_digits_takes_other_settings_and_the_records_of_the_last_run(tmp_path):
    settings = ("--epochs", "1", "--batch", "96", "--replicas", "3", "--out", "run")
    first = _run_digits(tmp_path, *settings)
    second = _run_digits(tmp_path, *settings)
    assert "3 replicas, global batch 96, 15 steps per epoch" in second
    assert not any("wrote" in line for line in second)
    # The same seed, the same records, the same devices: the same model.
    assert _accuracy(second) == _accuracy(first)


@pytest.mark.slow
def test_digits_reaches_97_percent_within_a_minute(tmp_path):
    begin = time.monotonic()
    lines = _run_digits(tmp_path)
    seconds = time.monotonic() - begin
    assert _accuracy(lines) >= 0.97
    assert seconds < 60
