"""A strategy is refused where Keras computes with something else than TensorFlow."""

import warnings

import keras
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import ConfigurationError, UncheckedVersionWarning
from tfdp.seams.table import CHECKED_VERSIONS
from tfdp.strategies.startup_checks import warn_of_other_versions

STRATEGIES = {
    "one host": lambda: tfdp.DataParallelStrategy(["CPU:0"]),
    "hosts": lambda: tfdp.MultiHostDataParallelStrategy(tfdp.Cluster(1, 0, None)),
    "TPU": tfdp.TPUDataParallelStrategy,
    "auto": tfdp.auto_strategy,
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_keras_own_configuration_counts(make, monkeypatch):
    """Nobody has set the variable: ~/.keras/keras.json says so."""
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(ConfigurationError, match=r"'jax', by ~/.keras/keras.json"):
        make()


def test_what_is_set_after_keras_was_loaded_is_nothing(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert STRATEGIES["one host"]().num_replicas_in_sync == 1


@pytest.fixture
def nothing_said_yet():
    warn_of_other_versions.cache_clear()
    yield
    warn_of_other_versions.cache_clear()


@pytest.mark.parametrize("package, module", [("tensorflow", tf), ("keras", keras)])
def test_another_minor_version_is_told_once(
    package, module, monkeypatch, nothing_said_yet
):
    monkeypatch.setattr(module, "__version__", "9.8.7")
    with pytest.warns(UncheckedVersionWarning, match=f"{package} .* this is 9.8.7"):
        STRATEGIES["one host"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STRATEGIES["one host"]()


def test_a_patch_of_the_checked_version_is_no_other(monkeypatch, nothing_said_yet):
    monkeypatch.setattr(tf, "__version__", CHECKED_VERSIONS["tensorflow"] + "9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STRATEGIES["one host"]()
