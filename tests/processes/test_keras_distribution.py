"""Scripts of `keras.distribution` that tfdp obeys, in processes of their own."""

import importlib.util
import json

import numpy as np
import pytest

from tests.support.fresh_python import run_program, run_python
from tests.support.package_source import REPOSITORY

SUPPORT = REPOSITORY / "tests" / "support"
SCRIPT = SUPPORT / "keras_distribution_script.py"
LAUNCH = ("-m", "tfdp", "launch", "--keras-distribution")
# 20 steps of float32 sums over at most 16 rows, losses near 2: two orders of one sum
# differ by some 2^-24 of it a step, 20 * 2^-24 * 2 = 2.4e-6. A sum that is left out
# moves the losses by more than 1e-2.
MOST_APART = 1e-5
# Tests hide JAX from Keras in programs that do not import it themselves.
WITH_JAX = """
import runpy, sys
import jax
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses_of(path, *words, kind, more=(), **options):
    done = run_python(*words, SCRIPT, path, kind, *more, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    return losses_of(tmp_path_factory.mktemp("one") / "one.json", kind="nothing")


def check_same(found, expected):
    assert len(found["losses"]) == 20
    for what in ("losses", "evaluated", "predicted"):
        np.testing.assert_allclose(found[what], expected[what], atol=MOST_APART)


@pytest.mark.worth_seconds(40)
@pytest.mark.parametrize(
    "kind,workers,devices", [("model", 1, 4), ("data", 1, 4), ("data", 2, 2)]
)
def test_a_script_as_it_is_has_the_losses_of_one_device(
    kind, workers, devices, on_one_device, tmp_path
):
    places = ("--workers", workers, "--devices-per-worker", devices)
    # What the script's author had set for Keras does not count.
    options = {"kind": kind, "environment": {"KERAS_BACKEND": "jax"}}
    found = losses_of(tmp_path / "found.json", *LAUNCH, *places, **options)
    assert found["devices"] == [f"cpu:{i}" for i in range(4)]
    check_same(found, on_one_device)


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("more", [(), ("words",)], ids=["dense", "words"])
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
def test_the_losses_are_those_of_keras_on_jax(more, tmp_path):
    """Also those of words that repeat: Adam squares the sum of their rows."""
    devices = "--xla_force_host_platform_device_count=4"
    environment = {"KERAS_BACKEND": "jax", "XLA_FLAGS": devices}
    given = {"kind": "model", "more": more}
    on_jax = losses_of(
        tmp_path / "jax.json", "-c", WITH_JAX, environment=environment, **given
    )
    assert len(on_jax["devices"]) == 4
    launch = (*LAUNCH, "--devices-per-worker", 4)
    check_same(losses_of(tmp_path / "found.json", *launch, **given), on_jax)


@pytest.mark.worth_seconds(20)
def test_what_else_a_program_does(tmp_path):
    done = run_python(SUPPORT / "keras_distribution_calls.py", tmp_path / "m.keras")
    assert done.stdout.endswith("all done\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "before",
    [
        "tfdp.DataParallelStrategy().scope().__enter__()",
        "keras.distribution.set_distribution(keras.distribution.DataParallel())",
    ],
)
@pytest.mark.worth_seconds(10)
def test_it_comes_first(before):
    lines = f"import keras, tfdp\nscope = {before}\ntfdp.obey_keras_distribution()"
    done = run_program(lines)
    assert "ScopeError" in done.stderr and "first line" in done.stderr
    assert done.returncode == 1


def test_another_backend_is_refused():
    program = "import tfdp\ntfdp.obey_keras_distribution()"
    done = run_program(program, environment={"KERAS_BACKEND": "jax"})
    assert "ConfigurationError: KERAS_BACKEND=jax" in done.stderr
    assert done.returncode == 1


def test_an_import_changes_nothing_of_keras():
    program = (
        "import keras, tfdp\n"
        "tfdp.DataParallelStrategy()\n"
        "function = keras.distribution.set_distribution\n"
        "assert not hasattr(function, 'replaced_by_tfdp')"
    )
    done = run_program(program)
    assert done.returncode == 0, done.stderr
