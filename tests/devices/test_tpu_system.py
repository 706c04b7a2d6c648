"""A TPU is connected to once; what fails is explained, as is each useless option."""

import types

import pytest
import tensorflow as tf

import tfdp
import tfdp.strategies.tpu
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.errors import ConfigurationError, DeviceError, TPUError


def test_this_machine_without_a_tpu_is_explained():
    """Nothing is simulated here: it is what a CPU build of TensorFlow really does."""
    with pytest.raises(TPUError, match="without TPU support") as caught:
        tfdp.TPUDataParallelStrategy()
    assert isinstance(caught.value, DeviceError)
    assert "tensorflow-cpu" in str(caught.value)
    assert isinstance(caught.value.__cause__, tf.errors.NotFoundError)


def test_auto_strategy_does_not_hide_a_tpu_that_fails(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    with pytest.raises(TPUError, match="TPU_ACCELERATOR_TYPE=v5litepod-1"):
        tfdp.auto_strategy()
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    assert isinstance(tfdp.auto_strategy(), tfdp.DataParallelStrategy)


def test_auto_strategy_passes_address_and_options(monkeypatch):
    seen = []
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    monkeypatch.setattr(
        "tfdp.strategies.tpu.TPUDataParallelStrategy",
        lambda tpu, **options: seen.append((tpu, options)) or StandInStrategy(2),
    )
    tfdp.auto_strategy(wire_dtype="bfloat16")
    options = {"wire_dtype": "bfloat16", "communication": tfdp.Communication()}
    assert seen == [("my-tpu", options)]


@pytest.fixture
def system(monkeypatch):
    """A TPU runtime that notes what it is asked for, and fails when told to."""
    state = types.SimpleNamespace(started=[], connected=[], error=None)

    def start(resolver):
        if state.error is not None:
            raise state.error
        state.started.append(resolver)

    class Resolver:
        def __init__(self, tpu):
            self.tpu = tpu

        def master(self):
            return "" if self.tpu == "local" else self.tpu

    monkeypatch.setattr(tfdp.strategies.tpu, "_CONNECTED", {})
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", Resolver)
    monkeypatch.setattr(
        tf.config, "experimental_connect_to_cluster", state.connected.append
    )
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", start)
    return state


def test_a_tpu_is_started_once(system):
    first = tfdp.strategies.tpu.connect("local")
    assert tfdp.strategies.tpu.connect("local") is first
    assert system.started == system.connected == [first]
    other = tfdp.strategies.tpu.connect("grpc://10.0.0.2:8470")
    assert system.started == [first, other]
    # A resolver of one's own for the same TPU starts nothing again.
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    assert tfdp.strategies.tpu.connect(resolver) is first


def test_after_a_failure_it_can_be_tried_again(system):
    system.error = tf.errors.UnavailableError(None, None, "failed to connect")
    with pytest.raises(TPUError, match="does not answer"):
        tfdp.strategies.tpu.connect("local")
    system.error = None
    assert tfdp.strategies.tpu.connect("local") in system.started


@pytest.mark.parametrize("tpu", [None, 3, "", ["local"]])
def test_an_address_of_another_kind_is_refused(tpu):
    with pytest.raises(ConfigurationError, match="tpu must be"):
        tfdp.TPUDataParallelStrategy(tpu)


@pytest.mark.parametrize(
    "setting, reason",
    [
        ({"bucket_bytes": 100}, "combiner"),
        ({"first_bucket_bytes": 100}, "as soon as"),
        ({"hierarchy": (2, 2)}, "links between the cores"),
        ({"engine": "mpi"}, "op of the program"),
        ({"timeout_seconds": 1.0}, "lockstep"),
        ({"silence_seconds": 3.0}, "lockstep"),
    ],
)
def test_settings_without_a_meaning_are_refused(setting, reason):
    with pytest.raises(ConfigurationError, match=reason):
        tfdp.TPUDataParallelStrategy(communication=tfdp.Communication(**setting))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"shard": "gradients"}, "on a TPU: stages 2 and 3.*'none', 'optimizer'"),
        ({"shard_min_bytes": -1}, "shard_min_bytes"),
        ({"wire_dtype": "int8"}, "wire_dtype"),
        ({"pad_batches": 0}, "pad_batches"),
        ({"pad_batches": "yes"}, "pad_batches"),
        ({"communication": "fast"}, "tfdp.Communication"),
    ],
)
def test_bad_options_are_refused_before_anything_is_connected(options, message):
    with pytest.raises(ConfigurationError, match=message):
        tfdp.TPUDataParallelStrategy(**options)
