"""Checkpoints in parts, and the ordinary file that is made of them.

Parts of several hosts are in tests/processes/test_host_files.py.
"""

import json
import re
import zipfile

import h5py
import keras
import numpy as np
import pytest

import tfdp
from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.cli import main
from tfdp.errors import ConfigurationError, DataError


def trained(replicas, shard, dtype="float32"):
    keras.config.set_dtype_policy(dtype)
    try:
        with make_strategy(replicas, shard=shard).scope():
            model = dense_model()
            model.compile(
                keras.optimizers.Adam(0.01),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = classification_data(48)
    model.fit(x, y, batch_size=24, verbose=0)
    return model


def numbers_of(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize(
    "replicas, shard, dtype",
    [
        (2, "none", "float32"),
        (3, "optimizer", "float32"),
        (2, "gradients", "float32"),
        (3, "parameters", "float32"),
        (2, "parameters", "bfloat16"),
    ],
)
def test_the_merged_file_is_the_whole_model(tmp_path, replicas, shard, dtype, capsys):
    model = trained(replicas, shard, dtype)
    tfdp.checkpoint.save_parts(model, tmp_path / "parts")
    merged = tmp_path / "model.keras"
    assert main(["merge", str(tmp_path / "parts"), str(merged)]) == 0
    assert str(merged) in capsys.readouterr().out
    expected = numbers_of(model)
    for place in (None, make_strategy(2, shard="parameters")):
        if place is None:
            loaded = keras.models.load_model(merged)
        else:
            with place.scope():
                loaded = keras.models.load_model(merged)
        for mine, stored in zip(expected, numbers_of(loaded), strict=True):
            assert mine.dtype == stored.dtype
            np.testing.assert_array_equal(mine, stored)


def test_weights_alone(tmp_path):
    model = trained(2, "parameters")
    tfdp.checkpoint.save_parts(model, tmp_path)
    path = tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.weights.h5")
    plain = dense_model()
    plain.load_weights(path)
    for mine, stored in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, stored)


def test_a_second_call_replaces_the_first(tmp_path):
    model = trained(2, "parameters")
    tfdp.checkpoint.save_parts(model, tmp_path)
    first = {path.name for path in tmp_path.iterdir()}
    model.layers[-1].kernel.assign(model.layers[-1].kernel.numpy() * 2)
    tfdp.checkpoint.save_parts(model, tmp_path)
    second = {path.name for path in tmp_path.iterdir()}
    assert len(second) == 2 and first & second == {"parts.json"}
    merged = tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.keras")
    loaded = keras.models.load_model(merged)
    np.testing.assert_array_equal(loaded.get_weights()[-2], model.get_weights()[-2])


def test_what_is_missing_or_does_not_fit_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no parts\.json"):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.keras")
    tfdp.checkpoint.save_parts(trained(2, "parameters"), tmp_path)
    with pytest.raises(DataError, match=r"\.keras or a \.weights\.h5"):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.h5")
    index = json.loads((tmp_path / "parts.json").read_text())
    place, entry = next(iter(index["sharded"].items()))
    entry["lengths"][0] += 1
    (tmp_path / "parts.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=re.escape(place)):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.keras")
    name = index["parts"][0]
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=name):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.keras")
    assert not (tmp_path / "model.keras").exists()


def test_a_model_of_no_strategy_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="scope"):
        tfdp.checkpoint.save_parts(dense_model(), tmp_path)


def test_a_part_holds_no_whole_variable(tmp_path):
    """The file of one host is flat where variables are sharded."""
    tfdp.checkpoint.save_parts(trained(2, "parameters"), tmp_path)
    index = json.loads((tmp_path / "parts.json").read_text())
    with zipfile.ZipFile(tmp_path / index["parts"][0]) as archive:
        with archive.open("model.weights.h5") as file, h5py.File(file) as weights:
            shapes = {place: weights[place].shape for place in index["sharded"]}
    # Two kernels, two biases, and two slots for each.
    assert len(shapes) == 12
    assert all(len(shape) == 1 for shape in shapes.values())
