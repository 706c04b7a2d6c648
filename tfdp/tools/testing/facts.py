"""What is known of a model and its comparison before any experiment."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
    """Plain data that the table of causes looks at.

    Args:
      replicas: their number.
      batch_rows: rows of each global batch.
      optimizer: the class of the optimizer.
      clipping: its clipping options, such as "clipnorm=1.0".
      local_batch_norms: batch-normalisation layers with statistics of their own on each
        replica.
      synchronized_batch_norms: those of Keras with `synchronized=True`.
      masking_layers: layers that make a mask.
      drawing_layers: layers that drew random numbers during the comparison.
      train_step: the class of the model, when it has a `train_step` of its own.
      loss_functions: losses that are plain functions.
      sample_weights: whether the batches bring them.
      half_precision: whether a layer computes in float16 or bfloat16.
      finite_on_one_device: whether all weights stayed finite there.
      finite_on_replicas: the same on every replica.
      moved_enough: whether the variables moved enough for a wrong step to show.
    """

    replicas: int
    batch_rows: tuple[int, ...]
    optimizer: str
    clipping: tuple[str, ...] = ()
    local_batch_norms: tuple[str, ...] = ()
    synchronized_batch_norms: tuple[str, ...] = ()
    masking_layers: tuple[str, ...] = ()
    drawing_layers: tuple[str, ...] = ()
    train_step: str | None = None
    loss_functions: tuple[str, ...] = ()
    sample_weights: bool = False
    half_precision: bool = False
    finite_on_one_device: bool = True
    finite_on_replicas: bool = True
    moved_enough: bool = True

    @property
    def uneven_batches(self) -> tuple[str, ...]:
        """The batches that the replicas cannot share evenly, in words."""
        return tuple(
            f"batch {number} of {rows} rows"
            for number, rows in enumerate(self.batch_rows, start=1)
            if rows % self.replicas
        )
