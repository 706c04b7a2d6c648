"""Programs that are one device's give no warning; others give one, with the fix."""

import functools
import re
import warnings

import numpy as np
import pytest

from tests.support import (  # noqa: F401  (each adds its programs)
    lint_counts,
    lint_gradients,
    lint_layers,
    lint_loops,
    lint_models,
    lint_steps,
)
from tests.support.lint_programs import BOUND, PROGRAMS, strategy_of


def differences(found, expected, relative=False):
    """The largest difference of two lists of arrays; at most 1 of numbers above 1."""
    pairs = [
        (np.asarray(a, "float64"), np.asarray(b, "float64"))
        for a, b in zip(found, expected, strict=True)
    ]
    assert all(np.all(np.isfinite(b)) for _, b in pairs)
    return max(
        (
            float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b) * relative)))
            for a, b in pairs
        ),
        default=0.0,
    )


def watched(run, strategy):
    """What it returns, and the texts of tfdp's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(strategy)
    return result, [
        f"{w.category.__name__}: {w.message}"
        for w in caught
        if w.category.__module__.partition(".")[0] == "tfdp"
    ]


@functools.cache
def one_device(name):
    """A program and its fixed twin are the same program on one device."""
    return watched(PROGRAMS[name].run, None)[0]


ROWS = [(name, count) for name, row in PROGRAMS.items() for count in row.replicas]


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("name,replicas", ROWS, ids=[f"{n}-{c}" for n, c in ROWS])
def test_a_program_is_one_devices_or_a_warning_names_the_fix(name, replicas):
    program = PROGRAMS[name]
    broken = name.removesuffix(", fixed")
    weights, reports = one_device(broken if broken in PROGRAMS else name)
    found, told = watched(program.run, strategy_of(replicas))
    off = differences(found[0], weights)
    off_reports = differences(found[1], reports, relative=True)
    if program.kind == "warn":
        # Else the program does not show what the warning is about.
        assert off > 10 * BOUND or off_reports > 10 * program.report_bound
        assert told
    if program.kind in ("warn", "told") and told:
        (text,) = told
        assert re.match("Local(Mean|State)Warning", text)
        assert re.search(program.fix, text), text
        return
    assert told == []
    if program.kind != "silent":
        assert off <= BOUND
        assert off_reports <= program.report_bound
