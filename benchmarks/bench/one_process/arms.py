"""The arms that a case compares; to add an arm, add a row to `ARMS`.

TensorFlow is imported in functions, so that names can be listed without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdp.plan.communication import Communication
from tfdp.plan.options import SHARD_STAGES

if TYPE_CHECKING:
    import tensorflow as tf

STOCK_PREFIX = "stock-"
# Training arms whose compiled step takes any batch length: each step then computes
# every replica's share of the samples.
OPEN_BATCH_ARMS = ("tfdp-open-batch",)


def _one_device(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    # TensorFlow's default: the first GPU, or the first logical CPU.
    return tf.distribute.get_strategy()


def _mirrored(reduction: str | None) -> Callable[[list[str]], tf.distribute.Strategy]:
    def make(devices: list[str]) -> tf.distribute.Strategy:
        import tensorflow as tf

        ops = getattr(tf.distribute, reduction)() if reduction else None
        return tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)

    return make


def _tfdp(**options: Any) -> Callable[[list[str]], tf.distribute.Strategy]:
    def make(devices: list[str]) -> tf.distribute.Strategy:
        import tfdp

        return tfdp.DataParallelStrategy(devices, alone=True, **options)

    return make


def _tfdp_cross_device_ops(devices: list[str]) -> tf.distribute.Strategy:
    import tensorflow as tf

    import tfdp

    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tfdp.HierarchicalAllReduce()
    )


# Arm -> makes its strategy over `devices` (device names, one replica each).
ARMS: dict[str, Callable[[list[str]], tf.distribute.Strategy]] = {
    "one-device": _one_device,
    "stock-default": _mirrored(None),
    "stock-hierarchical-copy": _mirrored("HierarchicalCopyAllReduce"),
    "stock-one-device": _mirrored("ReductionToOneDevice"),
    "tfdp": _tfdp(),
    "tfdp-open-batch": _tfdp(),
    **{f"tfdp-{name}": _tfdp(shard=i) for i, name in enumerate(SHARD_STAGES) if i},
    "tfdp-tensorflow-engine": _tfdp(communication=Communication(engine="tensorflow")),
    "tfdp-cross-device-ops": _tfdp_cross_device_ops,
}
