"""Real processes: several hosts with a mesh train as one device does."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support import grid_hosts
from tests.support.grids import mlp
from tests.support.parity import rounding_bound
from tests.support.workers import Workers

#: By name: devices of a host, the mesh, `shard=`, and the engine.
MESHES = {
    "2x2": (2, (2, 2), "none", "auto"),
    "2x4": (4, (4, 2), "none", "auto"),
    "2x4-wide": (4, (2, 4), "none", "auto"),
    "2x2-optimizer": (2, (2, 2), "optimizer", "auto"),
    "2x4-parameters": (4, (4, 2), "parameters", "auto"),
    "2x2-tensorflow": (2, (2, 2), "none", "tensorflow"),
}
IN_TEST = {
    "2x2": ("momentum-48", "global-14", "LAMB-14", "AdamW-14"),
    "2x4": ("momentum-14",),
}
ROWS = [
    pytest.param(
        mesh,
        name,
        id=f"{mesh}-{name}",
        marks=() if name in IN_TEST.get(mesh, ()) else pytest.mark.slow,
    )
    for mesh in MESHES
    for name in grid_hosts.TRAININGS
]


@functools.cache
def on_one_device(name):
    return grid_hosts.train(None, name)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """From a mesh, the folder with every worker's numbers, of the rows that run."""
    wanted = {}
    for item in request.session.items:
        if item.function is test_hosts_train_as_one_device:
            row = item.callspec.params
            wanted.setdefault(row["mesh"], []).append(row["name"])

    @functools.cache
    def results_of(mesh):
        devices, shape, shard, engine = MESHES[mesh]
        folder = tmp_path_factory.mktemp(mesh)
        arguments = (folder, *shape, shard, engine, *wanted[mesh])
        variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
        with Workers(
            2, "tests.support.grid_hosts", *arguments, variables=variables
        ) as workers:
            workers.succeed()
        return folder

    return results_of


def bound_of(model, name):
    """Two orders of summation differ so much in the weights: see tests of one host."""
    rate = {"momentum": 1.0, "LAMB": 8.0}.get(name.split("-")[0], 10.0)
    return rounding_bound(model, 8, 12, 8.0, rate)


@pytest.mark.worth_seconds(200)
@pytest.mark.parametrize("mesh, name", ROWS)
def test_hosts_train_as_one_device(results, mesh, name):
    model, losses = on_one_device(name)
    folder, (data, size) = results(mesh), MESHES[mesh][1]
    first = None
    for rank in range(2):
        with np.load(folder / f"{name}.{rank}.npz") as file:
            got = dict(file)
        for place, one in enumerate(model.get_weights()):
            bound = bound_of(model, name)
            np.testing.assert_allclose(got[f"weight{place}"], one, rtol=0, atol=bound)
        np.testing.assert_allclose(got["losses"], losses, rtol=1e-5)
        assert got["blocks"].shape == (2 * data * size // 4, 12, 16 // size)
        # Every copy of a block, on every host, has the same bits.
        whole = got["weight0"]
        for place, block in enumerate(got["blocks"]):
            own = np.split(whole, size, axis=1)[place % size]
            np.testing.assert_array_equal(block, own)
        first = got if first is None else first
        for key in got:
            np.testing.assert_array_equal(got[key], first[key], err_msg=key)


def told(*cases):
    variables = {"TFDP_DEVICES_PER_WORKER": "2"}
    arguments = ("refusals", *cases)
    with Workers(
        2, "tests.support.grid_hosts", *arguments, variables=variables
    ) as workers:
        return workers.succeed()


@pytest.mark.worth_seconds(60)
def test_what_cannot_be_on_hosts_is_refused_with_words():
    for output in told():
        cuts = re.search("data axis: (.*)", output).group(1)
        assert "'up/kernel' along 'data'" in cuts and "each host needs all" in cuts
        differ = re.search("mesh: (.*)", output).group(1)
        mesh = "data=2 x model=2; up/kernel"
        assert f"layout is \"{mesh}: (None, 'model')\" on worker 0" in differ
        assert f"\"{mesh}: ('model', None)\" on worker 1" in differ


@pytest.mark.slow
def test_groups_that_cross_hosts_are_refused_with_the_mesh_that_fits():
    for output in told("crossing"):
        mesh = re.search("mesh: (.*)", output).group(1)
        assert "4 replicas share parts of weights, and a host has 2" in mesh
        assert "keras.distribution.DeviceMesh((2, 2), ...)" in mesh


def read(path):
    with np.load(path) as file:
        return dict(file)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


@pytest.mark.worth_seconds(60)
def test_files_of_hosts_with_a_mesh_hold_whole_weights(tmp_path):
    one = grid_hosts.built(mlp())
    grid_hosts.fit(one)
    of_one = tfdp.checkpoint.Checkpoint(tmp_path / "of one")
    of_one.save(one, step=1)
    of_one.wait()
    state = grid_hosts.state_of(one)
    variables = {"TFDP_DEVICES_PER_WORKER": "2"}
    arguments = ("tests.support.grid_hosts", "files", tmp_path)
    with Workers(2, *arguments, variables=variables) as workers:
        outputs = workers.succeed()
    grid_hosts.fit(one)
    trained = read(tmp_path / "trained.0.npz")
    bound = rounding_bound(one, 6, 12, 8.0, 10.0)
    for key, value in grid_hosts.state_of(one).items():
        np.testing.assert_allclose(trained[key], value, rtol=0, atol=bound, err_msg=key)
    restored = grid_hosts.built(mlp())
    hosts = tfdp.checkpoint.Checkpoint(tmp_path / "of hosts")
    assert hosts.restore(restored).step == 4
    assert_same(grid_hosts.state_of(restored), trained)
    alone = keras.models.load_model(tmp_path / "alone.keras")
    assert_same(grid_hosts.state_of(alone), trained)
    for rank, output in enumerate(outputs):
        assert_same(read(tmp_path / f"read.{rank}.npz"), state)
        assert_same(read(tmp_path / f"trained.{rank}.npz"), trained)
        assert_same(read(tmp_path / f"restored.{rank}.npz"), trained)
        loaded = keras.models.load_model(tmp_path / f"model.{rank}.keras")
        assert_same(grid_hosts.state_of(loaded), trained)
        served = tf.saved_model.load(tmp_path / f"served.{rank}")
        for mine, weight in zip(served.variables, loaded.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), weight.numpy())
        without = read(tmp_path / "without.0.npz")
        assert_same(read(tmp_path / f"backup.{rank}.npz"), without)
        newest = keras.models.load_model(tmp_path / "newest.keras")
        assert_same(grid_hosts.state_of(newest), without)
        assert "compared 3 0" in output
        # Replicas 1 and 3 hold the second block: there is no majority.
        drift = re.search("drifted: (.*)", output).group(1)
        assert re.search(r"replica 1 .*, replica 3 .* differ in up/kernel", drift), (
            drift
        )
