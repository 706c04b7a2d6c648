"""What Keras' `fit` holds while its callbacks run, and what its iterator knows.

Keras gives callbacks neither its input nor each other. Checked against Keras 3.12 and
3.15.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import keras

from tfdp._private.dataset_seeds import stages_without_seed, what_fit_reads
from tfdp._private.frames import KERAS_TRAINER_MODULE
from tfdp._private.keras_models import build_symbolically
from tfdp.errors import DataError

__all__ = ["FitLocals", "PassesOfData", "fit_around", "is_within_fit"]


class FitLocals(NamedTuple):
    """Of the `fit` that is running.

    Args:
      callbacks: all of them, in their order.
      passes: what it reads.
    """

    callbacks: keras.callbacks.CallbackList
    passes: PassesOfData


def fit_around(model: keras.Model) -> FitLocals | None:
    """The `fit` of `model` in which the caller runs; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals
        if _is_fit(frame) and found.get("self") is model:
            return FitLocals(found["callbacks"], PassesOfData(found["epoch_iterator"]))
        frame = frame.f_back
    return None


def is_within_fit(frame: FrameType | None) -> bool:
    """Whether `frame`, or one that called it, is of a `fit`."""
    while frame is not None:
        if _is_fit(frame):
            return True
        frame = frame.f_back
    return False


def _is_fit(frame: FrameType) -> bool:
    is_of_trainer = frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE
    return is_of_trainer and frame.f_code.co_name == "fit"


class PassesOfData:
    """The passes over its data that a `fit` makes, counted, and begun where one likes.

    A pass is one iterator over all data: an epoch; where `steps_per_epoch` is given, as
    many epochs as there are steps for.

    Args:
      epoch_iterator: Keras' own.
    """

    def __init__(self, epoch_iterator: Any):
        self._of_keras = epoch_iterator
        self._begun = 0
        vars(epoch_iterator)["_get_iterator"] = self._counted

    def _counted(self) -> Any:
        self._begun += 1
        return type(self._of_keras)._get_iterator(self._of_keras)

    def build(self, model: keras.Model) -> None:
        """Builds a model and its metrics by what the input states, nothing read.

        Without a strategy Keras does so in the first step only. Where the input states
        too little, it stays as it is.
        """
        batch = getattr(self._of_keras._distributed_dataset, "element_spec", None)
        if batch is not None:
            with contextlib.suppress(Exception):
                build_symbolically(model, data_batch=batch)

    @property
    def without_seed(self) -> list[str]:
        """What makes the order of the data another one in each process, in words."""
        dataset, is_unseeded = what_fit_reads(self._of_keras)
        found = ["shuffle=True without a seed"] if is_unseeded else []
        return found if dataset is None else [*found, *stages_without_seed(dataset)]

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

    def end_with(self, model: keras.Model, logs: dict[str, Any]) -> None:
        """Lets an epoch of which no batch was left end with `logs`, not with none."""
        results = type(model)._get_metrics_result_or_logs

        def of_epoch(found: Any) -> Any:
            vars(model).pop("_get_metrics_result_or_logs", None)
            return results(model, found or logs)

        vars(model)["_get_metrics_result_or_logs"] = of_epoch

    def begin_at(
        self,
        ended: int,
        read: int,
        epoch: int,
        batch: int,
        batches_per_epoch: int | None,
    ) -> None:
        """Lets the first epoch begin in the middle of a pass.

        Args:
          ended: passes that were ended before.
          read: batches of the next one that were read.
          epoch: the epoch to begin with.
          batch: the batch of it to begin with.
          batches_per_epoch: as Keras knew them; None: it did not.

        Raises:
          DataError: when the epoch begins: there are fewer batches.
        """
        it = self._of_keras
        if it._num_batches is None and it.steps_per_epoch is None:
            it._num_batches = batches_per_epoch

        def first_epoch() -> Iterator[tuple[int, int, Any]]:
            del vars(it)["_enumerate_iterator"]
            adapter = it.data_adapter
            if type(adapter).__name__ in WITH_SEEDS:
                for _ in range(ended):
                    # Each pass draws the seeds of its shuffles when it begins.
                    iter(it._get_iterator())
            else:
                self._begun = ended
            if isinstance(getattr(adapter, "py_dataset", None), keras.utils.PyDataset):
                for _ in range(epoch):
                    adapter.py_dataset.on_epoch_begin()
                    adapter.py_dataset.on_epoch_end()
            is_first = True
            for begin, end, iterator in it._enumerate_iterator():
                if is_first:
                    is_first = False
                    for _ in range(read):
                        if next(iterator, END) is END:
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
