"""Files of tfdp that a strategy loads, in a process of its own: what is used, no more.

Each file costs time at every start, and a reader has to ask what it is there for.
"""

import pytest

from tests.support.fresh_python import run_program

# These numbers may only become smaller.
MOST_FILES = {
    "tfdp.DataParallelStrategy(tfdp.use_virtual_devices(2))": 109,
    "tfdp.auto_strategy(cpu_devices=2)": 111,
}
# Rooms of features, with the files of them that each sum of gradients needs.
FEATURES = ("chain", "sharding", "compression", "hosts", "sync", "callbacks")
FEATURES += ("checkpoint", "optimizers", "layers", "tools")
OF_EACH_SUM = {"tfdp.chain", "tfdp.chain.reduction", "tfdp.chain.stages"}

FIT = """
import keras, numpy as np
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
"""


def room_of(name):
    return name.partition(".")[2].partition(".")[0]


def loaded_by(making, then=""):
    done = run_program(
        f"import sys, tfdp\ntfdp.quiet()\nstrategy = {making}\n{then}\n"
        "names = [n for n in sys.modules if n.partition('.')[0] == 'tfdp']\n"
        "print(*names)"
    )
    assert done.returncode == 0, done.stderr
    # It takes back what Keras 3.16 changed, and is loaded with that version only.
    return set(done.stdout.split()) - {"tfdp._private.newer_keras"}


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("making", MOST_FILES)
def test_a_strategy_loads_no_more_files(making):
    loaded = loaded_by(making)
    assert len(loaded) <= MOST_FILES[making], sorted(loaded)


@pytest.mark.worth_seconds(12)
def test_a_plain_fit_loads_no_feature():
    loaded = loaded_by("tfdp.auto_strategy(cpu_devices=2)", FIT)
    of_features = {name for name in loaded if room_of(name) in FEATURES}
    assert "tfdp.step.call" in loaded
    assert of_features == OF_EACH_SUM
