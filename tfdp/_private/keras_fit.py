"""The locals of Keras' `fit` while callbacks run, and its data iterator.

Keras gives callbacks neither its input nor each other. Checked against Keras 3.12 and
3.15, TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp._private import frames
from tfdp._private.keras_models import (
    build_symbolically,
    build_without_optimizer,
    updates_all_variables,
)
from tfdp._private.names import global_seed, stages_of
from tfdp.errors import ConfigurationError, DataError
from tfdp.seams.replace import replace

SHUFFLES = {"_ShuffleDataset", "ShuffleDataset", "_RandomDataset", "RandomDataset"}
END = object()
# For other adapters a pass would call the user's Python code.
WITH_SEEDS = {"TFDatasetAdapter", "ArrayDataAdapter"}


class FitLocals(NamedTuple):
    """Callbacks, data passes and `initial_epoch` of a running `fit`."""

    callbacks: keras.callbacks.CallbackList
    passes: PassesOfData
    initial_epoch: int


def fit_around(model: keras.Model) -> FitLocals | None:
    """The `fit` of `model` in which the caller runs; else None."""
    for found in frames.fits_around():
        if found["self"] is model:
            passes = PassesOfData(found["epoch_iterator"], found["val_x"])
            initial_epoch = int(found["initial_epoch"] or 0)
            return FitLocals(found["callbacks"], passes, initial_epoch)
    return None


def callbacks_around(model: keras.Model | None) -> list[keras.callbacks.Callback]:
    """All callbacks of each surrounding `fit` of `model`; None: of any model."""
    return [
        callback
        for found in frames.fits_around()
        if model is None or found["self"] is model
        for callback in found.callbacks
    ]


def is_within_fit(frame: FrameType | None, passes: PassesOfData) -> bool:
    """Whether `frame` runs within the `fit` that makes `passes`."""
    fits = () if frame is None else frames.fits_around(frame)
    return any(passes.are_of(found["epoch_iterator"]) for found in fits)


class PassesOfData:
    """Counts the passes of a `fit` over its data, and starts them at any place.

    A pass is one iterator over all data: an epoch; with `steps_per_epoch`, as many
    epochs as it has steps for. Places are of `tfdp.callbacks.training_state.Place`.

    Args:
      epoch_iterator: Keras' own.
      validated: the validation data, if any.
    """

    def __init__(self, epoch_iterator: Any, validated: Any = None):
        self._of_keras = epoch_iterator
        self._validated = validated
        self._started = 0
        replace(epoch_iterator, "_get_iterator", self._counted)
        self._order = order_of(epoch_iterator)
        if hasattr(epoch_iterator.data_adapter, "py_dataset"):
            # Its order is drawn when an epoch ends, and was when `fit` began.
            self._order.note_pass()
            replace(epoch_iterator.data_adapter, "on_epoch_end", self._counted_end)
        #: Draws before this `fit`: a script may read the same data twice.
        self.drawn_before = self._order.drawn

    @property
    def adapter(self) -> Any:
        return self._of_keras.data_adapter

    def are_of(self, epoch_iterator: Any) -> bool:
        return self._of_keras is epoch_iterator

    def _counted(self) -> Any:
        self._started += 1
        if not hasattr(self._of_keras.data_adapter, "py_dataset"):
            self._order.note_pass()
        return type(self._of_keras)._get_iterator(self._of_keras)

    def _counted_end(self) -> None:
        self._order.note_pass()
        adapter = self._of_keras.data_adapter
        type(adapter).on_epoch_end(adapter)

    def draw_again(self, place: Any) -> None:
        """Advances the data order to `place`; raises if the data was read further."""
        it, adapter = self._of_keras, self._of_keras.data_adapter
        is_python = hasattr(adapter, "py_dataset")
        done = place.epoch - place.first_epoch if is_python else place.passes_ended
        missing = place.drawn_before + done - self._order.drawn
        if not self._order.is_kept:
            missing = done
        if missing < 0:
            raise ConfigurationError(
                "This program has read the dataset further than the checkpoint, so its "
                "order cannot be repeated. Create it again before fit, or restart the "
                "program; and give two trainings of one program separate directories."
            )
        self.drawn_before = place.drawn_before
        if is_python:
            for _ in range(missing):
                adapter.py_dataset.on_epoch_begin()
                adapter.py_dataset.on_epoch_end()
                self._order.note_pass()
        elif type(adapter).__name__ in WITH_SEEDS:
            for _ in range(missing):
                # Each pass draws the seeds of its shuffles when it begins.
                iter(type(it)._get_iterator(it))
                self._order.note_pass()
        self._started = place.passes_ended

    def build(self, model: keras.Model) -> None:
        """Builds a model and its metrics from the element spec, if it suffices.

        Without a strategy Keras builds in the first step only.
        """
        batch = getattr(self._of_keras._distributed_dataset, "element_spec", None)
        if batch is not None:
            with contextlib.suppress(Exception):
                if updates_all_variables(model):
                    build_symbolically(model, data_batch=batch)
                else:
                    # A custom step may update only some of the variables.
                    build_without_optimizer(model, data_batch=batch)

    @property
    def without_seed(self) -> list[str]:
        """Why the data order differs between processes, as texts."""
        dataset, is_unseeded = what_fit_reads(self._of_keras)
        found = ["shuffle=True without a seed"] if is_unseeded else []
        return found if dataset is None else [*found, *stages_without_seed(dataset)]

    @property
    def shares_order(self) -> bool:
        """Whether validation reads the same shuffle as training."""
        return self._order.is_drawn_by(self._validated)

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches per epoch; None until Keras knows."""
        return self._of_keras.num_batches

    def place(self, is_epoch_end: bool) -> tuple[int, int]:
        """The number of finished passes, and of batches read in the next one."""
        it = self._of_keras
        goes_on = it.steps_per_epoch is not None or not is_epoch_end
        if self._started and goes_on and it._current_iterator is not None:
            return self._started - 1, it._steps_seen
        if self._started and not is_epoch_end:
            return self._started - 1, it._steps_seen  # unknown length
        return self._started, 0

    def begin_at(self, place: Any, *, is_placed: bool = False) -> None:
        """Makes the first epoch begin within a pass.

        With `is_placed` the next pass begins there by itself; else reads and skips what
        comes before.

        Raises:
          DataError: when the epoch begins: there are fewer batches.
        """
        it, read, batch = self._of_keras, place.batches_read, place.batch
        if it._num_batches is None and it.steps_per_epoch is None:
            it._num_batches = place.batches_per_epoch

        # Keras' own, or an earlier override.
        enumerate_epoch = it._enumerate_iterator

        def first_epoch() -> Iterator[tuple[int, int, Any]]:
            replace(it, "_enumerate_iterator", enumerate_epoch)
            self.draw_again(place)
            is_first = True
            for begin, end, iterator in enumerate_epoch():
                if is_first:
                    is_first = False
                    for number in range(0 if is_placed else read):
                        if next(iterator, END) is END:
                            if read - number < it.steps_per_execution:
                                # Keras counts whole executions; the last was short.
                                break
                            raise DataError(
                                f"The data ends before the {read} batches that the "
                                "checkpointed training had read: it is other data. "
                                "Give this training another directory."
                            )
                    it._steps_seen += read - batch
                if begin >= batch:
                    yield begin, end, iterator

        replace(it, "_enumerate_iterator", first_epoch)


def what_fit_reads(epoch_iterator: Any) -> tuple[tf.data.Dataset | None, bool]:
    """The dataset given to `fit`, and whether Keras shuffles arrays without a seed."""
    adapter = epoch_iterator.data_adapter
    dataset = getattr(adapter, "_dataset", None)
    if not isinstance(dataset, tf.data.Dataset):
        dataset = None
    is_shuffled_array = type(adapter).__name__ == "ArrayDataAdapter" and bool(
        getattr(adapter, "_shuffle", False)
    )
    return dataset, is_shuffled_array and global_seed() is None


# Passes over data in an order that depends on the pass before: a tf.data shuffle, a
# PyDataset with an `on_epoch_end`.
_drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class DrawnOrder:
    """How far this process has advanced the data order, stored per keeper object."""

    def __init__(self, keepers: list[Any]):
        self._keepers = keepers

    @property
    def is_kept(self) -> bool:
        """Whether the next `fit` on the same data continues the order."""
        return bool(self._keepers)

    @property
    def drawn(self) -> int:
        """The number of passes over the data in this process."""
        return max((_drawn.get(keeper, 0) for keeper in self._keepers), default=0)

    def is_drawn_by(self, other: Any) -> bool:
        """Whether the dataset also reads one of these objects."""
        if not isinstance(other, tf.data.Dataset):
            return False
        return any(stage is k for stage in stages_of(other) for k in self._keepers)

    def note_pass(self) -> None:
        """Counts a pass when it begins, for a PyDataset when it ends."""
        for keeper in self._keepers:
            _drawn[keeper] = _drawn.get(keeper, 0) + 1


def order_of(epoch_iterator: Any) -> DrawnOrder:
    """The order of the data that `fit` reads."""
    python = getattr(epoch_iterator.data_adapter, "py_dataset", None)
    if python is not None:
        changes = type(python).on_epoch_end is not keras.utils.PyDataset.on_epoch_end
        has_order = changes and type(python).__hash__ is not None
        return DrawnOrder([python] if has_order else [])
    dataset, _ = what_fit_reads(epoch_iterator)
    stages = () if dataset is None else stages_of(dataset)
    return DrawnOrder([s for s in stages if type(s).__name__ in SHUFFLES])


def stages_without_seed(dataset: tf.data.Dataset) -> Iterator[str]:
    """Why the order of `dataset` differs between processes, as texts."""
    if dataset.options().deterministic is False:
        yield "deterministic=False"
    for stage in stages_of(dataset):
        if type(stage).__name__ in SHUFFLES:
            seeds = [vars(stage).get(name) for name in ("_seed", "_seed2")]
            if all(seed is not None and not int(seed) for seed in seeds):
                yield "shuffle(...) without a seed"
