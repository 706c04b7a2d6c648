"""The locals of Keras' `fit` while callbacks run, and its data iterator.

Keras gives callbacks neither its input nor each other. Checked against Keras 3.12 and
3.15, TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp._private import frames
from tfdp._private.drawn_order import (
    DrawnOrder,
    draw,
    draws_of_pass,
    keepers_of,
    stages_without_seed,
)
from tfdp._private.keras_models import (
    build_symbolically,
    build_without_optimizer,
    updates_all_variables,
)
from tfdp._private.names import datasets_of_hosts, global_seed
from tfdp.errors import ConfigurationError, DataError
from tfdp.seams.replace import replace

END = object()


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
        self._started = self._read = 0
        self._is_read = False  # the iterator that was started last
        replace(epoch_iterator, "_get_iterator", self._counted)
        # Keras' own, or an earlier override.
        self._enumerate_epoch = epoch_iterator._enumerate_iterator
        replace(epoch_iterator, "_enumerate_iterator", self._read_in_epoch)
        self._order = order_of(epoch_iterator)
        if hasattr(epoch_iterator.data_adapter, "py_dataset"):
            # Its order is drawn when an epoch ends, and was when `fit` began.
            self._order.note_pass()
            replace(epoch_iterator.data_adapter, "on_epoch_end", self._counted_end)
        #: Passes begun, and read, before this `fit`: a script may read the data twice.
        self.drawn_before, self.read_before = self._order.drawn, self._order.read

    @property
    def adapter(self) -> Any:
        return self._of_keras.data_adapter

    def are_of(self, epoch_iterator: Any) -> bool:
        return self._of_keras is epoch_iterator

    def _counted(self) -> Any:
        self._started += 1
        self._is_read = False
        if not hasattr(self._of_keras.data_adapter, "py_dataset"):
            self._order.note_pass()
        return type(self._of_keras)._get_iterator(self._of_keras)

    def _counted_end(self) -> None:
        self._order.note_pass()
        adapter = self._of_keras.data_adapter
        type(adapter).on_epoch_end(adapter)

    def _read_in_epoch(self) -> Iterator[tuple[int, int, Any]]:
        # At the end of an epoch Keras starts an iterator that it does not read.
        for begin, end, iterator in self._enumerate_epoch():
            if not self._is_read:
                self._is_read = True
                self._read += 1
                self._order.note_read()
            yield begin, end, iterator

    def draw_again(self, place: Any, *, is_over: bool = False) -> None:
        """Advances the data order to `place`; raises if the data was read further.

        With `is_over` the `fit` has ended there: it reads the last pass no further.
        """
        it, adapter = self._of_keras, self._of_keras.data_adapter
        is_python = hasattr(adapter, "py_dataset")
        begun = place.passes_begun if is_over else place.passes_ended
        read = place.passes_read + (is_over and place.batches_read > 0)
        begun = place.epoch - place.first_epoch if is_python else begun
        missing = place.drawn_before + begun - self._order.drawn
        missing_read = place.read_before + read - self._order.read
        if not self._order.is_kept:
            missing, missing_read = begun, read
        if missing < 0:
            raise ConfigurationError(
                "This program has read the dataset further than the checkpoint, so its "
                "order cannot be repeated. Create it again before fit, or restart the "
                "program; and give two trainings of one program separate directories."
            )
        self.drawn_before, self.read_before = place.drawn_before, place.read_before
        if is_python:
            for _ in range(missing):
                adapter.py_dataset.on_epoch_begin()
                adapter.py_dataset.on_epoch_end()
                self._order.note_pass()
        elif type(adapter).__name__ == "ArrayDataAdapter":
            for _ in range(missing):
                # A pass over arrays draws its order when it begins.
                iter(type(it)._get_iterator(it))
        elif type(adapter).__name__ == "TFDatasetAdapter":
            partly = place.batches_read if is_over else 0
            self._draw_passes(missing, max(missing_read, 0), partly)
        self._started, self._read = place.passes_ended, place.passes_read

    def _draw_passes(self, begun: int, read: int, partly: int) -> None:
        """Draws the orders of passes: `begun`, of which some were `read`.

        `partly`: the batches that the last of these has read; 0: all.
        """
        datasets, _ = what_fit_reads(self._of_keras)
        draws = draws_of_pass(datasets)
        if draws is not None:
            draw(draws, begun, read)
        else:
            for number in range(begun):
                is_last = number + 1 == read
                batches = partly if is_last and partly else self._batches_of_pass
                self._read_again(batches if number < read else 0)
        for _ in range(begun):
            self._order.note_pass()
        for _ in range(read):
            self._order.note_read()

    @property
    def _batches_of_pass(self) -> int | None:
        """The batches that Keras reads of a pass; None: until the data ends."""
        it = self._of_keras
        batches = it.data_adapter.num_batches
        if it.steps_per_epoch is not None or batches is None:
            return None
        # It reads whole executions.
        return -(-batches // it.steps_per_execution) * it.steps_per_execution

    def _read_again(self, batches: int | None) -> None:
        """Starts a pass, and reads `batches` of it; None: all."""
        iterator = iter(type(self._of_keras)._get_iterator(self._of_keras))
        numbers = itertools.count() if batches is None else range(batches)
        for _ in numbers:
            if next(iterator, END) is END:
                return

    @property
    def reads_passes_again(self) -> bool:
        """Whether a resume has to read ended passes again, to repeat their draws."""
        if type(self.adapter).__name__ != "TFDatasetAdapter":
            return False
        return draws_of_pass(what_fit_reads(self._of_keras)[0]) is None

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
        datasets, is_unseeded = what_fit_reads(self._of_keras)
        found = ["shuffle=True without a seed"] if is_unseeded else []
        return [
            *found,
            *(text for one in datasets for text in stages_without_seed(one)),
        ]

    @property
    def shares_order(self) -> bool:
        """Whether validation reads the same shuffle as training."""
        return self._order.is_drawn_by(self._validated)

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches per epoch; None until Keras knows."""
        return self._of_keras.num_batches

    def place(self, is_epoch_end: bool) -> dict[str, int]:
        """The numbers of passes, and of batches read in the one that goes on."""
        ended, batches = self._ended(is_epoch_end)
        return {
            "passes_begun": self._started,
            "passes_ended": ended,
            "passes_read": self._read - (ended < self._started and self._is_read),
            "batches_read": batches,
        }

    def _ended(self, is_epoch_end: bool) -> tuple[int, int]:
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


def what_fit_reads(epoch_iterator: Any) -> tuple[list[tf.data.Dataset], bool]:
    """The datasets given to `fit`, and whether Keras shuffles arrays without a seed."""
    adapter = epoch_iterator.data_adapter
    dataset = getattr(adapter, "_dataset", None)
    if isinstance(dataset, tf.data.Dataset):
        datasets = [dataset]
    else:
        datasets = datasets_of_hosts(dataset)
    is_shuffled_array = type(adapter).__name__ == "ArrayDataAdapter" and bool(
        getattr(adapter, "_shuffle", False)
    )
    return datasets, is_shuffled_array and global_seed() is None


def order_of(epoch_iterator: Any) -> DrawnOrder:
    """The order of the data that `fit` reads."""
    python = getattr(epoch_iterator.data_adapter, "py_dataset", None)
    if python is not None:
        changes = type(python).on_epoch_end is not keras.utils.PyDataset.on_epoch_end
        has_order = changes and type(python).__hash__ is not None
        return DrawnOrder([python] if has_order else [])
    datasets, _ = what_fit_reads(epoch_iterator)
    return DrawnOrder(keepers_of(datasets))
