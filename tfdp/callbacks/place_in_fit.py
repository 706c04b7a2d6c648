"""Where a `fit` is: the epoch, and the place in its data."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

from tfdp.checkpoint.checkpoint import Restored
from tfdp.errors import CheckpointWarning, DataError
from tfdp.files.checked_json import is_count

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """What comes next.

    Args:
      epoch: to go on with, from 0.
      batch: of the epoch, from 0.
      passes_ended: over the data.
      batches_read: of the pass that goes on.
      batches_per_epoch: as Keras knew them; None: it did not.
      has_stopped: whether a callback had stopped the training.
      first_epoch: at which the training began, from 0.
      drawn_before: how often the order of the data was drawn before it began.
    """

    epoch: int
    batch: int
    passes_ended: int
    batches_read: int
    batches_per_epoch: int | None
    has_stopped: bool
    first_epoch: int
    drawn_before: int

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def of(cls, restored: Restored) -> Place:
        """The place that a checkpoint holds.

        Raises:
          DataError: it holds none: another program wrote it.
        """
        said: Any = restored.program.get("place")
        try:
            place = cls(**said)
        except TypeError:
            place = None
        if place is None or not all(
            is_count(number)
            for number in (
                *(place.epoch, place.batch, place.passes_ended, place.batches_read),
                *(place.batches_per_epoch or 0, place.first_epoch, place.drawn_before),
            )
        ):
            raise DataError(
                f"{restored.directory} says nothing of the place in the data: "
                "tfdp.callbacks.Checkpoint did not write it. Read it by "
                "tfdp.checkpoint.Checkpoint(directory).restore(model), and give the "
                "callback a directory of its own."
            )
        return place

    def check_batches(self, now: int | None) -> None:
        """Refuses other batches within an epoch: other samples would be left out.

        Args:
          now: how many batches an epoch has, as Keras knows them; None: it does not.

        Raises:
          DataError: other ones than before, in the middle of an epoch.

        Warns:
          CheckpointWarning: other ones than before, between two epochs.
        """
        was = self.batches_per_epoch
        if was is None or now is None or was == now:
            return
        if self.batch or self.batches_read:
            raise DataError(
                f"An epoch has {now} batches here, and had {was} when the checkpoint "
                f"was written, in the middle of one: leaving out {self.batches_read} "
                "would leave out other samples. Give the data and the batch size that "
                "it began with, or this training a directory of its own."
            )
        warnings.warn(
            f"An epoch has {now} batches from now on, and had {was} before: the data, "
            "or the batch size, is another one.",
            CheckpointWarning,
            stacklevel=3,
        )
