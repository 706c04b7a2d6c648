"""`TPUDataParallelStrategy`: trains on the cores of a TPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.tpu_names import TPUExtended, TPUMirroredVariable, pack_variables
from tfdp.cluster.tpu import explain_tpu_failure, find_tpu
from tfdp.errors import ConfigurationError, TPUError
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.tpu import CrossReplica
from tfdp.plan.communication import Communication, checked_communication
from tfdp.plan.options import TPU, Given, options_of, refuse_options
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.sharding.tpu_variables import TPUShardUpdates
from tfdp.strategies.keras_backend import check_keras_backend
from tfdp.strategies.replica_extended import ReplicaExtended
from tfdp.strategies.replica_strategy import ReplicaContextStrategy
from tfdp.strategies.startup_checks import check_versions
from tfdp.strategies.unused import note_made
from tfdp.tracing.step import Step
from tfdp.variables.global_seed import with_global_seed
from tfdp.variables.tpu import TPUOwnSumVariable, TPUReplicaVariable, TPUSeedVariable


class TPUDataParallelStrategy(ReplicaContextStrategy, tf.distribute.TPUStrategy):
    """Trains one model on all cores of a TPU, each on its part of the batch.

    With N cores and per-core mean losses L_r, one step computes

        g = (1 / N) sum_r grad L_r(w),    w <- update(w, g)

    identically on every core, with the code of `DataParallelStrategy`. To Keras and
    TensorFlow it is a `tf.distribute.TPUStrategy`; XLA's cross-replica sum adds the
    gradients, within the one program that all cores run. Not run on a TPU yet: none was
    available. See docs/tpu.md for what was tested.

    Args:
      tpu: "local" for the cores of this machine (a TPU VM, Colab), the name of a TPU,
        `grpc://host:port`, or a `TPUClusterResolver`. Initialized once.
      communication: None, or the defaults; other options are refused.
      shard: "optimizer" (1): each core holds, and updates, 1 / N of the optimizer's
        state, as in ZeRO stage 1. "none" (0): all of it. See docs/sharding.md.
      shard_min_bytes: see `auto_strategy`.
      draws_per_replica: see `auto_strategy`.
      pad_batches: see `auto_strategy`.
      wire_dtype: see `auto_strategy`.

    Raises:
      ConfigurationError: for a bad argument, or if Keras' backend is not TensorFlow.
      TPUError: if the TPU cannot be used, with the reason and what to do.

    Cost: per step and core 2 n (N - 1) / N bytes for n bytes of gradients.

    Example, on a TPU VM:

        strategy = tfdp.TPUDataParallelStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse", steps_per_execution=50)
    """

    compiles_steps = True

    def __init__(
        self,
        tpu: Any = "local",
        *,
        communication: Communication | None = None,
        shard: str | int | Sharding = "none",
        shard_min_bytes: int = 32 * 1024,
        draws_per_replica: bool = True,
        pad_batches: bool | int | None = None,
        wire_dtype: str | None = None,
    ):
        check_keras_backend()
        check_versions()
        communication = checked_communication(communication)
        sharding = sharding_of(shard, min_bytes=shard_min_bytes)
        others = {
            "draws_per_replica": draws_per_replica,
            "pad_batches": pad_batches,
            "wire_dtype": wire_dtype,
        }
        self.given = Given(TPU, 1, options_of(communication, sharding, **others))
        refuse_options(self.given)
        self.pad_batches = True if pad_batches is None else pad_batches
        extended = self._make_extended(tpu)
        # TPUStrategy's own constructor would make a stock extended.
        tf.distribute.Strategy.__init__(self, extended)
        note_made(self, self.is_chief)

    def _make_extended(self, tpu: Any) -> TPUDataParallelExtended:
        wire_dtype = self.given["wire_dtype"]
        make_transport = functools.partial(CrossReplica, wire_dtype=wire_dtype)
        return TPUDataParallelExtended(self, connect(tpu), make_transport)

    def _run_as_one_device(self, step: Callable, args: Any, kwargs: Any) -> Any:
        from tfdp.step.as_one_device import refusal

        raise refusal(type(self).__name__)


class TPUDataParallelExtended(ReplicaExtended, TPUExtended):
    """`TPUExtended` that reduces and updates in replica context.

    All replicas share one function, in which the rank is a tensor. `make_transport`:
    returns the transport of N replicas, given N.
    """

    replica_classes = TPUReplicaVariable, TPUOwnSumVariable, TPUSeedVariable
    stock_class = TPUMirroredVariable
    shards_class = TPUShardUpdates
    start_device = "CPU:0"

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: Any,
        make_transport: Callable[[int], CrossReplica],
        *,
        device_assignment: Any = None,
    ):
        #: Whether an update of one variable is being built: its assignments are final.
        self.is_updating_own_copy = False
        self.remember_made()
        super().__init__(strategy, resolver, device_assignment=device_assignment)
        # Our variable classes define how a variable behaves, instead of policies.
        self._use_var_policy = False
        self.current_step = Step(self._num_replicas_in_sync)
        self.reducer = Reducer(make_transport(self._num_replicas_in_sync))
        self.take_options(strategy, self.worker_devices)
        pack_variables(strategy)

    def update_own_copy(self, variable: Any, fn: Callable, value: Any) -> None:
        with self._updating_own_copy():
            fn(variable, value)

    @contextlib.contextmanager
    def _updating_own_copy(self) -> Iterator[None]:
        before, self.is_updating_own_copy = self.is_updating_own_copy, True
        try:
            yield
        finally:
            self.is_updating_own_copy = before

    def tpu_run(self, fn: Callable, args: Any, kwargs: Any, options: Any = None) -> Any:
        with self.building_replicas():
            return super().tpu_run(with_global_seed(fn), args, kwargs, options)

    def _replica_ctx_update(
        self,
        var: Any,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        with self._updating_own_copy():
            result = super()._replica_ctx_update(var, fn, args, kwargs)
        return result if group else (result,)

    def update_copy(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: Any
    ) -> Any:
        return fn(var, *args, **(kwargs or {}))


PACKAGES = ("tensorflow-tpu", "tensorflow", "tensorflow-cpu", "libtpu", "keras")
# By address: initializing a TPU again would destroy its variables.
_CONNECTED: dict[str, Any] = {}


def connect(tpu: Any = "local") -> Any:
    """The resolver of an initialized TPU; `tpu`: see `TPUDataParallelStrategy`."""
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    is_resolver = isinstance(tpu, resolver_class)
    if not is_resolver and (not isinstance(tpu, str) or not tpu):
        raise ConfigurationError(
            "tpu must be 'local', the name of a TPU, grpc://host:port, or a "
            f"TPUClusterResolver. Received: {tpu!r}."
        )
    address = str(tpu.master() or "local") if is_resolver else tpu
    if address not in _CONNECTED:
        try:
            resolver = tpu if is_resolver else resolver_class(tpu=tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        # Errors of TensorFlow, of its library and of the network.
        except (tf.errors.OpError, RuntimeError, ValueError, OSError) as error:
            found = find_tpu()
            signs = found.signs if found is not None else ()
            raise TPUError(
                explain_tpu_failure(str(error), address, signs, _installed_versions())
            ) from error
        _CONNECTED[address] = resolver
    return _CONNECTED[address]


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
