"""Where a `fit` is: the epoch, and the place in its data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tfdp.checkpoint.checkpoint import Restored
from tfdp.errors import DataError
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
