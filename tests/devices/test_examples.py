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


@pytest.mark.worth_seconds(180)
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


def _run_example(name, folder, *arguments):
    script = REPOSITORY / "examples" / name
    done = run_python(script, *arguments, cwd=folder, timeout_seconds=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.slow
def test_the_loop_learns(tmp_path):
    lines = _run_example("custom_loop.py", tmp_path, "--replicas", "3")
    assert _accuracy(lines) > 0.95
    # Float32 sums of other parts of a batch: after 96 steps a few digits may differ.
    alone = _run_example("custom_loop.py", tmp_path, "--replicas", "1")
    assert abs(_accuracy(alone) - _accuracy(lines)) < 0.02


@pytest.mark.slow
def test_the_pipeline_learns_and_each_device_stores_a_half(tmp_path):
    lines = _run_example("pipeline.py", tmp_path, "--epochs", "3")
    assert float(re.findall(r"accuracy: ([\d.]+)", "\n".join(lines))[-1]) > 0.9
    first, second = (float(line.split()[3]) for line in lines[-2:])
    assert abs(first - second) < 0.03 * first


@pytest.mark.slow
def test_the_gan_makes_digits_that_differ(tmp_path):
    lines = _run_example("gan.py", tmp_path, "--out", "run")
    assert (tmp_path / "run" / "digits.png").is_file()
    # A generator that makes one picture only has a spread of 0.
    spread = float(lines[-1].rpartition(" ")[2])
    told_apart = float(lines[-2].rpartition(" ")[2])
    assert spread > 0.5 and 0.5 < told_apart < 0.95


@pytest.mark.slow
def test_resnet_50_learns_from_jpeg_records_and_goes_on(tmp_path):
    settings = ("--epochs", "2", "--out", "run")
    first = _run_example("imagenet.py", tmp_path, *settings)
    assert sum("wrote" in line for line in first) == 2
    assert (tmp_path / "run" / "learning_curve.png").is_file()
    again = _run_example("imagenet.py", tmp_path, *settings)
    # All epochs were trained: there is nothing left to do, and the figure is the same.
    assert again[-1] == first[-1]
    assert not any("wrote" in line for line in again)


@pytest.mark.worth_seconds(20)
def test_compressed_gradients_need_no_file(tmp_path):
    settings = ("--arm", "dense", "int8", "--epochs", "2")
    rows = _run_example("compressed_gradients.py", tmp_path, *settings)
    found = {row.split()[0]: row for row in rows if row.startswith(("dense", "int8"))}
    # Ten classes: 10% is chance. Twelve steps bring both to some 67%.
    assert all(float(row.split()[1]) > 40 for row in found.values())
    # Of n = 64 x 256 + 256 x 128 + 128 x 10 numbers of 4 bytes, a replica of four sends
    # 2 (4 - 1) / 4 in a ring: 295.5 KiB.
    assert found["dense"].split()[5] == "295.5"
    assert set(found) == {"dense", "int8"}


@pytest.mark.slow
def test_a_text_classifier_learns(tmp_path):
    pytest.importorskip("keras_hub", reason="needs keras-hub")
    lines = _run_example("text_classifier.py", tmp_path, "--epochs", "3")
    found = re.fullmatch(r"test accuracy: (\d\.\d{4}) \(.*: (\d\.\d{4})\)", lines[-1])
    assert float(found[1]) > float(found[2]) + 0.1
