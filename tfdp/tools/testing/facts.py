"""Facts on a model and its comparison, before any experiment."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CauseFacts:
    """Plain data for the table of causes."""

    replicas: int
    batch_rows: tuple[int, ...]  # rows of each global batch
    optimizer: str  # its class
    rows_of_replica: str = ""  # of these batches, such as "4 to 8"
    clipping: tuple[str, ...] = ()  # such as "clipnorm=1.0"
    local_batch_norms: tuple[str, ...] = ()  # with statistics per replica
    synchronized_batch_norms: tuple[str, ...] = ()  # Keras', `synchronized=True`
    masking_layers: tuple[str, ...] = ()  # that create a mask
    drawing_layers: tuple[str, ...] = ()  # that drew random numbers
    train_step: str | None = None  # the model's class, if it overrides `train_step`
    loss_functions: tuple[str, ...] = ()  # losses that are plain functions
    sample_weights: bool = False  # in the batches
    gradient_change: str = ""  # before apply, as the analysis of the step says
    gradient_advice: str = ""
    half_precision: bool = False  # a layer computes in float16 or bfloat16
    finite_on_one_device: bool = True  # all weights
    finite_on_replicas: bool = True
    moved_enough: bool = True  # the variables, for a wrong step to show
    told: str = ""  # what happens in the step, as a warning of tfdp says
    told_instead: str = ""  # the line to write, as it says

    @property
    def uneven_batches(self) -> tuple[str, ...]:
        """The batches that the replicas cannot share evenly."""
        return tuple(
            f"batch {number} of {rows} rows"
            for number, rows in enumerate(self.batch_rows, start=1)
            if rows % self.replicas
        )
