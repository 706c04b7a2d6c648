"""What decays and what adapts: the two lists, their default, and Keras' method."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp._private.optimizer_hooks import decays
from tfdp.errors import ConfigurationError
from tfdp.optimizers import LAMB, LARS
from tfdp.plan.exclusions import BIASES_AND_NORM_SCALES, is_excluded

FORMS = {
    "lars": LARS,
    "lamb": LAMB,
    "lamb-keras": lambda **kw: LAMB(form="keras", **kw),
}


def make_model():
    image = keras.Input((6, 6, 3))
    x = keras.layers.Conv2D(4, 3, name="scale")(image)
    x = keras.layers.BatchNormalization(name="bn")(x)
    x = keras.layers.GroupNormalization(2, name="gn")(x)
    x = keras.layers.LSTM(3, name="lstm")(keras.layers.Reshape((16, 4))(x))
    x = keras.layers.RMSNormalization(name="rms")(x)
    return keras.Model(image, keras.layers.Dense(2, name="head")(x))


def excluded_paths(optimizer):
    """(paths that do not decay, paths that do not adapt) on the model above."""
    variables = make_model().trainable_variables
    optimizer.build(variables)
    return (
        {v.path for v in variables if not optimizer.decay_of(v)},
        {v.path for v in variables if not optimizer.adapts(v)},
    )


BIASES_AND_NORMS = {
    "scale/bias",
    "bn/gamma",
    "bn/beta",
    "gn/gamma",
    "gn/beta",
    "lstm/lstm_cell/bias",
    "rms/scale",
    "head/bias",
}


@pytest.mark.parametrize("make", [LARS, LAMB, lambda **kw: LAMB(form="nvlamb", **kw)])
def test_none_excludes_biases_and_norm_scales(make):
    assert excluded_paths(make(weight_decay=0.1)) == (
        BIASES_AND_NORMS,
        BIASES_AND_NORMS,
    )


def test_none_excludes_nothing_in_the_form_keras():
    assert excluded_paths(LAMB(form="keras", weight_decay=0.1)) == (set(), set())


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_list_excludes_nothing(form):
    optimizer = FORMS[form](
        weight_decay=0.1, exclude_from_weight_decay=[], exclude_from_layer_adaptation=[]
    )
    assert excluded_paths(optimizer) == (set(), set())


@pytest.mark.parametrize("form", FORMS)
def test_the_two_lists_are_independent(form):
    optimizer = FORMS[form](
        weight_decay=0.1,
        exclude_from_weight_decay=["^head/", "lstm_cell/recurrent"],
        exclude_from_layer_adaptation=("gamma$",),
    )
    decay = {"head/kernel", "head/bias", "lstm/lstm_cell/recurrent_kernel"}
    assert excluded_paths(optimizer) == (decay, {"bn/gamma", "gn/gamma"})


def test_one_list_leaves_the_default_of_the_other():
    optimizer = LARS(weight_decay=0.1, exclude_from_weight_decay=["head"])
    assert excluded_paths(optimizer) == ({"head/kernel", "head/bias"}, BIASES_AND_NORMS)


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        ("bias", True),
        ("a/b/bias", True),
        ("norm/gamma", True),
        ("norm/beta", True),
        ("norm/scale", True),
        ("bias/kernel", False),
        ("scale/kernel", False),
        ("bert/embeddings", False),
        ("attention/relative_attention_bias", False),
        ("alphabeta", False),
    ],
)
def test_the_default_looks_at_the_last_part_of_the_path(path, excluded):
    assert is_excluded(path, BIASES_AND_NORM_SCALES) is excluded


@pytest.mark.parametrize("form", FORMS)
def test_the_method_of_keras_adds_to_the_list(form):
    model = make_model()
    optimizer = FORMS[form](weight_decay=0.1, exclude_from_weight_decay=["^bn/"])
    optimizer.exclude_from_weight_decay(
        var_list=[model.get_layer("head").kernel], var_names=["recurrent"]
    )
    optimizer.build(model.trainable_variables)
    undecayed = {v.path for v in model.trainable_variables if not optimizer.decay_of(v)}
    assert undecayed == {
        "bn/gamma",
        "bn/beta",
        "head/kernel",
        "lstm/lstm_cell/recurrent_kernel",
    }


def test_the_method_is_refused_after_build():
    optimizer = LARS(weight_decay=0.1)
    optimizer.build(make_model().trainable_variables)
    with pytest.raises(ConfigurationError, match="before the optimizer is built"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_excluded_does_not_decay(form):
    """With a gradient of zero only decay can move a weight."""
    variables = [keras.Variable([3.0, 4.0], name=name) for name in ("kernel", "other")]
    optimizer = FORMS[form](weight_decay=0.1, exclude_from_weight_decay=["other"])
    optimizer.apply([tf.zeros(2), tf.zeros(2)], variables)
    assert np.all(variables[0].numpy() < [3.0, 4.0])
    np.testing.assert_array_equal(variables[1].numpy(), [3.0, 4.0])


def test_a_list_that_matches_nothing_warns():
    optimizer = LARS(weight_decay=0.1, exclude_from_weight_decay=["LayerNorm", "Bias"])
    with pytest.warns(UserWarning, match="matches no variable.*head/bias"):
        optimizer.build(make_model().trainable_variables)


def test_lists_that_match_and_defaults_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LARS(exclude_from_weight_decay=["bias", "no_such_name"]).build(
            make_model().trainable_variables
        )
        LARS().build([keras.Variable([1.0], name="kernel")])
        LARS(exclude_from_layer_adaptation=[]).build(make_model().trainable_variables)


def test_plain_tensorflow_variables_are_matched_by_name():
    variables = [tf.Variable([3.0, 4.0], name=name) for name in ("kernel", "bias")]
    optimizer = LARS(weight_decay=0.1)
    optimizer.build(variables)
    assert [optimizer.decay_of(v) for v in variables] == [0.1, 0.0]


@pytest.mark.parametrize("make", [keras.optimizers.AdamW, keras.optimizers.Muon])
def test_whether_a_variable_decays_is_known_before_build(make):
    """Keras 3.16 itself decides in `build`, for the variables that it gets there."""
    kernel, bias = (keras.Variable([1.0], name=name) for name in ("kernel", "bias"))
    optimizer = make(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    for built_with in ([], [kernel]):
        if built_with:
            optimizer.build(built_with)
        assert decays(optimizer, kernel) and not decays(optimizer, bias)
