"""Real processes: several hosts train as one device does."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.support import host_training
from tests.support.parity import make_strategy
from tests.support.workers import LONGEST_SECONDS, Workers

SEVERAL = {
    "2x2": (2, 2, "none"),
    "3x1": (3, 1, "none"),
    "2x2-optimizer": (2, 2, "optimizer"),
    "2x1-gradients": (2, 1, "gradients"),
    "3x1-parameters": (3, 1, "parameters"),
    "2x2-parameters": (2, 2, "parameters"),
    "2x2-parameters-host": (2, 2, "parameters/host"),
    "2x2-parameters-host-offload": (2, 2, "parameters/host/auto/optimizer"),
    "2x1-optimizer-host-offload": (2, 1, "optimizer/host/tensorflow/optimizer"),
    "2x2-optimizer-host": (2, 2, "optimizer/host"),
    "2x2-tensorflow": (2, 2, "none/all/tensorflow"),
    "2x2-tensorflow-host": (2, 2, "gradients/host/tensorflow"),
    "2x2-balanced": (2, 2, "none/all/auto/none/speed"),
    "3x1-balanced": (3, 1, "none/all/auto/none/speed"),
}
# With one device per host TensorFlow hands out plain tensors in the place of
# per-replica values; these scenarios use all that differs by that.
WITH_ONE_DEVICE = ("sgd", "masked-embedding", "loss-scaling", "jit", "custom-loop") + (
    "built-while-traced",
    "gathered-rows",
    "optimizer-in-a-dictionary",
    "words",
)
WITH_SHARDS = ("accumulation", "clipping", "distributed-optimizer", "ema") + (
    "lamb",
    "loss-scaling",
    "recurrent",
    "synchronized",
    "words",
)
WITH_OWNERS = ("muon", "muon-everything", "adafactor")
NAMES = {
    "2x2": tuple(host_training.SCENARIOS),
    "3x1": WITH_ONE_DEVICE,
    "2x2-optimizer": ("accumulation", "lamb", *WITH_OWNERS),
    "2x1-gradients": WITH_OWNERS,
    "3x1-parameters": (*WITH_SHARDS, *WITH_OWNERS),
    "2x2-parameters": WITH_OWNERS,
    "2x2-parameters-host": ("clipped-accumulation", "lamb", "muon-everything"),
    "2x2-parameters-host-offload": ("clipping", "distributed-optimizer", "ema", "lamb")
    + ("muon",),
    "2x1-optimizer-host-offload": ("accumulation", "lamb"),
    # Each host has all shards, which count once.
    "2x2-optimizer-host": ("clipping", "clipped-accumulation"),
    "2x2-tensorflow": ("accumulation", "custom-loop", "loss-scaling")
    + ("masked-embedding", "parts", "steps-per-execution", "words"),
    "2x2-tensorflow-host": ("accumulation", "clipped-accumulation", "lamb", "muon"),
    "2x2-balanced": ("accumulation", "custom-loop", "gathered-rows")
    + ("loss-scaling", "masked-embedding", "recurrent", "sgd", "steps-per-execution")
    + ("synchronized", "words"),
    "3x1-balanced": ("custom-loop", "distributed-optimizer", "sgd"),
}
# The rows of the tier `test`: each layout is a group of processes, and takes as long as
# what it is asked to train.
IN_TEST = {
    "2x2": ("accumulation", "custom-loop", "gathered-rows", "loss-scaling")
    + ("masked-embedding", "parts", "sgd", "words"),
    "3x1": ("words",),
    "3x1-parameters": ("accumulation", "lamb", "words", "muon-everything"),
    "2x2-parameters-host": ("clipped-accumulation",),
    "2x2-tensorflow": ("accumulation", "parts"),
    "2x2-balanced": ("accumulation", "custom-loop", "masked-embedding", "sgd")
    + ("steps-per-execution", "words"),
}
ROWS = [
    pytest.param(
        layout,
        name,
        id=f"{layout}-{name}",
        marks=() if name in IN_TEST.get(layout, ()) else pytest.mark.slow,
    )
    for layout, names in NAMES.items()
    for name in names
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """From a layout, the files with every worker's numbers, of the rows that run."""
    wanted = collections.defaultdict(list)
    for item in request.session.items:
        if item.function is test_equals_one_device:
            wanted[item.callspec.params["layout"]].append(item.callspec.params["name"])

    @functools.cache
    def results_of(layout):
        hosts, devices, shard = SEVERAL[layout]
        path = tmp_path_factory.mktemp(layout) / "run"
        variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
        with Workers(
            hosts,
            "tests.support.host_training",
            path,
            shard,
            *wanted[layout],
            variables=variables,
        ) as workers:
            workers.succeed()
        return path

    return results_of


@functools.cache
def on_one_device(name):
    # A micro-batch weighs by its samples under a strategy only: nobody else knows them.
    counts_samples = name == "distributed-optimizer"
    one = make_strategy(1) if counts_samples else tf.distribute.get_strategy()
    return host_training.run(name, one)


@pytest.mark.worth_seconds(300)
@pytest.mark.parametrize("layout, name", ROWS)
def test_equals_one_device(results, layout, name):
    expected = on_one_device(name)
    hosts, _, _ = SEVERAL[layout]
    first = None
    for rank in range(hosts):
        with np.load(f"{results(layout)}.{name}.{rank}.npz") as file:
            got = dict(file)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            # Six updates of at most 0.05 with gradients below 10 (rows to 9, weights
            # to 1), each two sums of about 60 terms apart: 6 * 0.05 * 10 * 2 * 60 u
            # = 2e-5. A part of the batch that is missing moves a weight by 1e-2.
            # float16 activations round at 5e-4, alike on both sides; a sum in another
            # order may differ by that share of an update.
            bound = 2e-3 if name == "loss-scaling" else 2e-5
            np.testing.assert_allclose(got[key], value, rtol=0, atol=bound, err_msg=key)
        weights = [got[key] for key in got if key.startswith("weight")]
        first = weights if rank == 0 else first
        for mine, theirs in zip(weights, first, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_collectives_have_to_come_before_tensorflow():
    with Workers(2, "tests.support.late_collectives") as workers:
        for process in workers.processes:
            output = process.communicate(timeout=LONGEST_SECONDS)[0]
            assert "make the strategy before anything else uses TensorFlow" in output
            assert process.returncode == 1
