"""Large-batch training on MNIST: what LARS with warm-up buys, beside its rivals."""

import re
from pathlib import Path

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

MNIST = REPOSITORY / "examples" / "mnist.py"
# A folder of the repository that git ignores, the place where Keras keeps what
# `keras.datasets.mnist.load_data()` fetched, or a data folder beside the repository.
PLACES = (
    REPOSITORY / "data" / "mnist.npz",
    Path.home() / ".keras" / "datasets" / "mnist.npz",
    *REPOSITORY.parent.glob("*/data/mnist.npz"),
)
ROW = re.compile(r"^(\w+) +(\d+) +[\d.e+-]+ +([\d.]+)% ", re.M)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lars_keeps_the_accuracy_of_the_small_batch(tmp_path):
    data = next(filter(Path.is_file, PLACES), None)
    if data is None:
        pytest.skip(f"no mnist.npz in {', '.join(str(p.parent) for p in PLACES)}")
    settings = ("--data", data, "--arm", "all", "--out", "run")
    done = run_python(MNIST, *settings, cwd=tmp_path, timeout_seconds=1100)
    assert done.returncode == 0, done.stderr
    percent = {name: float(median) for name, _, median in ROW.findall(done.stdout)}
    print(percent)
    assert sorted(percent) == ["lars", "nesterov", "sgd", "sgd128"]
    # One seed moves the accuracy of lars and sgd128 by less than 0.3 points.
    assert percent["lars"] >= percent["sgd"] + 3.0
    assert percent["lars"] >= percent["sgd128"] - 1.5
    for name in percent:
        assert (tmp_path / "run" / f"learning_curve_{name}.png").is_file()
