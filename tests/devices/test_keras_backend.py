"""A strategy is refused where Keras computes with something else than TensorFlow."""

import keras
import pytest

import tfdp
from tfdp.errors import ConfigurationError

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
