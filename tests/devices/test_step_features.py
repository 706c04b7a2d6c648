"""The list of a step's features: its moments, its order, and `tfdp info --step`."""

import json

import keras
import numpy as np
import pytest

from tests.support.fresh_python import run_program
from tests.support.parity import make_strategy
from tfdp.chain.reduction import Stage
from tfdp.errors import ConfigurationError
from tfdp.seams.replace import Override, around
from tfdp.step import features
from tfdp.step.features import Feature
from tfdp.tools.commands.step_features import print_features


class Noted(Feature, Stage):
    """A feature that is its own stage, and notes when it is called."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def note(self, moment):
        self.notes.append((self.name, moment))

    def begin(self, call):
        self.note("begin")

    def overrides(self, call):
        def compute_loss(original, *args, **kwargs):
            self.note("compute_loss")
            return original(*args, **kwargs)

        yield Override(call.model, "compute_loss", around(compute_loss))

    def stages(self, reduction):
        yield self

    def before(self, reduction):
        self.note("before")

    def after(self, reduction):
        self.note("after")

    def finish(self, call):
        assert call.step.has_updated
        self.note("finish")


def test_features_act_at_each_moment_in_the_order_of_the_list(monkeypatch):
    notes = []
    own = [Noted("first", notes), Noted("last", notes)]
    known = features.FEATURES
    monkeypatch.setattr(features, "FEATURES", [own[0], *known, own[1]])
    strategy = make_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    assert "compute_loss" not in vars(model)
    first, last = "first", "last"
    assert notes[:2] == [(first, "begin"), (last, "begin")]
    assert notes[-2:] == [(first, "finish"), (last, "finish")]
    of_replica = [
        # Of two overrides the later runs first; of two stages the earlier is outside.
        *((last, "compute_loss"), (first, "compute_loss")),
        *((first, "before"), (last, "before"), (last, "after"), (first, "after")),
    ]
    assert sorted(notes[2:-2]) == sorted(of_replica * 2)
    order = [note for note in notes if note[1] in ("before", "after")]
    assert order.index((first, "before")) < order.index((last, "before"))
    assert order.index((last, "after")) < order.index((first, "after"))


SCRIPT = """
import sys
import keras
import numpy as np
import tfdp

strategy = tfdp.DataParallelStrategy(shard=sys.argv[1])
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
    )
    model.compile("adam", "mse", metrics=["mae"])
assert model.evaluate(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
try:
    guard = tfdp.callbacks.NaNGuard()
    model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0, callbacks=[guard])
finally:
    print("saved")
"""


def info(tmp_path, source, *words, **options):
    script = tmp_path / "train.py"
    script.write_text(source, "utf-8")
    given = ["info", "--step", str(script), "--virtual-devices", "2", *words]
    return run_program(
        f"from tfdp.tools.commands.cli import leave, main\nleave(main({given!r}))",
        **options,
    )


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_info_shows_what_each_feature_does_in_a_script(tmp_path, shard):
    done = info(tmp_path, SCRIPT, "--json", "--", shard)
    assert done.returncode == 0, done.stderr
    found = {one["feature"]: one for one in json.loads(done.stdout)}
    assert list(found) == [type(one).__name__ for one in features.FEATURES]
    assert "apply of Adam adam" in found["Optimizers"]["overrides"]
    assert "result of MeanAbsoluteError mae" in found["Reports"]["overrides"]
    assert found["LayerState"]["stages"] == ["Buffers"]
    assert found["Callbacks"]["stages"] == ["FiniteGuard"]
    assert found["Callbacks"]["begin"] == ["wraps the step"]
    shards = [] if shard == "none" else ["Shards"]
    assert found["ShardsOfSums"]["stages"] == shards
    assert not found["Padding"]["overrides"]
    assert "saved" not in done.stderr  # the script was left in its first step


LEAVES = "import sys\nsys.exit(0)"
FAILS_FIRST = """
import keras
import numpy as np
import tfdp

class Failing(keras.Sequential):
    def train_step(self, data):
        raise ValueError("bad")

def fit(kind, name):
    with tfdp.DataParallelStrategy().scope():
        model = kind([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(name=name), "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)

try:
    fit(Failing, "failing")
except ValueError:
    pass
fit(keras.Sequential, "training")
"""


@pytest.mark.worth_seconds(15)
def test_info_shows_a_step_that_ended_only(tmp_path):
    # Without a buffer nothing would be lost when the process ends at once.
    done = info(tmp_path, FAILS_FIRST, "--json", environment={"PYTHONUNBUFFERED": ""})
    assert done.returncode == 0, done.stderr
    found = {one["feature"]: one for one in json.loads(done.stdout)}
    assert "apply of SGD training" in found["Optimizers"]["overrides"]


@pytest.mark.worth_seconds(15)
def test_info_names_a_script_that_leaves(tmp_path):
    done = info(tmp_path, LEAVES)
    assert done.returncode == 1
    assert "ended itself before its first training step, with exit" in done.stderr


@pytest.mark.worth_seconds(15)
def test_info_says_why_there_is_no_step_to_show(tmp_path):
    done = info(tmp_path, "print('nothing is trained')")
    assert done.returncode == 1
    assert "nothing is trained" in done.stderr
    assert "ended without a training step in a graph of a tfdp strategy" in done.stderr
    assert "Train in the scope of one" in done.stderr


def test_a_script_that_is_not_there_gets_the_nearest_name(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigurationError, match=r"trian.py' for --step.*train.py\?"):
        print_features(str(tmp_path / "trian.py"), [], as_json=False)
