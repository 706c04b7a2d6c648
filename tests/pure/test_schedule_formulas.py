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
    linear_warmup,
    polynomial_decay,
    scale_learning_rate,
)


def test_interpolate_is_exact_at_both_ends():
    # start + (end - start) * 1 gives 0.30000000000000004 here.
    assert interpolate(0.1, 0.3, 0.0) == 0.1
    assert interpolate(0.1, 0.3, 1.0) == 0.3


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4), (4, 0.5), (5, 0.5), (100, 0.5)],
)
def test_linear_warmup_to_a_number(step, expected):
    rate = linear_warmup(step, 0.5, warmup_steps=4, initial=0.1)
    assert rate == pytest.approx(expected, rel=1e-15)


def test_linear_warmup_gives_after_the_absolute_step():
    def after(step):
        return 8.0 if step <= 6 else 2.0

    rates = [linear_warmup(step, after, warmup_steps=4) for step in range(9)]
    assert rates == [0.0, 2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 2.0, 2.0]


def test_linear_warmup_of_no_steps_is_after():
    assert [linear_warmup(step, lambda s: s + 1.0, 0) for step in (0, 1)] == [1.0, 2.0]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 39])
def test_polynomial_decay_equals_the_published_equation(warmup_steps, power):
    peak, end, total_steps = 31.2, 1e-4, 40
    decay_steps = total_steps - warmup_steps + 1
    for step in range(total_steps + 2):
        if step <= warmup_steps and warmup_steps:
            expected = peak * step / warmup_steps
        else:
            progress = (step - warmup_steps) / decay_steps
            expected = (peak - end) * (1 - progress) ** power + end
        rate = polynomial_decay(step, peak, total_steps, warmup_steps, end, power)
        # The equation's `1 - progress` loses up to D times the float64 epsilon.
        assert rate == pytest.approx(expected, rel=41 * 2.3e-16 * max(power, 1))


def test_polynomial_decay_is_exact_at_its_boundaries():
    def rate(step):
        return polynomial_decay(step, 31.2, 100, 25, end_learning_rate=1e-4)

    assert rate(0) == 0.0
    assert rate(25) == 31.2
    assert rate(101) == 1e-4
    assert rate(10_000) == 1e-4
    # One step before the end rate, 1/76 of the way is left.
    assert rate(100) == pytest.approx(1e-4 + (31.2 - 1e-4) / 76**2, rel=1e-12)


def test_polynomial_decay_has_no_jump():
    rates = [polynomial_decay(step, 10.0, 400, 50) for step in range(403)]
    steps = [abs(b - a) for a, b in zip(rates, rates[1:], strict=False)]
    # The steepest parts: 10/50 per step going up, 2 * 10/351 coming down.
    assert max(steps) <= 10.0 / 50 + 1e-12
    assert max(steps[50:]) <= 2 * 10.0 / 351 + 1e-12


def test_polynomial_decay_without_warmup_starts_at_the_peak():
    assert polynomial_decay(0, 0.3, 10) == 0.3


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
