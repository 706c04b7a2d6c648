"""`TPUDataParallelStrategy`: the same script on the cores of a TPU."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._tf.tpu_extended import TPUDataParallelExtended
from tfdp.collectives.cross_replica import CrossReplicaReducer
from tfdp.replica_strategy import ReplicaContextStrategy, check_pad_batches
from tfdp.tpu_system import connect

__all__ = ["TPUDataParallelStrategy"]


class TPUDataParallelStrategy(ReplicaContextStrategy, tf.distribute.TPUStrategy):
    """Trains one model on all cores of a TPU, each on its part of the batch."""

    compiles_steps = True

    def __init__(
        self,
        tpu: Any = "local",
        *,
        draws_per_replica: bool = True,
        pad_batches: bool | int = True,
    ):
        self.pad_batches = check_pad_batches(pad_batches)
        extended = self._make_extended(tpu, bool(draws_per_replica))
        # TPUStrategy's own constructor would make a stock extended.
        tf.distribute.Strategy.__init__(self, extended)

    def _make_extended(
        self, tpu: Any, draws_per_replica: bool
    ) -> TPUDataParallelExtended:
        return TPUDataParallelExtended(
            self,
            connect(tpu),
            CrossReplicaReducer,
            draws_per_replica=draws_per_replica,
        )
