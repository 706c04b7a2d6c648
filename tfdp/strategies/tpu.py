"""`TPUDataParallelStrategy`: the same script on the cores of a TPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.functions import is_function
from tfdp._private.tpu_names import TPUExtended, TPUMirroredVariable, pack_variables
from tfdp.cluster.tpu import explain_tpu_failure, find_tpu
from tfdp.data.padding import check_pad_batches
from tfdp.errors import ConfigurationError, TPUError
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.tpu import CrossReplicaReducer
from tfdp.plan.communication import Communication, checked_communication
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.sharding.tpu_variables import tpu_shard_class
from tfdp.sharding.updates import SHARD_CLASSES, ShardUpdates
from tfdp.sharding.variables import ShardedVariable
from tfdp.strategies.keras_backend import check_keras_backend
from tfdp.strategies.replica_extended import ReplicaExtended
from tfdp.strategies.replica_strategy import ReplicaContextStrategy
from tfdp.strategies.startup_checks import warn_of_unchecked_versions
from tfdp.strategies.unused import note_made
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.global_seed import with_global_seed
from tfdp.variables.tpu import TPUOwnSumVariable, TPUReplicaVariable, TPUSeedVariable

WIRE_DTYPES = (None, "bfloat16")

# Why an option of `Communication` has no sense on a TPU.
NOT_ON_TPU = {
    "bucket_bytes": "XLA packs neighbouring sums by itself (its all-reduce combiner)",
    "first_bucket_bytes": "XLA starts each sum as soon as its inputs are there",
    "hierarchy": "XLA knows the links between the cores",
    "engine": "the sum is an op of the program that XLA compiles for all cores",
    "timeout_seconds": "the cores run one program, in lockstep",
    "silence_seconds": "the cores run one program, in lockstep",
    "min_hosts": "the cores run one program, in lockstep",
    "compare_hosts": "the cores run one program, in lockstep",
    "wire_dtype": "it is an argument of TPUDataParallelStrategy itself",
    "compression": "the cores' links are faster than any encoding",
    "compression_across": "the cores' links are faster than any encoding",
    "checksum": "the cores share no network that tfdp uses",
    "repeated_rows": "XLA has no lists of a length that is known to a step only",
}


class TPUDataParallelStrategy(ReplicaContextStrategy, tf.distribute.TPUStrategy):
    """Trains one model on all cores of a TPU, each on its part of the batch.

    With N cores and per-core mean losses L_r, one step computes

        g = (1 / N) sum_r grad L_r(w),    w <- update(w, g)

    on every core alike, as `DataParallelStrategy` does, and by the same code: sample
    weighting, clipping after the reduction, accumulation, random draws per core. To
    Keras and TensorFlow it is a `tf.distribute.TPUStrategy`. The sum is XLA's
    cross-replica sum, within the one program that all cores run.

    Not run on a TPU yet: none was at hand. See docs/tpu.md for what was tested.

    Args:
      tpu: "local" for the cores of this machine (a TPU VM, Colab), the name of a TPU,
        `grpc://host:port`, or a `TPUClusterResolver`. Connected and started once.
      communication: None, or the defaults: what a `Communication` says otherwise has
        no meaning here and is refused.
      shard: "optimizer" (1): each core holds, and updates, 1 / N of the optimizer's
        state, as ZeRO stage 1 does. "none" (0): all of it. See docs/sharding.md.
      shard_min_bytes: variables below this size are not sharded.
      draws_per_replica: see `DataParallelStrategy`.
      pad_batches: True: short batches are filled up with rows that count for nothing,
        because the program has fixed shapes. A number is the global batch size, for
        data that do not tell it. False: batches go as they come.
      wire_dtype: "bfloat16" sends gradients in half of the bytes, rounded to 8 bits;
        None sends them as they are.

    Raises:
      ConfigurationError: when an argument is not as above, or Keras' backend is not
        TensorFlow.
      TPUError: when the TPU cannot be used; it says why and what to do.

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
        pad_batches: bool | int = True,
        wire_dtype: str | None = None,
    ):
        check_keras_backend()
        warn_of_unchecked_versions()
        check_communication(communication)
        self._sharding = sharding_of(shard, min_bytes=shard_min_bytes)
        if self._sharding.offloads or self._sharding.group == "host":
            raise ConfigurationError(
                "A TPUDataParallelStrategy takes a Sharding without offload and group: "
                "one process drives all cores, and each keeps its own state. "
                f"Received: {shard!r}."
            )
        if self._sharding.stage > 1:
            raise ConfigurationError(
                "shard must be 'none' or 'optimizer' on a TPU. Stages 2 and 3 give "
                "each replica gradients and weights of its own, and the accumulators "
                "and layers that read them need a graph for each replica: a TPU has "
                f"one for all. Received: {shard!r}."
            )
        if wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(
                "wire_dtype must be None or 'bfloat16': TPU cores add no smaller "
                f"floats. Received: {wire_dtype!r}."
            )
        self.pad_batches = check_pad_batches(pad_batches)
        extended = self._make_extended(tpu, bool(draws_per_replica), wire_dtype)
        # TPUStrategy's own constructor would make a stock extended.
        tf.distribute.Strategy.__init__(self, extended)
        note_made(self, self.is_chief)

    def _make_extended(
        self, tpu: Any, draws_per_replica: bool, wire_dtype: str | None
    ) -> TPUDataParallelExtended:
        return TPUDataParallelExtended(
            self,
            connect(tpu),
            functools.partial(CrossReplicaReducer, wire_dtype=wire_dtype),
            draws_per_replica=draws_per_replica,
            sharding=self._sharding,
        )

    @property
    def engine_name(self) -> str:
        """What adds gradients: "cross_replica_sum"."""
        return "cross_replica_sum"

    @property
    def _engine_in_words(self) -> str:
        return self.engine_name

    def run(
        self,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """Runs `fn` on every core; see `tf.distribute.Strategy.run`.

        Raises:
          ConfigurationError: for a plain Python function outside of a `tf.function`.
        """
        if tf.executing_eagerly() and not is_function(fn):
            raise ConfigurationError(
                "TPU cores run compiled programs only. Compile the model with "
                "run_eagerly=False, and call strategy.run within a tf.function or "
                "with one."
            )
        return super().run(fn, args, kwargs, options)


def check_communication(communication: Communication | None) -> None:
    """Refuses settings of `communication` that a TPU has no use for.

    Raises:
      ConfigurationError: naming the first and why.
    """
    communication = checked_communication(communication)
    for field in dataclasses.fields(Communication):
        value = getattr(communication, field.name)
        if value != field.default:
            reason = NOT_ON_TPU.get(field.name, "nothing leaves the TPU's own links")
            raise ConfigurationError(
                f"Communication({field.name}={value!r}) has no meaning on a TPU: "
                f"{reason}. Leave it out. For half of the bytes on the links: "
                "TPUDataParallelStrategy(wire_dtype='bfloat16')."
            )


# The TPU strategy's inside: a `TPUExtended` whose replicas never leave their context.
#
# TensorFlow traces one function for all replicas and hands it to XLA; the rank is a
# tensor in it. Reduction and updates are ops of that one program.


class TPUDataParallelExtended(ReplicaExtended, TPUExtended):
    """`TPUExtended` that reduces and updates in replica context.

    Args:
      strategy: the strategy it belongs to.
      resolver: a `tf.distribute.cluster_resolver.TPUClusterResolver`.
      make_reducer: makes what moves tensors between N replicas, from N.
      draws_per_replica: whether random layers draw apart on every replica.
      sharding: what each replica holds a shard of only.
      device_assignment: see `tf.distribute.TPUStrategy`; None for all cores.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: Any,
        make_reducer: Callable[[int], Reducer],
        *,
        draws_per_replica: bool = True,
        sharding: Sharding | None = None,
        device_assignment: Any = None,
    ):
        self._draws_per_replica = draws_per_replica
        #: Whether an update of one variable is being built: assignments are final.
        self.is_updating_own_copy = False
        self.remember_made()
        self.shards: ShardUpdates | None = None
        super().__init__(strategy, resolver, device_assignment=device_assignment)
        # Classes of variables, not policies, say how a variable behaves: ours are such.
        self._use_var_policy = False
        self.current_run = ReplicaRun(self._num_replicas_in_sync)
        self.reducer = make_reducer(self._num_replicas_in_sync)
        if sharding is not None and sharding.is_needed(self.reducer.shard_parts):
            self.shards = ShardUpdates(
                strategy, self.worker_devices, self.reducer, sharding
            )
        pack_variables(strategy)

    def update_own_copy(self, variable: Any, fn: Callable, value: Any) -> None:
        """Calls `fn` with the calling replica's copy of `variable`, and `value`."""
        with self._updating_own_copy():
            fn(variable, value)

    @contextlib.contextmanager
    def _updating_own_copy(self) -> Iterator[None]:
        before, self.is_updating_own_copy = self.is_updating_own_copy, True
        try:
            yield
        finally:
            self.is_updating_own_copy = before

    def _use_merge_call(self) -> bool:
        return False

    def tpu_run(self, fn: Callable, args: Any, kwargs: Any, options: Any = None) -> Any:
        """Traces `fn` once and runs it on every core."""
        self.begin_run()
        return super().tpu_run(with_global_seed(fn), args, kwargs, options)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        return self.reduced(reduce_op, value)

    def _replica_ctx_update(
        self,
        var: Any,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        with self._updating_own_copy():
            if isinstance(var, SHARD_CLASSES):
                result = self.shards_in_use().update(var, fn, args, kwargs)
            else:
                result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        self.note_maker()
        shards, shard_class = self.shards, None
        if shards is not None and kwargs.get("initial_value") is not None:
            value = self.draw_start(kwargs, "CPU:0")
            shard_class = shards.class_of(kwargs, value)
            if shard_class is not None:
                shard_class = tpu_shard_class(shard_class)
            if shard_class is not None and issubclass(shard_class, ShardedVariable):
                return shards.make(shard_class, next_creator, kwargs, value)
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is not TPUMirroredVariable:
            return variable
        own = self.has_own_sums(kwargs)
        plain = TPUOwnSumVariable if own else TPUReplicaVariable
        return self.made_for_replicas(variable, shard_class, plain, TPUSeedVariable)


# Connects to a TPU and starts it, once; explains what goes wrong.


PACKAGES = ("tensorflow-tpu", "tensorflow", "tensorflow-cpu", "libtpu", "keras")

# By address: starting a TPU again would throw away every variable that lies on it.
_CONNECTED: dict[str, Any] = {}


def connect(tpu: Any = "local") -> Any:
    """The resolver of a TPU that runs.

    Args:
      tpu: "local" for the cores of this machine, the name of a TPU,
        `grpc://host:port`, or a `tf.distribute.cluster_resolver.TPUClusterResolver`.

    Raises:
      ConfigurationError: when `tpu` is none of these.
      TPUError: when there is no such TPU or it does not start; it says what to do.
    """
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
        # Errors of TensorFlow, of its library and of the network: one root each.
        except (tf.errors.OpError, RuntimeError, ValueError, OSError) as error:
            found = find_tpu()
            signs = found.signs if found is not None else ()
            raise TPUError(
                explain_tpu_failure(str(error), address, signs, installed_versions())
            ) from error
        _CONNECTED[address] = resolver
    return _CONNECTED[address]


def installed_versions() -> dict[str, str]:
    """The versions of the packages that a TPU's use depends on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
