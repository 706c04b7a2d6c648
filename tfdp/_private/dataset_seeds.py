"""What decides the order of a `tf.data` pipeline, or does not.

Checked against TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import global_seed, stages_of

__all__ = ["DrawnOrder", "order_of", "stages_without_seed", "what_fit_reads"]

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


# How many passes were made over data that draws the order of each from what the pass
# before has left: a shuffle of tf.data, a PyDataset with an `on_epoch_end`.
_drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class DrawnOrder:
    """How far the order of what `fit` reads was drawn in this process.

    Args:
      keepers: the objects that keep it from one `fit` to the next.
    """

    def __init__(self, keepers: list[Any]):
        self._keepers = keepers

    @property
    def is_kept(self) -> bool:
        """Whether the next `fit` of the same data goes on with it."""
        return bool(self._keepers)

    @property
    def drawn(self) -> int:
        """The number of passes."""
        return max((_drawn.get(keeper, 0) for keeper in self._keepers), default=0)

    def is_drawn_by(self, other: Any) -> bool:
        """Whether a dataset reads one of the objects as well."""
        if not isinstance(other, tf.data.Dataset):
            return False
        return any(stage is k for stage in stages_of(other) for k in self._keepers)

    def note_pass(self) -> None:
        """One more was begun, or of a PyDataset, ended."""
        for keeper in self._keepers:
            _drawn[keeper] = _drawn.get(keeper, 0) + 1


def order_of(epoch_iterator: Any) -> DrawnOrder:
    """The order of what `fit` reads."""
    python = getattr(epoch_iterator.data_adapter, "py_dataset", None)
    if python is not None:
        changes = type(python).on_epoch_end is not keras.utils.PyDataset.on_epoch_end
        is_known = changes and type(python).__hash__ is not None
        return DrawnOrder([python] if is_known else [])
    dataset, _ = what_fit_reads(epoch_iterator)
    stages = () if dataset is None else stages_of(dataset)
    return DrawnOrder([s for s in stages if type(s).__name__ in SHUFFLES])


def stages_without_seed(dataset: tf.data.Dataset) -> Iterator[str]:
    """What makes the order of `dataset` another one in each process, in words."""
    if dataset.options().deterministic is False:
        yield "deterministic=False"
    for stage in stages_of(dataset):
        if type(stage).__name__ in SHUFFLES:
            seeds = [vars(stage).get(name) for name in ("_seed", "_seed2")]
            if all(seed is not None and not int(seed) for seed in seeds):
                yield "shuffle(...) without a seed"
