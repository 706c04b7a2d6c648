"""`tfdp merge`: the ordinary Keras file of a checkpoint, in one call.

Two hosts' parts are in tests/processes/test_host_files.py.
"""

import io
import os
import zipfile

import h5py
import keras
import numpy as np
import pytest

import tfdp
from tests.devices.test_checkpoint import CASES, make_model, train
from tests.support.fresh_python import run_python
from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.checkpoint import Checkpoint, merge_parts
from tfdp.checkpoint.entries import entries_of
from tfdp.checkpoint.keras_file import (
    MARK,
    WEIGHTS_NAME,
    is_dataset,
    items_of,
    keras_file_of,
    open_weights,
)
from tfdp.checkpoint.manifest import MANIFEST_NAME, folders_newest_first
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError
from tfdp.tools.commands.cli import main

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def saved(folder, replicas=2, steps=(3, 6), **options):
    """A model, and checkpoints of it after so many steps; its weights at each."""
    model, files, weights = make_model(replicas, **options), Checkpoint(folder), []
    done = 0
    for step in steps:
        train(model, done, step)
        done = step
        files.save(model, step=step)
        files.wait()
        weights.append(model.get_weights())
    return weights


def assert_same(left, right):
    for mine, theirs in zip(left, right, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "case",
    [
        *("parameters", "diloco-int8"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("plain", "optimizer", "gradients", "top-k")
        ),
    ],
)
def test_the_newest_becomes_a_model_of_plain_keras(tmp_path, case, capsys):
    weights = saved(tmp_path / "run", **CASES[case])
    merged = tmp_path / "model.keras"
    assert main(["merge", str(tmp_path / "run"), str(merged)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert_same(keras.models.load_model(merged).get_weights(), weights[-1])
    plain = make_model(0)
    path = merge_parts(tmp_path / "run", tmp_path / "model.weights.h5")
    plain.load_weights(path)
    assert_same(plain.get_weights(), weights[-1])


def test_what_the_callback_writes(tmp_path):
    model = make_model(2)
    data = np.ones((24, 12)), np.ones(24)
    callback = tfdp.callbacks.Checkpoint(tmp_path / "run", every_steps=2)
    model.fit(*data, batch_size=8, verbose=0, callbacks=[callback])
    merged = merge_parts(tmp_path / "run", tmp_path / "model.keras")
    assert_same(keras.models.load_model(merged).get_weights(), model.get_weights())


def test_one_that_is_named(tmp_path):
    weights = saved(tmp_path / "run")
    older = folders_newest_first(tmp_path / "run")[1]
    merged = merge_parts(older, tmp_path / "model.keras")
    assert_same(keras.models.load_model(merged).get_weights(), weights[0])


@pytest.mark.parametrize("name", [MANIFEST_NAME, "part-0-of-1.safetensors"])
def test_a_damaged_one_is_named_and_the_one_before_taken(tmp_path, name):
    weights = saved(tmp_path / "run")
    newest, older = folders_newest_first(tmp_path / "run")
    data = bytearray((newest / name).read_bytes())
    data[len(data) // 2] ^= 1
    (newest / name).write_bytes(bytes(data))
    with pytest.warns(CheckpointWarning, match=f"{newest.name}.*{name}"):
        merged = merge_parts(tmp_path / "run", tmp_path / "model.keras")
    assert_same(keras.models.load_model(merged).get_weights(), weights[0])
    with pytest.raises(DataError, match=f"{newest.name}.*{name}"):
        merge_parts(newest, tmp_path / "named.keras")
    assert not (tmp_path / "named.keras").exists()
    (older / MANIFEST_NAME).unlink()
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(DataError, match="No checkpoint .* merged.*never finished"),
    ):
        merge_parts(tmp_path / "run", tmp_path / "none.keras")


@keras.saving.register_keras_serializable()
class OwnModel(keras.Model):
    """A model of the user's own class."""

    def __init__(self, units=3, **options):
        super().__init__(**options)
        self.units = units
        self.scale = self.add_weight(shape=(12,), initializer="ones")
        self.inner = keras.Sequential(
            [
                keras.layers.Dense(units),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(5),
            ]
        )

    def call(self, inputs, training=None):
        return self.inner(inputs * self.scale, training=training)

    def get_config(self):
        return {"units": self.units}


class NoConfig(OwnModel):
    """A model that Keras cannot save as a whole."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def get_config(self):
        raise NotImplementedError


def trained(replicas, shard, dtype="float32", make=OwnModel, optimizer="adam"):
    keras.config.set_dtype_policy(dtype)
    try:
        with make_strategy(replicas, shard=shard).scope():
            model = make()
            model.compile(optimizer, LOSS, metrics=["accuracy"], jit_compile=False)
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = classification_data(48)
    model.fit(x, y, batch_size=24, verbose=0)
    return model


def written(folder, model):
    checkpoint = Checkpoint(folder)
    checkpoint.save(model, step=1)
    checkpoint.wait()
    return folder


def content_of(path):
    """All that a Keras file says, but when it was written."""
    found = {}
    with open_weights(path) as (archive, weights):
        for name in archive.namelist():
            if name not in ("metadata.json", "model.weights.h5"):
                found[name] = archive.read(name)
        for place, item in items_of(weights):
            value = (item.dtype, item[()].tolist()) if is_dataset(item) else None
            found[place] = sorted((k, str(v)) for k, v in item.attrs.items()), value
    return found


@pytest.mark.parametrize("make", [OwnModel, dense_model])
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
def test_it_is_the_file_that_keras_saves(tmp_path, replicas, shard, dtype, make):
    model = trained(replicas, shard, dtype, make)
    written(tmp_path / "run", model)
    merged = merge_parts(tmp_path / "run", tmp_path / "model.keras")
    model.save(tmp_path / "whole.keras")
    assert content_of(merged) == content_of(tmp_path / "whole.keras")
    with make_strategy(2, shard="parameters").scope():
        loaded = keras.models.load_model(merged)
    assert_same(loaded.optimizer.variables, model.optimizer.variables)


def test_a_later_checkpoint_has_the_later_values(tmp_path):
    """The file with the marks is made once, and again for another optimizer."""
    model = trained(2, "parameters")
    x, y = classification_data(48)
    for optimizer in ("adam", None, keras.optimizers.SGD(0.1, momentum=0.9)):
        if optimizer is not None:
            with model.distribute_strategy.scope():
                model.compile(optimizer, LOSS, jit_compile=False)
        model.fit(x, y, batch_size=24, verbose=0)
        path = written(tmp_path / f"{optimizer}"[:6], model)
        merged = merge_parts(path, tmp_path / "model.keras")
        model.save(tmp_path / "whole.keras")
        assert content_of(merged) == content_of(tmp_path / "whole.keras")


def test_it_needs_no_code_of_the_model(tmp_path):
    written(tmp_path / "run", trained(2, "parameters"))
    done = run_python("-m", "tfdp", "merge", tmp_path / "run", tmp_path / "a.keras")
    assert done.returncode == 0, done.stderr


def test_of_a_class_without_config_the_weights_are_merged(tmp_path):
    model = trained(2, "parameters", make=lambda: NoConfig(lambda x: x))
    written(tmp_path / "run", model)
    with pytest.raises(DataError, match="only the weights .*weights.h5 file"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")
    assert not (tmp_path / "model.keras").exists()
    path = merge_parts(tmp_path / "run", tmp_path / "model.weights.h5")
    other = NoConfig(lambda x: x)
    other(np.ones((1, 12)))
    other.load_weights(path)
    assert_same(other.get_weights(), model.get_weights())


class Doubled(keras.layers.Dense):
    """A layer that stores another value than its variable's."""

    def save_own_variables(self, store):
        store["0"] = self.kernel * 2


def test_a_file_that_has_no_places_for_values_is_none(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Doubled(3)])
    written(tmp_path / "run", model)
    with pytest.raises(DataError, match="could not save the model .*restore.model"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")


class Constant(keras.layers.Layer):
    """A layer that stores a number that is no variable."""

    number = 1.0

    def build(self, shape):
        self.scale = self.add_weight(shape=(4,))

    def call(self, inputs):
        return inputs * self.scale

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["number"] = np.asarray(self.number)


def test_other_numbers_in_the_file_are_those_of_the_save(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Constant()])
    for number in (3.0, 4.0):
        model.layers[-1].number = number
        written(tmp_path / "run", model)
        merged = merge_parts(tmp_path / "run", tmp_path / "model.keras")
        model.save(tmp_path / "whole.keras")
        assert content_of(merged) == content_of(tmp_path / "whole.keras")


def changed_weights(content, change):
    """The file with changed weights, and whatever else."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    weights, result = io.BytesIO(entries[WEIGHTS_NAME]), io.BytesIO()
    with h5py.File(weights, "r+") as file:
        del file["layers/dense/vars/1"]
        change(file)
    entries[WEIGHTS_NAME] = weights.getvalue()
    with zipfile.ZipFile(result, "w") as archive:
        for name, entry in entries.items():
            archive.writestr(name, entry)
    return result.getvalue()


def dataset(shape, **options):
    place = "layers/dense/vars/1"
    return lambda file: file.create_dataset(place, shape, "f4", **options)


def compressed(content):
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(WEIGHTS_NAME, content)
    return result.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        compressed,
        # HDF5 allocates what a header claims, and opens files that it names.
        lambda content: changed_weights(content, dataset((2**40,), chunks=(1024,))),
        lambda content: changed_weights(
            content, dataset((3,), external=[("/etc/passwd", 0, 12)])
        ),
        lambda content: changed_weights(content, dataset((0, MARK, 99))),
    ],
)
def test_a_file_that_a_stranger_signed_is_refused(tmp_path, monkeypatch, change):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
    entries = entries_of(model)
    content = change(keras_file_of(model, entries))
    monkeypatch.setattr(
        "tfdp.checkpoint.checkpoint.keras_file_of", lambda model, entries: content
    )
    written(tmp_path / "run", model)
    with pytest.raises(DataError, match="is damaged"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")
    assert not (tmp_path / "model.keras").exists()


def test_where_there_is_none_or_no_place_for_the_file(tmp_path):
    with pytest.raises(DataError, match="holds no checkpoint"):
        merge_parts(tmp_path, tmp_path / "model.keras")
    with pytest.raises(DataError, match=r"\.keras or a \.weights\.h5"):
        merge_parts(tmp_path, tmp_path / "model.h5")
    with pytest.raises(ConfigurationError, match="no folder"):
        merge_parts(tmp_path, tmp_path / "absent" / "model.keras")
    with pytest.raises(ConfigurationError, match="too long"):
        merge_parts(tmp_path, tmp_path / ("n" * 300 + ".keras"))


def test_a_folder_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["merge", str(tmp_path / "missing"), str(tmp_path / "w.keras")]) == 1
    assert "There is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_where_nothing_can_be_written_is_said_with_its_name(tmp_path, ending, capsys):
    saved(tmp_path / "run", steps=(1,))
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / f"device{ending}").symlink_to("/dev/full")
    for name in (f"folder{ending}", f"device{ending}"):
        assert main(["merge", str(tmp_path / "run"), str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err


def test_a_pipe_in_the_place_of_a_manifest_is_damage(tmp_path):
    saved(tmp_path / "run", steps=(1,))
    (folder,) = folders_newest_first(tmp_path / "run")
    (folder / MANIFEST_NAME).unlink()
    os.mkfifo(folder / MANIFEST_NAME)
    with pytest.raises(DataError, match="is damaged .ValueError: it is not a file"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")
