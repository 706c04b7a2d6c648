"""`tfdp merge` of a training's checkpoints: plain Keras weights, in one call.

Two hosts' parts are in tests/processes/test_host_files.py.
"""

import json
import os

import keras
import numpy as np
import pytest

import tfdp
from tests.devices.test_checkpoint import CASES, make_model, train
from tests.support.fresh_python import run_python
from tfdp.checkpoint import Checkpoint, merge_parts
from tfdp.checkpoint.manifest import MANIFEST_NAME, folders_newest_first
from tfdp.checkpoint.model_description import architecture_of, model_of
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError
from tfdp.files.checked_json import with_checksum
from tfdp.tools.commands.cli import main


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


class OwnLayer(keras.layers.Layer):
    """Registered nowhere."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, inputs):
        return inputs * self.scale


SCRIPT = """
import keras
from tests.devices.test_merge_checkpoint import OwnLayer

def build_model(last=2):
    return keras.Sequential([keras.Input((4,)), OwnLayer(), keras.layers.Dense(last)])

def another():
    return build_model(3)

def nothing():
    return None
"""


def test_a_model_that_only_the_program_can_make(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    model = keras.Sequential([keras.Input((4,)), OwnLayer(), keras.layers.Dense(2)])
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.save(model, step=1)
    checkpoint.wait()
    merged = tmp_path / "model.weights.h5"
    with pytest.raises(DataError, match="tfdp merge --model script.py"):
        merge_parts(tmp_path / "run", merged)
    given = [str(tmp_path / "run"), str(merged)]
    done = run_python("-m", "tfdp", "merge", *given, "--model", script)
    assert done.returncode == 0, done.stderr
    other = keras.Sequential([keras.Input((4,)), OwnLayer(), keras.layers.Dense(2)])
    other.load_weights(merged)
    assert_same(other.get_weights(), model.get_weights())
    assert main(["merge", *given, "--model", f"{script}:another"]) == 1
    assert main(["merge", *given, "--model", f"{script}:nothing"]) == 1
    assert main(["merge", *given, "--model", f"{script}:absent"]) == 1
    with pytest.raises(ConfigurationError, match="parts of save_parts need no model"):
        merge_parts(tmp_path, merged, build=lambda: model)


def test_checkpoints_of_before_say_nothing_of_the_model(tmp_path):
    saved(tmp_path / "run", steps=(2,))
    (folder,) = folders_newest_first(tmp_path / "run")
    content = json.loads((folder / MANIFEST_NAME).read_text())
    del content["architecture"], content["checksum"]
    (folder / MANIFEST_NAME).write_text(with_checksum(content))
    with pytest.raises(DataError, match="--model script.py"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")
    merge_parts(tmp_path / "run", tmp_path / "a.keras", build=lambda: make_model(0))


def test_no_memory_is_taken_for_numbers_that_are_not_there(tmp_path):
    saved(tmp_path / "run", steps=(2,))
    (folder,) = folders_newest_first(tmp_path / "run")
    content = json.loads((folder / MANIFEST_NAME).read_text())
    said = json.loads(content["architecture"])
    for layer in said["config"]["layers"]:
        layer["config"] = layer["config"] | {"units": 10**11}
    content["architecture"] = json.dumps(said)
    content["entries"]["model/0"]["shape"] = [12, 10**11]
    del content["checksum"]
    (folder / MANIFEST_NAME).write_text(with_checksum(content))
    with pytest.raises(DataError, match="more numbers than its parts can hold"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")


SHAPES = [(12, 8), (8,)]


def described(**changes):
    """A small model's description, with changes of its only layer."""
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(8)])
    said = json.loads(architecture_of(model))
    layer = said["config"]["layers"][1]
    for name, value in changes.items():
        (layer if name in layer else layer["config"])[name] = value
    return json.dumps(said)


def test_a_description_makes_the_model():
    model = model_of(described(), SHAPES)
    assert [tuple(v.shape) for v in model.variables] == SHAPES
    assert model(np.ones((2, 12))).shape == (2, 8)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "{}", "null", "[1]", "[" * 9999, '{"class_name": "Sequential"}'),
        described(units=10**11),  # 5 TB of weights
        described(units=9),
        described(class_name="load_model", module="keras.saving"),
        described(class_name="system", module="os"),
        described(class_name="Popen", module="subprocess"),
        described(kernel_initializer={"class_name": "__lambda__", "config": {}}),
    ],
)
def test_a_strangers_description_is_refused(text):
    with pytest.raises(DataError, match="cannot make the model"):
        model_of(text, SHAPES)


def test_a_script_that_ends_is_no_success(tmp_path, capsys):
    saved(tmp_path / "run", steps=(1,))
    script = tmp_path / "model.py"
    script.write_text("import sys\ndef build_model():\n    sys.exit(0)\n")
    merged = tmp_path / "model.keras"
    words = "merge", str(tmp_path / "run"), str(merged), "--model", str(script)
    assert main(words) == 1
    assert "nothing was merged" in capsys.readouterr().err and not merged.exists()


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_where_nothing_can_be_written_is_said_with_its_name(tmp_path, ending, capsys):
    saved(tmp_path / "run", steps=(1,))
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / f"device{ending}").symlink_to("/dev/full")
    for name in (f"folder{ending}", f"device{ending}"):
        assert main(["merge", str(tmp_path / "run"), str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err


def test_a_part_is_not_replaced_by_the_whole(tmp_path, capsys):
    model = make_model(2)
    tfdp.checkpoint.save_parts(model, tmp_path)
    (part,) = tmp_path.glob("part-*.keras")
    before = part.read_bytes()
    assert main(["merge", str(tmp_path), str(part)]) == 1
    assert "is a part to merge" in capsys.readouterr().err
    assert part.read_bytes() == before


def test_a_pipe_in_the_place_of_a_manifest_is_damage(tmp_path):
    saved(tmp_path / "run", steps=(1,))
    (folder,) = folders_newest_first(tmp_path / "run")
    (folder / MANIFEST_NAME).unlink()
    os.mkfifo(folder / MANIFEST_NAME)
    with pytest.raises(DataError, match="is damaged .ValueError: it is not a file"):
        merge_parts(tmp_path / "run", tmp_path / "model.keras")
