"""`obey_keras_distribution`: a script of `keras.distribution` trains on TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.first_fit import note_layout, running_stand_in
from tfdp.cluster import find_cluster, find_tpu
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.grid.layouts import devices_of_mesh
from tfdp.plan.communication import Communication, as_on_jax
from tfdp.seams.replace import around, instead, note_on, replace_function
from tfdp.seams.table import DISTRIBUTION
from tfdp.strategies.auto import auto_strategy
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.devices import devices_of_job
from tfdp.strategies.keras_backend import check_keras_backend

STRATEGY_NOTE = "_tfdp_strategy"
NUM_PROCESSES = "KERAS_DISTRIBUTION_NUM_PROCESSES"


def obey_keras_distribution() -> None:
    """Lets `keras.distribution` choose the strategy: call it before anything else.

    A script of Keras' JAX backend then trains as it is, with JAX's numbers, also where
    words repeat (`repeated_rows="sum"`). `set_distribution`, and `scope()` of a
    distribution, make the strategy of `auto_strategy` and enter its scope. Devices are
    those of all workers; `initialize` and layouts of outputs have no effect.

    Raises:
      ConfigurationError: if Keras' backend is not TensorFlow.
      ScopeError: within a strategy's scope, or after `set_distribution`.

    ```python
    import tfdp

    tfdp.obey_keras_distribution()

    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    ```
    """
    check_keras_backend()
    if (stand_in := running_stand_in()) is not None:
        note_keras_distribution(stand_in.num_replicas_in_sync)
    if hasattr(keras.distribution.set_distribution, "replaced_by_tfdp"):
        return
    if tf.distribute.has_strategy() or keras.distribution.distribution() is not None:
        raise ScopeError(
            "tfdp.obey_keras_distribution() came after a strategy's scope was entered, "
            "or set_distribution called. Make it the first line of the program."
        )
    _replace(_enter, devices_of_job)


def note_keras_distribution(replicas: int) -> None:
    """Lets a command note what `set_distribution` is given; no strategy is entered."""

    def note(original: Callable[[Any], None], value: Any) -> None:
        original(value)
        note_layout(value)

    _replace(note, lambda kind: [f"{kind or 'cpu'}:{i}" for i in range(replicas)])


def _replace(set_distribution: Any, devices: Any) -> None:
    def list_devices(device_type: str | None = None) -> list[str]:
        return devices(device_type)

    def get_device_count(device_type: str | None = None) -> int:
        return len(devices(device_type))

    def distribute_tensor(tensor: Any, layout: Any) -> Any:
        return tensor

    replace_function(DISTRIBUTION, "set_distribution", around(set_distribution))
    replace_function(DISTRIBUTION, "list_devices", instead(list_devices))
    replace_function(DISTRIBUTION, "get_device_count", instead(get_device_count))
    replace_function(DISTRIBUTION, "initialize", instead(_initialize))
    replace_function(DISTRIBUTION, "distribute_tensor", instead(distribute_tensor))


def _enter(original: Callable[[Any], None], value: Any) -> None:
    before = keras.distribution.distribution()
    original(value)
    try:
        strategy = None if value is None else _strategy_of(value)
        tf.distribute.experimental_set_strategy(strategy)
    except BaseException:
        original(before)
        raise


def _strategy_of(value: Any) -> Any:
    """The strategy of a distribution: made once, as its models belong to it."""
    if not value.auto_shard_dataset:
        raise ConfigurationError(
            "auto_shard_dataset=False: fit takes global batches on every worker. For a "
            "dataset of a worker's own rows give fit what tf.distribute.get_strategy()."
            "distribute_datasets_from_function returns, and leave this argument out."
        )
    if not hasattr(value, STRATEGY_NOTE):
        # As on JAX, which has no lists of rows; nor has a TPU.
        sums = None if find_tpu() else as_on_jax(Communication())
        if isinstance(value, keras.distribution.ModelParallel):
            strategy = auto_strategy(layout=value, communication=sums)
        elif (names := devices_of_mesh(value)) in (None, devices_of_job(None)):
            strategy = auto_strategy(communication=sums)
        else:
            strategy = DataParallelStrategy(names, communication=sums)
        note_on(value, STRATEGY_NOTE, strategy)
    return getattr(value, STRATEGY_NOTE)


def _initialize(job_addresses=None, num_processes=None, process_id=None):
    given = int(num_processes or os.environ.get(NUM_PROCESSES) or 1)
    cluster = find_cluster()
    if given not in (1, 1 if cluster is None else cluster.workers):
        raise ConfigurationError(
            f"keras.distribution.initialize is for {given} processes, and a launcher "
            "has started another number: each would train a model of its own. Start "
            f"them with tfdp launch --workers {given} (docs/hosts.md)."
        )
