"""Checkpoints in parts, and the ordinary file that is made of them.

Parts of several hosts are in tests/processes/test_host_files.py.
"""

import io
import json
import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest

import tfdp
from tests.support.parity import classification_data, dense_model, make_strategy
from tests.support.two_parts import content_of, saved_model, write_parts
from tfdp.checkpoint.parts import note_identity, part_names
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.checked_json import with_checksum
from tfdp.tools.commands.cli import main


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
    for words in ("is empty", r"no parts\.json"):
        with pytest.raises(DataError, match=words):
            tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.keras")
        (tmp_path / "another file").touch()
    tfdp.checkpoint.save_parts(trained(2, "parameters"), tmp_path)
    with pytest.raises(DataError, match=r"\.keras or a \.weights\.h5"):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "model.h5")
    index = json.loads((tmp_path / "parts.json").read_text())
    with pytest.raises(ConfigurationError, match="no folder"):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / "absent" / "model.keras")
    with pytest.raises(ConfigurationError, match="too long"):
        tfdp.checkpoint.merge_parts(tmp_path, tmp_path / ("n" * 300 + ".keras"))
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


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    model = trained(2, "none")
    for name in ("n" * 300, "a\0b"):
        with pytest.raises(ConfigurationError, match="Cannot create the directory"):
            tfdp.checkpoint.save_parts(model, tmp_path / name)


@pytest.mark.parametrize("failing", ["worker 1", "its part", "the index"])
def test_one_host_that_cannot_write_fails_on_all(tmp_path, monkeypatch, failing):
    model = trained(2, "parameters")
    folder = tfdp.checkpoint.save_parts(model, tmp_path / "parts")
    before = sorted(path.name for path in folder.iterdir())
    full = OSError(28, "No space left on device")
    told, saves, save = [], [], model.save

    def gather(blob, label):
        told.append(blob)
        return [blob, f"OSError: {full}".encode() if failing == "worker 1" else b""]

    def save_or_fail(path):
        saves.append(path)
        if len(saves) == {"its part": 1, "the index": 2}.get(failing):
            raise full
        save(path)

    monkeypatch.setattr(model.distribute_strategy, "gather_bytes", gather)
    monkeypatch.setattr(model, "save", save_or_fail)
    name = failing if failing == "worker 1" else "worker 0"
    with pytest.raises(DataError, match=rf"{name} \(OSError: .*No space left"):
        tfdp.checkpoint.save_parts(model, folder)
    # The other host has heard of it, and waits for nothing more.
    assert len(told) == 1 + (failing == "the index")
    assert bool(told[-1]) == (name == "worker 0")
    assert sorted(path.name for path in folder.iterdir()) == before
    tfdp.checkpoint.merge_parts(folder, tmp_path / "model.keras")


def test_what_dead_writers_left_goes_and_what_others_own_stays(tmp_path):
    outside = tmp_path / "outside.keras"
    outside.write_text("mine")
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    # An index that names what is not its own, and a part whose writer died.
    names = ["../outside.keras", str(outside), "notes.txt"]
    (folder / "parts.json").write_text(json.dumps({"parts": names, "sharded": {}}))
    (folder / f"part-1-of-2-{'0' * 15}.keras").write_text("half a model")
    tfdp.checkpoint.save_parts(trained(2, "parameters"), folder)
    assert outside.read_text() == (folder / "notes.txt").read_text() == "mine"
    assert len(list(folder.iterdir())) == 3
    tfdp.checkpoint.merge_parts(folder, tmp_path / "model.keras")


@pytest.fixture(scope="module")
def two_writes(tmp_path_factory):
    """Parts of two trainings of one model: all sizes and shapes are the same."""
    folder = tmp_path_factory.mktemp("writes")
    for number in (1, 2):
        whole = saved_model(folder / f"{number}.keras", number)
        write_parts(whole, folder / str(number), str(number) * 15)
    return folder


@pytest.fixture
def copied(two_writes, tmp_path):
    shutil.copytree(two_writes, tmp_path, dirs_exist_ok=True)
    return tmp_path


def part(folder, write, number):
    return folder / str(write) / f"part-{number}-of-2-{str(write) * 15}.keras"


def merged(folder):
    return tfdp.checkpoint.merge_parts(folder, folder.parent / "merged.keras")


def test_two_parts_make_the_whole(copied):
    merge = content_of(merged(copied / "1"))
    whole = content_of(copied / "1.keras")
    assert merge == whole != content_of(copied / "2.keras")


def test_parts_of_another_write_are_named(copied):
    shutil.copy(part(copied, 2, 2), part(copied, 1, 2))
    with pytest.raises(DataError, match=r"part 2 of 2 of the write 2{15}.* 1{15}"):
        merged(copied / "1")


def test_parts_in_each_others_place_are_named(copied):
    shutil.copy(part(copied, 1, 1), part(copied, 1, 2))
    with pytest.raises(DataError, match="part 1 of 2 .* needs part 2 of 2"):
        merged(copied / "1")


def test_a_changed_number_is_named(copied):
    """Also where the archive's own checksums are right."""
    path = part(copied, 1, 1)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with h5py.File(io.BytesIO(entries["model.weights.h5"])) as weights:
        numbers = weights["layers/dense/vars/0"][()].tobytes()
    for whole in (path.read_bytes(), entries["model.weights.h5"]):
        content = bytearray(whole)
        content[content.find(numbers) + 2] ^= 1
        if len(content) == path.stat().st_size:
            path.write_bytes(content)
        else:
            entries["model.weights.h5"] = bytes(content)
            write_archive(path, entries)
        with pytest.raises(DataError, match=f"{path.name} is damaged"):
            merged(copied / "1")


def write_archive(path, entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def signed(content):
    return with_checksum({k: v for k, v in content.items() if k != "checksum"})


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["parts"].__setitem__(0, "../1.keras"),
        lambda index: index["parts"].__setitem__(0, "/etc/passwd"),
        lambda index: index["parts"].__setitem__(0, 7),
        lambda index: index.update(parts=[]),
        lambda index: index.update(parts={"a": 1}),
        lambda index: index.update(write="../1", parts=part_names("../1", 2)),
        lambda index: index.update(write=[], parts=None),
        lambda index: index.update(sharded=[1]),
        lambda index: index["sharded"].update(absent={"shape": [2], "lengths": [1, 1]}),
        lambda index: index["sharded"].update(layers={"shape": [2], "lengths": [1, 1]}),
        lambda index: first_entry(index).update(lengths=[6, 6]),
        lambda index: first_entry(index).update(lengths=[12]),
        lambda index: first_entry(index).update(shape=[10**30], lengths=[10**30, 0]),
        lambda index: first_entry(index).update(shape=[2.5], lengths=[2.5, 0]),
        lambda index: first_entry(index).update(shape=["4", "3"]),
        lambda index: index.pop("sharded"),
        lambda index: index.update(format="tfdp.parts/9"),
        lambda index: index.pop("format"),
    ],
)
def test_an_index_that_a_stranger_signed_is_refused(copied, change):
    path = copied / "1" / "parts.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(signed(index))
    with pytest.raises(DataError):
        merged(copied / "1")


def first_entry(index):
    return next(iter(index["sharded"].values()))


def test_numbers_that_are_not_in_the_part_are_refused(copied):
    """HDF5 allocates what a header claims, and opens files that it names."""
    path = part(copied, 1, 1)
    for claim in ("size", "file"):
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        entries.pop("tfdp.json")
        weights = io.BytesIO(entries["model.weights.h5"])
        with h5py.File(weights, "r+") as file:
            del file["layers/dense/vars/1"]
            outside = [("/etc/passwd", 0, 12)] if claim == "file" else None
            shape = (2**40,) if claim == "size" else (3,)
            chunks = (1024,) if claim == "size" else None
            file.create_dataset(
                "layers/dense/vars/1", shape, "f4", chunks=chunks, external=outside
            )
        entries["model.weights.h5"] = weights.getvalue()
        write_archive(path, entries)
        note_identity(path, "1" * 15, 1, 2)
        with pytest.raises(DataError, match="not in the part"):
            merged(copied / "1")


def test_a_folder_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["merge", str(tmp_path / "missing"), str(tmp_path / "w.keras")]) == 1
    assert "There is no folder" in capsys.readouterr().err
