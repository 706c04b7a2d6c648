"""What decides the order of a `tf.data` pipeline, or does not.

Checked against TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.names import global_seed, inputs_of

__all__ = ["stages_without_seed", "what_fit_reads"]

SHUFFLES = {"_ShuffleDataset", "ShuffleDataset", "_RandomDataset", "RandomDataset"}


def what_fit_reads(epoch_iterator: Any) -> tuple[tf.data.Dataset | None, bool]:
    """The dataset that `fit` was given, and whether Keras shuffles arrays by itself."""
    adapter = epoch_iterator.data_adapter
    dataset = getattr(adapter, "_dataset", None)
    if not isinstance(dataset, tf.data.Dataset):
        dataset = None
    is_shuffled_array = type(adapter).__name__ == "ArrayDataAdapter" and bool(
        getattr(adapter, "_shuffle", False)
    )
    return dataset, is_shuffled_array and global_seed() is None


def stages_without_seed(dataset: tf.data.Dataset) -> Iterator[str]:
    """What makes the order of `dataset` another one in each process, in words."""
    if dataset.options().deterministic is False:
        yield "deterministic=False"
    todo, seen = [dataset], set()
    while todo:
        stage = todo.pop()
        if id(stage) in seen:
            continue
        seen.add(id(stage))
        todo += inputs_of(stage)
        if type(stage).__name__ in SHUFFLES:
            seeds = [vars(stage).get(name) for name in ("_seed", "_seed2")]
            if all(seed is not None and not int(seed) for seed in seeds):
                yield "shuffle(...) without a seed"
