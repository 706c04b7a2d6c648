"""Each known defect of the stock strategy: it fails, tfdp does not.

The stock run is part of the test. When Keras or TensorFlow mend a defect, the test says
so, and the row of docs/exactness.md can go.
"""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support import defects
from tests.support.package_source import REPOSITORY
from tests.support.slow_rows import covering
from tests.support.workers import LONGEST_SECONDS


@pytest.fixture(scope="module")
def stock_results(request):
    """What the stock strategy returned, raised, crashed or hung on, by scenario."""
    rows = [row for row in request.session.items if row.path == request.path]
    names = [row.callspec.params["name"] for row in rows]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stock_defects", *names],
        cwd=REPOSITORY,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    assert len(lines) == len(names), done.stderr[-2000:]
    return {line["name"]: line for line in lines}


def largest_difference(a, b):
    """The largest difference; infinite where only one side is a number."""
    differences = [
        np.where(np.isnan(x) == np.isnan(y), np.abs(x - y), np.inf)
        for x, y in zip(a, b, strict=True)
    ]
    return max(float(np.nanmax(d)) for d in differences)


# What others of the same number cover.
SLOW = ("D6-clipnorm", "D6-clipvalue", "D10-bool")


@pytest.mark.worth_seconds(7)
@pytest.mark.timeout(60 * len(defects.DEFECTS))
@pytest.mark.parametrize(
    "name", covering(defects.DEFECTS, defects.DEFECTS.keys() - SLOW)
)
def test_stock_fails_and_tfdp_does_not(name, stock_results):
    defect = defects.DEFECTS[name]
    expected = defects.run(name, "one")
    assert largest_difference(defects.run(name, "tfdp"), expected) <= defect.tolerance

    stock = stock_results[name]
    mended = f"{name} seems to be mended in the stock strategy: {stock}"
    if defect.stock_error is not None:
        assert "values" not in stock, mended
        if "error" in stock:  # else it hung, or took the process with it
            assert re.search(defect.stock_error, stock["error"])
    else:
        assert "values" in stock, stock
        values = [np.array(array, "float64") for array in stock["values"]]
        off = largest_difference(values, expected)
        assert off > max(10 * defect.tolerance, 1e-4), mended
