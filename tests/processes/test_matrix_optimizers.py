"""Real processes: Muon and Adafactor on several hosts reach one device's weights.

Bounds: `tests/support/matrix_training.py`. On one host: `tests/devices/`.
"""

import collections
import functools
import itertools

import keras
import numpy as np
import pytest

from tests.support import matrix_training
from tests.support.matrix_training import ACCUMULATE, CLIP, OPTIMIZERS
from tests.support.parity import largest_distance
from tests.support.slow_rows import made
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(
    not hasattr(keras.optimizers, "Muon"), reason="newer than this Keras"
)
# Hosts, replicas of each, and which of them share shards.
LAYOUTS = {"2x1": (2, 1, "all"), "2x2": (2, 2, "all"), "2x2-host": (2, 2, "host")}
IN_TEST = ("2x2", 3, "muon", "of-4", "clipped")
CELLS = made(
    pytest.param(*cell, marks=() if cell == IN_TEST else pytest.mark.slow)
    for cell in itertools.product(LAYOUTS, range(4), OPTIMIZERS, ACCUMULATE, CLIP)
    if cell[1] or LAYOUTS[cell[0]][2] == "all"
)


@pytest.fixture(autouse=True)
def _float32_again():
    yield
    matrix_training.of_float64(False)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """From a layout and a stage, the files with every worker's weights."""
    wanted = collections.defaultdict(list)
    for item in request.session.items:
        if item.function is test_equals_one_device:
            layout, stage, *cell = (item.callspec.params[name] for name in NAMES)
            wanted[layout, stage].append("/".join((*cell, "narrow")))

    @functools.cache
    def results_of(layout, stage):
        hosts, devices, group = LAYOUTS[layout]
        path = tmp_path_factory.mktemp(layout) / "run"
        arguments = path, stage, group, *wanted[layout, stage]
        variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
        module = matrix_training.__name__
        with Workers(hosts, module, *arguments, variables=variables) as workers:
            workers.succeed()
        return path

    return results_of


NAMES = ("layout", "stage", "name", "accumulate", "clip")


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize(NAMES, CELLS)
def test_equals_one_device(results, layout, stage, name, accumulate, clip):
    cell = name, accumulate, clip, "narrow"
    expected, start, bound = matrix_training.one_device(*cell)
    of_hosts = []
    for rank in range(LAYOUTS[layout][0]):
        path = matrix_training.file_of(results(layout, stage), cell, rank)
        with np.load(path) as file:
            got = [file[key] for key in file]
        assert largest_distance(got, expected) <= bound < 1e-12
        assert largest_distance(expected, start) > 1e-2
        of_hosts.append(got)
        assert largest_distance(got, of_hosts[0]) == 0.0
