"""`tfdp.checkpoint.Checkpoint`: all that a training is, and nothing that is damaged.

The reference is the training that was not interrupted: after a restore to the same
replicas every bit is the same. Several hosts are in tests/processes/test_resume.py.
"""

import json
import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.mutations import BYTES, edit_json
from tests.support.parity import classification_data, make_strategy
from tfdp.checkpoint import Checkpoint
from tfdp.checkpoint.entries import entries_of
from tfdp.checkpoint.manifest import MANIFEST_NAME, folders_newest_first
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError
from tfdp.files.checked_json import with_checksum

ROWS, STEPS = 12, 7
CASES = {
    "plain": {},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "accumulate": {"wrap": {"accumulate_steps": 2}},
    "accumulate-parameters": {"shard": "parameters", "wrap": {"accumulate_steps": 2}},
    "top-k": {"compression": tfdp.compression.TopK(0.1, min_bytes=1)},
    "power-sgd": {"compression": tfdp.compression.PowerSGD(1, min_bytes=1)},
    "local-sgd": {"wrap": {"sync": tfdp.sync.LocalSGD(every=3, across="replicas")}},
    "diloco-overlap": {
        "wrap": {"sync": tfdp.sync.DiLoCo(every=3, across="replicas", overlap_steps=2)}
    },
    "one-bit-adam": {
        "optimizer": lambda: tfdp.optimizers.OneBitAdam(
            0.01, warmup_steps=3, across="replicas"
        )
    },
    "one-bit-lamb": {
        "optimizer": lambda: tfdp.optimizers.OneBitLAMB(
            0.01, warmup_steps=3, across="replicas"
        )
    },
    "diloco-int8": {
        "wrap": {
            "sync": tfdp.sync.DiLoCo(
                every=3,
                across="replicas",
                compression=tfdp.compression.Int8(min_bytes=1),
            )
        }
    },
    "loss-scale": {"policy": "mixed_float16"},
    "lars-average": {"optimizer": lambda: tfdp.optimizers.LARS(0.1, use_ema=True)},
}


def make_model(replicas, *, wrap=None, policy="float32", optimizer=None, **options):
    keras.utils.set_random_seed(1)
    if "compression" in options:
        options["compression_across"] = "replicas"
    strategy = make_strategy(replicas, **options) if replicas else None
    scope = tf.distribute.get_strategy() if strategy is None else strategy
    keras.config.set_dtype_policy(policy)
    try:
        with scope.scope():
            model = keras.Sequential(
                [
                    keras.Input((12,)),
                    keras.layers.Dense(8, activation="relu"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(10, dtype="float32"),
                ]
            )
            inner = optimizer() if optimizer else keras.optimizers.Adam(0.01)
            if wrap:
                inner = tfdp.DistributedOptimizer(inner, **wrap)
            model.compile(
                inner,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def train(model, first, last):
    x, y = classification_data(240)
    rows = slice(first * ROWS, last * ROWS)
    model.fit(x[rows], y[rows], batch_size=ROWS, shuffle=False, verbose=0)


def state_of(model):
    return {name: np.array(e.read()) for name, e in entries_of(model).items()}


def assert_alike(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


QUICKEST = ("plain", "accumulate-parameters", "diloco-int8")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICKEST else pytest.mark.slow)
        for case in CASES
    ],
)
def test_the_same_replicas_end_with_the_same_bits(tmp_path, case):
    model = make_model(2, **CASES[case])
    train(model, 0, STEPS)
    files = Checkpoint(tmp_path)
    files.save(model, step=STEPS)
    train(model, STEPS, 2 * STEPS)
    files.wait()
    other = make_model(2, **CASES[case])
    train(other, 0, 2)  # what it holds now is to go
    keras.utils.set_random_seed(7)
    assert Checkpoint(tmp_path).restore(other).step == STEPS
    train(other, STEPS, 2 * STEPS)
    assert_alike(state_of(model), state_of(other))


@pytest.mark.parametrize(
    "case, replicas",
    [
        ("top-k", 3),
        ("parameters", 1),
        *(
            pytest.param(case, replicas, marks=pytest.mark.slow)
            for case, replicas in (
                *(("plain", 3), ("plain", 1), ("parameters", 3), ("top-k", 1)),
                *(("diloco-int8", 3), ("diloco-int8", 1)),
            )
        ),
    ],
)
def test_other_replicas_go_on(tmp_path, case, replicas):
    model = make_model(2, **CASES[case])
    train(model, 0, STEPS)
    files = Checkpoint(tmp_path)
    files.save(model, step=STEPS)
    files.wait()
    options = {} if replicas == 1 and case == "parameters" else CASES[case]
    other = make_model(replicas, **options)
    assert files.restore(other).step == STEPS
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    before, after = state_of(model), state_of(other)
    residuals = [name for name in before if name.endswith("/residual")]
    assert bool(residuals) == (case in ("top-k", "diloco-int8"))
    for name in residuals:
        # Parts of a sum over at most 3 replicas: each is rounded once.
        total = before[name].astype("float64").sum(axis=0)
        bound = 4 * np.finfo("float32").eps * np.abs(before[name]).sum(axis=0).max()
        assert np.abs(total).max() > 100 * bound
        np.testing.assert_allclose(
            after[name].astype("float64").sum(axis=0), total, rtol=0, atol=bound
        )
    train(other, STEPS, STEPS + 2)


def test_sums_of_metrics_go_to_other_replicas(tmp_path):
    model = make_model(2)
    train(model, 0, 3)
    files = Checkpoint(tmp_path)
    files.save(model, step=3)
    files.wait()
    for replicas in (3, 1, 0):
        other = make_model(replicas)
        train(other, 0, 1)
        files.restore(other)
        mine, theirs = model.get_metrics_result(), other.get_metrics_result()
        assert mine.keys() == theirs.keys() >= {"loss", "accuracy"}
        for name, value in mine.items():
            assert float(value) == pytest.approx(float(theirs[name]))


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_odd_count_goes_to_any_replicas(tmp_path, replicas):
    """TensorFlow's `assign` cuts a part of an integer off for each replica
    (`findings/a_counter_loses_one_when_it_is_assigned.sh`)."""

    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="rows")
            self.rows = self.add_weight(initializer="zeros", dtype="int64", name="rows")

        def update_state(self, y, predictions, sample_weight=None):
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "int64"))

        def result(self):
            return self.rows

    def counted(replicas, rows):
        with make_strategy(replicas).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Rows()])
        model.fit(np.ones((rows, 2)), np.ones((rows, 1)), batch_size=rows, verbose=0)
        (count,) = [v for v in model.metrics_variables if v.path.endswith("/rows")]
        return model, count

    files = Checkpoint(tmp_path)
    files.save(counted(2, rows=7)[0], step=1)
    files.wait()
    model, count = counted(replicas, rows=2)
    files.restore(model)
    assert int(count.value.read_value()) == 7


def test_weights_alone_go_to_plain_keras(tmp_path):
    model = make_model(2, shard="parameters")
    train(model, 0, 3)
    files = Checkpoint(tmp_path)
    files.save(model, step=3)
    files.wait()
    plain = make_model(0, optimizer=lambda: keras.optimizers.SGD(0.1))
    with pytest.raises(ConfigurationError, match="of another"):
        files.restore(plain)
    assert files.restore(plain, weights_only=True).step == 3
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_every_type_of_number(tmp_path):
    with make_strategy(2).scope():
        layer = keras.layers.Layer()
        for dtype in (
            "bfloat16",
            "float16",
            "float64",
            "int8",
            "uint8",
            "int64",
            "bool",
        ):
            layer.add_weight(
                shape=(2, 3), dtype=dtype, initializer="ones", trainable=False
            )
        layer.add_weight(shape=(), initializer="ones", trainable=False)
        layer.add_weight(shape=(0, 3), trainable=False)
        model = keras.Sequential([keras.Input((2,)), layer])
    model.compile()
    before = state_of(model)
    files = Checkpoint(tmp_path)
    files.save(model, step=0)
    files.wait()
    for variable in model.variables:
        variable.assign(keras.ops.zeros_like(variable))
    files.restore(model)
    after = state_of(model)
    assert_alike(before, after)
    assert {v.dtype for v in before.values()} == {v.dtype for v in after.values()}


def test_both_factors_of_lora_come_back(tmp_path):
    """Keras' own file holds their product, in the kernel, and two zeros, which get no
    gradients (`findings/lora_stops_learning_after_its_weights_are_loaded.sh`)."""

    def with_lora():
        with make_strategy(2).scope():
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
            model.layers[0].enable_lora(2)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = np.ones((8, 12), "float32"), np.ones((8, 5), "float32")
    model, files = with_lora(), Checkpoint(tmp_path)
    model.fit(x, y, verbose=0)
    files.save(model, step=1)
    files.wait()
    resumed = with_lora()
    files.restore(resumed)
    for each in (model, resumed):
        each.fit(x, y, verbose=0)
    for mine, theirs in zip(model.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.path)
        assert np.any(mine.numpy())


def test_a_checkpoint_of_another_model_names_its_folder_and_what_helps(tmp_path):
    def model(units, momentum=0.0):
        layers = [keras.Input((4,)), keras.layers.Dense(units)]
        made = keras.Sequential(layers)
        made.compile(keras.optimizers.SGD(0.1, momentum), "mse")
        return made

    files = Checkpoint(tmp_path)
    files.save(model(8), step=1)
    files.wait()
    match = rf"\(4, 8\): {tmp_path}\S* is of another model.* another directory\.$"
    for weights_only in (False, True):
        with pytest.raises(ConfigurationError, match=match):
            files.restore(model(16), weights_only=weights_only)
    match = rf"{tmp_path}\S* is of another .*or restore only the weights"
    with pytest.raises(ConfigurationError, match=match):
        files.restore(model(8, momentum=0.9))
    files.restore(model(8, momentum=0.9), weights_only=True)


@pytest.mark.parametrize("weights_only", [False, True])
def test_towers_in_another_order_are_refused(tmp_path, weights_only):
    """Keras gives each the weights of the other one
    (`findings/weights_are_loaded_by_order_not_by_name.sh`)."""

    def towers(*names):
        inputs = [keras.Input((2,)) for _ in names]
        layers = [keras.layers.Dense(2, name=name) for name in names]
        outputs = [layer(each) for layer, each in zip(layers, inputs, strict=True)]
        model = keras.Model(inputs, keras.layers.Dot(1)(outputs))
        model.compile("sgd", "mse")
        return model

    files = Checkpoint(tmp_path)
    files.save(towers("user", "item"), step=1)
    files.wait()
    with pytest.raises(ConfigurationError, match="'item/kernel' stands where 'user/"):
        files.restore(towers("item", "user"), weights_only=weights_only)
    # Names that are new are another matter, as are those that Keras numbers.
    for names in (("user", "item"), ("item", "goods"), (None, None)):
        files.restore(towers(*names), weights_only=weights_only)


@pytest.mark.parametrize(
    "units, dtype, words",
    [(2, "bfloat16", "is of bfloat16, and in the.*of float32"), (3, None, "the shape")],
)
def test_numbers_are_not_made_to_fit(tmp_path, units, dtype, words):
    """Orbax converts and takes them
    (`findings/orbax_takes_the_dtype_of_a_template_and_not_its_shape.sh`)."""

    def dense(units, dtype=None):
        layer = keras.layers.Dense(units, dtype=dtype)
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile("sgd", "mse")
        return model

    files = Checkpoint(tmp_path)
    files.save(dense(2), step=1)
    files.wait()
    with pytest.raises(ConfigurationError, match=words):
        files.restore(dense(units, dtype))


class TestFiles:
    @pytest.fixture
    def model(self):
        model = make_model(0)
        train(model, 0, 2)
        return model

    @pytest.fixture
    def saved(self, tmp_path, model):
        """The files, what they hold, and the folder of the only checkpoint."""
        files = Checkpoint(tmp_path)
        files.save(model, step=1, program={"number": 5})
        files.wait()
        (folder,) = folders_newest_first(tmp_path)
        return files, state_of(model), folder

    def test_an_unfinished_one_is_none(self, tmp_path, model):
        files = Checkpoint(tmp_path)
        assert files.restore(model, must_exist=False) is None
        files.save(model, step=4)
        files.wait()
        (folder,) = folders_newest_first(tmp_path)
        (folder / MANIFEST_NAME).unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert files.restore(model, must_exist=False) is None
        assert files.steps() == []

    def test_as_many_as_asked_are_kept(self, tmp_path, model):
        files = Checkpoint(tmp_path, keep=2)
        for step in (1, 5, 9):
            files.save(model, step=step)
        files.wait()
        assert files.steps() == [9, 5]
        assert len(list(tmp_path.iterdir())) == 2

    def test_the_one_before_a_damaged_one_is_taken(self, tmp_path, model):
        files = Checkpoint(tmp_path)
        files.save(model, step=1)
        before = state_of(model)
        train(model, 2, 3)
        files.save(model, step=2)
        files.wait()
        newest = folders_newest_first(tmp_path)[0]
        part = next(newest.glob("part-*"))
        data = bytearray(part.read_bytes())
        first_array = 8 + int.from_bytes(data[:8], "little")
        data[first_array + 5] ^= 1
        part.write_bytes(bytes(data))
        with pytest.warns(CheckpointWarning, match=r"have changed"):
            restored = files.restore(model)
        assert restored.step == 1 and len(restored.damaged) == 1
        assert_alike(before, state_of(model))

    def test_a_second_save_of_a_step_replaces_the_first(self, tmp_path, model):
        """As the end of a training does: `keep=2` keeps the step before, too."""
        files = Checkpoint(tmp_path, keep=2)
        for step in (1, 2, 3, 3, 3):
            files.save(model, step=step)
            files.wait()
        found = [folder.name.split("-")[1] for folder in folders_newest_first(tmp_path)]
        assert [int(step) for step in found] == [3, 2]

    def test_a_damaged_one_does_not_take_the_place_of_a_good_one(self, tmp_path, model):
        """Plan 49 of seed 20261124 ended with two damaged ones and no other."""

        def damage_newest():
            part = next(folders_newest_first(tmp_path)[0].glob("part-*"))
            part.write_bytes(part.read_bytes()[:100])

        files = Checkpoint(tmp_path, keep=2)
        for step in (1, 2):
            files.save(model, step=step)
            files.wait()
        damage_newest()
        again = Checkpoint(tmp_path, keep=2)
        with pytest.warns(CheckpointWarning, match="is damaged"):
            assert again.restore(model).step == 1
        again.save(model, step=3)
        again.wait()
        damage_newest()
        with pytest.warns(CheckpointWarning, match="is damaged"):
            assert Checkpoint(tmp_path, keep=2).restore(model).step == 1
        # Two good ones are enough, and the damaged one before them goes.
        for step in (4, 5):
            again.save(model, step=step)
            again.wait()
        assert again.steps()[:2] == [5, 4] and 2 not in again.steps()

    def test_when_none_can_be_used_it_says_so(self, tmp_path, model):
        files = Checkpoint(tmp_path)
        files.save(model, step=1)
        files.wait()
        (folder,) = folders_newest_first(tmp_path)
        (folder / MANIFEST_NAME).write_text("[" * 100_000)
        with pytest.warns(CheckpointWarning), pytest.raises(DataError, match="nested"):
            files.restore(model)

    def test_a_full_disk_leaves_the_one_before(self, tmp_path, model, monkeypatch):
        files = Checkpoint(tmp_path)
        files.save(model, step=1)
        files.wait()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("tfdp.checkpoint.writer.write_arrays", full)
            files.save(model, step=2)
            with pytest.raises(DataError, match="No space left"):
                files.wait()
        assert files.restore(model).step == 1
        files.save(model, step=3)
        files.wait()
        assert files.steps() == [3, 1]

    def test_behind_a_url(self, model):
        files = Checkpoint("ram://checkpoints/run", keep=1)
        for step in (1, 2):
            files.save(model, step=step)
        files.wait()
        before = state_of(model)
        train(model, 2, 3)
        assert files.restore(model).step == 2 and files.steps() == [2]
        assert_alike(before, state_of(model))

    @pytest.mark.parametrize("target", [MANIFEST_NAME, "part-0-of-1.safetensors"])
    @pytest.mark.parametrize(
        "count", [150, pytest.param(10_000, marks=pytest.mark.slow)]
    )
    def test_mutations_are_refused_or_change_nothing(self, model, saved, target, count):
        files, expected, folder = saved
        sound = (folder / target).read_bytes()
        refused = 0
        for number in range(count):
            chance = random.Random(number)
            (folder / target).write_bytes(chance.choice(BYTES)(chance, sound))
            for variable in model.variables:
                variable.assign(keras.ops.zeros_like(variable))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    restored = files.restore(model)
            except DataError:
                refused += 1
                continue
            assert restored is not None and restored.step == 1, number
            assert restored.program == {"number": 5}
            assert_alike(expected, state_of(model))
        assert refused > 0.9 * count

    @pytest.mark.parametrize(
        "count", [150, pytest.param(10_000, marks=pytest.mark.slow)]
    )
    def test_forged_manifests_end_in_typed_errors(self, model, saved, count):
        files, expected, folder = saved
        sound = (folder / MANIFEST_NAME).read_bytes()
        for number in range(count):
            edited = edit_json(random.Random(number), sound)
            try:
                forged = json.loads(edited)
                forged.pop("checksum", None)
                text = with_checksum(forged)
            except (ValueError, RecursionError):
                text = edited.decode()
            (folder / MANIFEST_NAME).write_text(text)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    files.restore(model)
            except TfdpError:
                continue
            # Names, steps and the program are the forger's; numbers are not.
            assert_alike(expected, state_of(model))

    def test_a_part_of_another_call_is_refused(self, tmp_path, model):
        files = Checkpoint(tmp_path)
        files.save(model, step=1)
        files.save(model, step=2)
        files.wait()
        newest, before = folders_newest_first(tmp_path)
        name = "part-0-of-1.safetensors"
        (newest / name).write_bytes((before / name).read_bytes())
        with pytest.warns(CheckpointWarning, match="write"):
            assert files.restore(model).step == 1


def save_more(**more):
    Checkpoint("x").save(make_model(0), step=1, **more)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: Checkpoint(""), "path or a URL"),
        (lambda: Checkpoint("x", keep=0), "keep"),
        (lambda: Checkpoint("no://bucket"), "cannot open"),
        (lambda: tfdp.callbacks.Checkpoint("x", every_steps=0), "every_steps"),
        (lambda: tfdp.callbacks.Checkpoint("x", every_epochs=True), "every_epochs"),
        (lambda: tfdp.callbacks.Checkpoint("x", every_seconds=-1), "every_seconds"),
        (lambda: tfdp.callbacks.Checkpoint("x", on_signal=1), "on_signal"),
        (lambda: Checkpoint("x").save(keras.Model(), step=1), "built"),
        (lambda: Checkpoint("x").restore("model"), "built"),
        (lambda: save_more(program={"x": object()}), "JSON values only"),
        (lambda: save_more(program=[1]), "program must be None or a dict"),
        (lambda: save_more(arrays=[np.ones(2)]), "arrays must be None or a dict"),
    ],
)
def test_what_cannot_be_is_refused(make, match):
    with pytest.raises(ConfigurationError, match=match):
        make()


def test_a_manifest_holds_a_checksum_of_itself(tmp_path):
    model = make_model(0)
    files = Checkpoint(tmp_path)
    files.save(model, step=1)
    files.wait()
    (folder,) = folders_newest_first(tmp_path)
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_text())
    content["step"] = 2
    path.write_text(json.dumps(content))
    with pytest.warns(CheckpointWarning), pytest.raises(DataError, match="checksum"):
        Checkpoint(tmp_path).restore(model)
