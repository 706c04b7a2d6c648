"""The table of `tfdp plan --layout`: which weights a rule meets, cuts and costs."""

import keras
import pytest

import tfdp
from tests.support.grids import blocks_of, layout_of
from tfdp.tools.planning.layouts import layout_table

layers = keras.layers
ATTENTION = ".*attention/(query|key|value)/kernel"


def model_of():
    inputs = keras.Input((4, 16))
    x = layers.GroupQueryAttention(8, 4, 1, name="attention")(inputs, inputs)
    x = layers.Dense(32, name="up")(x)
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(6, name="head")(x))


def table_of(rules, shape=(1, 4), refused=None):
    return layout_table("train.py", model_of(), layout_of(shape, rules), refused or {})


FAULTS = [
    ({"up/kernl": (None, "model")}, "'up/kernl' meets no weight"),
    ({"up/bias": (None, "model")}, "it has 2 axes, and the weight 1 dimensions: up/b"),
    ({"up/kernel": ("model",)}, "it has 1 axes, and the weight 2 dimensions: up/kern"),
    ({"up/kernel": ("model", "model")}, "gives one axis to two dimensions: up/kernel"),
    ({"head/bias": ("model",)}, "6 of dimension 0 cannot be cut into 4: head/bias (6)"),
    ({"up/.*": ("model",), "up/bia.": ("model",)}, "'up/.*' and 'up/bia.': both meet"),
    ({ATTENTION: (None, "model", None)}, "1 heads of dimension 1 cannot be cut into 4"),
]


@pytest.mark.parametrize("rules,words", FAULTS)
def test_a_fault_of_a_rule_is_a_sentence(rules, words):
    table = table_of(rules)
    assert not table.fits
    assert any(words in flaw for flaw in table.flaws), table.flaws


def test_a_rule_that_keras_refused_is_a_fault():
    [flaw] = table_of({}, refused={".*up": "Invalid axis names"}).flaws
    assert flaw == "The rule '.*up': Invalid axis names."


def test_rules_without_a_fault_have_none():
    """A rule of a layer's output meets no weight; `norm` has weights not trained."""
    rules = {"up/kernel": (None, "model"), "norm/.*": ("model",)}
    table = table_of({**rules, "up/output": ("data", None, "model")})
    assert table.fits and table.flaws == ()
    rows = {row.path: row for row in table.rows}
    assert rows["norm/gamma"].rests_as == (8,)
    assert rows["norm/moving_mean"].computes_as == "whole"
    assert rows["norm/moving_mean"].exchanges == "-"


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_the_table_says_what_a_strategy_stores(shape):
    rules = {
        "up/kernel": ("data", "model"),
        "up/bias": ("model",),
        ".*attention/query/kernel": (None, "model", None),
        "head/kernel": ("model", None),
    }
    layout = layout_of(shape, rules)
    with tfdp.DataParallelStrategy(layout=layout).scope():
        model = model_of()
    table = layout_table("train.py", model, layout, {})
    stored = {weight.path: blocks_of(weight)[0] for weight in model.weights}
    assert {row.path: row.rests_as for row in table.rows} == {
        path: block.shape for path, block in stored.items()
    }
    assert table.sums["device"] == sum(block.nbytes for block in stored.values())
    assert table.sums["model"] == 4 * model.count_params()


def test_exchanges_are_those_of_the_parts():
    rules = {"up/kernel": (None, "model"), "head/kernel": ("data", "model")}
    rows = {row.path: row for row in table_of(rules, (2, 2)).rows}
    assert rows["up/kernel"].exchanges == "2 of rows each way, 1 all-reduce"
    assert rows["head/kernel"].exchanges == "2 of rows each way"
    [gathered] = [
        row
        for row in table_of({"head/kernel": ("data", None)}, (2, 2)).rows
        if row.path == "head/kernel"
    ]
    assert gathered.exchanges == "1 all-gather, 1 reduce-scatter, 1 all-reduce"
    assert rows["up/bias"].exchanges == "1 all-reduce"


def test_weights_that_differ_in_their_paths_only_are_one_line(capsys):
    inputs = keras.Input((8,))
    x = inputs
    for number in range(3):
        x = layers.Dense(8, name=f"dense_{number}")(x)
    model = keras.Model(inputs, x)
    layout = layout_of((2, 2), {"dense_./kernel": ("data", None)})
    layout_table("train.py", model, layout, {}).print()
    said = capsys.readouterr().out
    assert "dense_0/kernel and 2 more" in said
    # Three kernels of 8 x 4, and three biases of 8, of 4 bytes.
    assert "weights: 480 B per device, 1.92 kB on all 4 (data=2 x model=2)" in said
    assert "the model has 864 B" in said
    assert "not in parts: dense_0/kernel and 2 more: only 'data'" in said
