"""The arms: what a case compares. Adding an arm is adding a row to `ARMS`.

TensorFlow is imported inside the functions, so that the names can be listed and
checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfdp.plan.shards import SHARD_STAGES

if TYPE_CHECKING:
    import tensorflow as tf


STOCK_PREFIX = "stock-"
# Training arms whose batches may be of any length as far as the compiled step knows:
# every replica's share of the samples is then computed in each step.
OPEN_BATCH_ARMS = ("tfdp-open-batch",)


def _one_device(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    # Outside any scope: TensorFlow takes the first GPU, or the first logical CPU.
    return tf.distribute.get_strategy()


def _stock_default(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(devices)


def _stock_hierarchical_copy(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
    )


def _stock_one_device(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def _tfdp(devices: list[str]) -> tf.distribute.Strategy:
    import tfdp

    return tfdp.DataParallelStrategy(devices, alone=True)


def _tfdp_sharded(
    stage: int,
) -> Callable[[list[str]], tf.distribute.Strategy]:
    def make(devices: list[str]) -> tf.distribute.Strategy:
        import tfdp

        return tfdp.DataParallelStrategy(devices, shard=stage, alone=True)

    return make


def _tfdp_tensorflow_engine(devices: list[str]) -> tf.distribute.Strategy:
    import tfdp

    return tfdp.DataParallelStrategy(
        devices, communication=tfdp.Communication(engine="tensorflow"), alone=True
    )


def _tfdp_cross_device_ops(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    import tfdp

    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tfdp.HierarchicalAllReduce()
    )


# Arm -> the strategy over `devices`, full or short device names, one replica each.
ARMS: dict[str, Callable[[list[str]], tf.distribute.Strategy]] = {
    "one-device": _one_device,
    "stock-default": _stock_default,
    "stock-hierarchical-copy": _stock_hierarchical_copy,
    "stock-one-device": _stock_one_device,
    "tfdp": _tfdp,
    "tfdp-open-batch": _tfdp,
    **{f"tfdp-{name}": _tfdp_sharded(i) for i, name in enumerate(SHARD_STAGES) if i},
    "tfdp-tensorflow-engine": _tfdp_tensorflow_engine,
    "tfdp-cross-device-ops": _tfdp_cross_device_ops,
}
