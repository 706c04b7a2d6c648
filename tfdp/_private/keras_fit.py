"""What Keras' `fit` holds while its callbacks run, and what its iterator knows.

Keras gives callbacks neither its input nor each other. Checked against Keras 3.12 and
3.15.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

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

__all__ = [
    "DrawnOrder",
    "FitLocals",
    "PassesOfData",
    "callbacks_around",
    "fit_around",
    "is_within_fit",
    "order_of",
    "stages_without_seed",
    "what_fit_reads",
]


class FitLocals(NamedTuple):
    """Of the `fit` that is running.

    Args:
      callbacks: all of them, in their order.
      passes: what it reads.
      initial_epoch: what it was given.
    """

    callbacks: keras.callbacks.CallbackList
    passes: PassesOfData
    initial_epoch: int


def fit_around(model: keras.Model) -> FitLocals | None:
    """The `fit` of `model` in which the caller runs; None: there is none."""
    for found in frames.fits_around():
        if found.get("self") is model:
            return FitLocals(
                found["callbacks"],
                PassesOfData(found["epoch_iterator"], found.get("val_x")),
                int(found["initial_epoch"] or 0),
            )
    return None


def callbacks_around(model: keras.Model | None) -> list[keras.callbacks.Callback]:
    """All callbacks of each `fit` of `model` in which the caller runs; None: of any."""
    return [
        callback
        for found in frames.fits_around()
        if model is None or found.get("self") is model
        for callback in getattr(found.get("callbacks"), "callbacks", ())
    ]


def is_within_fit(frame: FrameType | None, passes: PassesOfData) -> bool:
    """Whether `frame`, or one that called it, is of the `fit` that makes `passes`."""
    fits = () if frame is None else frames.fits_around(frame)
    return any(passes.are_of(found.get("epoch_iterator")) for found in fits)


class PlaceInData(Protocol):
    """What of `tfdp.callbacks.training_state.Place` is needed here."""

    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def passes_ended(self) -> int: ...
    @property
    def batches_read(self) -> int: ...
    @property
    def batches_per_epoch(self) -> int | None: ...
    @property
    def first_epoch(self) -> int: ...
    @property
    def drawn_before(self) -> int: ...


class PassesOfData:
    """The passes over its data that a `fit` makes, counted, and begun where one likes.

    A pass is one iterator over all data: an epoch; where `steps_per_epoch` is given, as
    many epochs as there are steps for.

    Args:
      epoch_iterator: Keras' own.
      validated: what is read between them; None: nothing is.
    """

    def __init__(self, epoch_iterator: Any, validated: Any = None):
        self._of_keras = epoch_iterator
        self._validated = validated
        self._begun = 0
        vars(epoch_iterator)["_get_iterator"] = self._counted
        self._order = order_of(epoch_iterator)
        if hasattr(epoch_iterator.data_adapter, "py_dataset"):
            # Its order is drawn when an epoch ends, and was when `fit` began.
            self._order.note_pass()
            vars(epoch_iterator.data_adapter)["on_epoch_end"] = self._counted_end
        #: What the order was drawn from before: a script may read the same data twice.
        self.drawn_before = self._order.drawn

    @property
    def adapter(self) -> Any:
        """Keras' data adapter of what is read."""
        return self._of_keras.data_adapter

    def are_of(self, epoch_iterator: Any) -> bool:
        """Whether these are the passes of that iterator of Keras'."""
        return self._of_keras is epoch_iterator

    def _counted(self) -> Any:
        self._begun += 1
        if not hasattr(self._of_keras.data_adapter, "py_dataset"):
            self._order.note_pass()
        return type(self._of_keras)._get_iterator(self._of_keras)

    def _counted_end(self) -> None:
        self._order.note_pass()
        adapter = self._of_keras.data_adapter
        type(adapter).on_epoch_end(adapter)

    def draw_again(self, place: PlaceInData) -> None:
        """Brings the order of the data to where it was at that place.

        Raises:
          ConfigurationError: the data was read further in this process.
        """
        it, adapter = self._of_keras, self._of_keras.data_adapter
        is_python = hasattr(adapter, "py_dataset")
        done = place.epoch - place.first_epoch if is_python else place.passes_ended
        missing = place.drawn_before + done - self._order.drawn
        if not self._order.is_kept:
            missing = done
        if missing < 0:
            raise ConfigurationError(
                "This dataset was read before in this program, further than at the "
                "place in the checkpoint, so its order cannot be the same again. Make "
                "it anew before fit, or start the program again; and give two "
                "trainings of one program directories of their own."
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
        self._begun = place.passes_ended

    def build(self, model: keras.Model) -> None:
        """Builds a model and its metrics by what the input states, nothing read.

        Without a strategy Keras does so in the first step only. Where the input states
        too little, it stays as it is.
        """
        batch = getattr(self._of_keras._distributed_dataset, "element_spec", None)
        if batch is not None:
            with contextlib.suppress(Exception):
                if updates_all_variables(model):
                    build_symbolically(model, data_batch=batch)
                else:
                    # Its step may give the optimizer some of the variables only.
                    build_without_optimizer(model, data_batch=batch)

    @property
    def without_seed(self) -> list[str]:
        """What makes the order of the data another one in each process, in words."""
        dataset, is_unseeded = what_fit_reads(self._of_keras)
        found = ["shuffle=True without a seed"] if is_unseeded else []
        return found if dataset is None else [*found, *stages_without_seed(dataset)]

    @property
    def shares_order(self) -> bool:
        """Whether validation draws from the same shuffle as the training."""
        return self._order.is_drawn_by(self._validated)

    @property
    def batches_per_epoch(self) -> int | None:
        """As Keras knows them by now."""
        return self._of_keras.num_batches

    def place(self, is_epoch_end: bool) -> tuple[int, int]:
        """How many passes were ended, and how many batches of the next one read."""
        it = self._of_keras
        goes_on = it.steps_per_epoch is not None or not is_epoch_end
        if self._begun and goes_on and it._current_iterator is not None:
            return self._begun - 1, it._steps_seen
        if self._begun and not is_epoch_end:
            return self._begun - 1, it._steps_seen  # of unknown length
        return self._begun, 0

    def begin_at(self, place: PlaceInData, *, is_placed: bool = False) -> None:
        """Lets the first epoch begin in the middle of a pass.

        Args:
          place: where.
          is_placed: whether the next pass begins there by itself; else what comes
            before is read, and left out.

        Raises:
          DataError: when the epoch begins: there are fewer batches.
        """
        it, read, batch = self._of_keras, place.batches_read, place.batch
        if it._num_batches is None and it.steps_per_epoch is None:
            it._num_batches = place.batches_per_epoch

        # Keras' own, or that of who leads the loop already.
        enumerate_epoch = it._enumerate_iterator

        def first_epoch() -> Iterator[tuple[int, int, Any]]:
            vars(it)["_enumerate_iterator"] = enumerate_epoch
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
                                f"The data ends before {read} batches, and in the "
                                "checkpoint as many were read of it: it is other data. "
                                "Give this training a directory of its own."
                            )
                    it._steps_seen += read - batch
                if begin >= batch:
                    yield begin, end, iterator

        vars(it)["_enumerate_iterator"] = first_epoch


END = object()
# Of others a pass is a call of Python code, which must not be made in vain.
WITH_SEEDS = {"TFDatasetAdapter", "ArrayDataAdapter"}


# What decides the order of a `tf.data` pipeline, or does not.
#
# Checked against TensorFlow 2.20 and 2.21.


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
