"""`TPUDataParallelStrategy`: the same script on the cores of a TPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.given_functions import is_function
from tfdp.data.padding import check_pad_batches
from tfdp.errors import ConfigurationError
from tfdp.exchange.tpu import CrossReplicaReducer
from tfdp.plan.communication import Communication, checked_communication
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.strategies.keras_backend import check_keras_backend
from tfdp.strategies.replica_strategy import (
    ReplicaContextStrategy,
)
from tfdp.strategies.tpu_extended import TPUDataParallelExtended
from tfdp.strategies.tpu_system import connect
from tfdp.strategies.unused import note_made
from tfdp.strategies.versions import warn_of_unchecked_versions

__all__ = ["TPUDataParallelStrategy"]

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
