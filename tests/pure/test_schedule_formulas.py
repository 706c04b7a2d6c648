"""The formulas of the schedules, on plain numbers."""

import math
import subprocess
import sys

import pytest

from tests.support.workers import LONGEST_SECONDS
from tfdp.errors import ConfigurationError
from tfdp.plan.schedule_formulas import (
    check_rate,
    check_steps,
    interpolate,
    scale_learning_rate,
)


def test_interpolate_is_exact_at_both_ends():
    # start + (end - start) * 1 gives 0.30000000000000004 here.
    assert interpolate(0.1, 0.3, 0.0) == 0.1
    assert interpolate(0.1, 0.3, 1.0) == 0.3


@pytest.mark.parametrize(
    ("rule", "expected"), [("linear", 3.2), ("sqrt", 0.1 * math.sqrt(32))]
)
def test_scale_learning_rate(rule, expected):
    assert scale_learning_rate(0.1, 256, 8192, rule) == pytest.approx(expected)


def test_scale_learning_rate_gives_the_bert_table():
    # Y. You et al. 2020: 5e-3 at 32K by the square root rule, 5 / (2^3 * 1e3) at 512.
    rate = scale_learning_rate(5e-3, 32_768, 512, rule="sqrt")
    assert rate == pytest.approx(5 / (2**3 * 1e3))


@pytest.mark.parametrize(
    "arguments",
    [
        (-0.1, 256, 512),
        (float("nan"), 256, 512),
        (float("inf"), 256, 512),
        ("0.1", 256, 512),
        (True, 256, 512),
        (0.1, 0, 512),
        (0.1, 256, 0),
        (0.1, 256.0, 512),
        (0.1, 256, True),
        (0.1, 256, 512, "square"),
        (0.1, 256, 512, None),
    ],
)
def test_scale_learning_rate_refuses_nonsense(arguments):
    with pytest.raises(ConfigurationError, match="Received"):
        scale_learning_rate(*arguments)


def test_checks_return_plain_python_numbers():
    numpy = pytest.importorskip("numpy")
    assert type(check_rate("rate", numpy.float32(0.5))) is float
    assert type(check_rate("rate", 2)) is float
    assert type(check_steps("steps", numpy.int64(3))) is int


def test_the_module_does_not_load_tensorflow():
    code = (
        "import sys, tfdp.plan.schedule_formulas;"
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONGEST_SECONDS)
