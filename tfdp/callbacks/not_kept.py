"""What a checkpoint of a `fit` cannot keep, said when the training begins."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdp._private.fit_frames import PassesOfData
from tfdp._private.keras_models import layers_within
from tfdp.errors import CheckpointWarning
from tfdp.step.held_optimizers import optimizers_of

__all__ = ["HiddenOptimizers", "warn_of_what_is_lost"]


class HiddenOptimizers:
    """Optimizers that only a part of the model holds, and whether a step uses them.

    A discriminator that was compiled by itself has one. Most are never called, so it
    is said when one was.

    Args:
      model: that is trained.
    """

    def __init__(self, model: keras.Model):
        known = {id(optimizer) for optimizer in optimizers_of(model)}
        self._hidden = [
            (layer.name, optimizer, int(optimizer.iterations.numpy()))
            for layer in layers_within(model)
            for optimizer in optimizers_of(layer)
            if id(optimizer) not in known
        ]

    def warn_of_used(self) -> None:
        """Once for each."""
        used = [h for h in self._hidden if int(h[1].iterations.numpy()) != h[2]]
        self._hidden = [hidden for hidden in self._hidden if hidden not in used]
        for name, optimizer, _ in used:
            warnings.warn(
                f"{optimizer.name!r}, the optimizer of {name!r}, is not saved, and "
                "this training uses it. Make it an attribute of the trained model: "
                f"model.its_optimizer = model.{name}.optimizer.",
                CheckpointWarning,
                stacklevel=4,
            )


def warn_of_what_is_lost(
    model: keras.Model, passes: PassesOfData, on_signal: bool
) -> None:
    """Warns of each thing that would not be the same after a restart.

    Args:
      model: that is trained.
      passes: what it is trained on.
      on_signal: whether signals are to be noted.
    """
    said = [*_of_data(passes), *_of_model(model)]
    if on_signal and threading.current_thread() is not threading.main_thread():
        said.append(
            "Signals save nothing: fit does not run in the main thread, to which they "
            "come. Pass on_signal=False, and save by every_seconds."
        )
    for text in said:
        warnings.warn(text, CheckpointWarning, stacklevel=4)


def _of_data(passes: PassesOfData) -> Iterator[str]:
    found = passes.without_seed
    if found:
        yield (
            f"The order of the data is another one after a restart ({found[0]}): a "
            "fit that goes on within an epoch would leave out other samples than "
            "it has trained on. Call keras.utils.set_random_seed(1) at the top of "
            "the program, before the data is made, or give the shuffle a seed."
        )
    if passes.shares_order:
        yield (
            "validation_data reads the same shuffle as the training data, which mixes "
            "the two and makes the order another one after a restart. Shuffle after "
            "they are split, or with reshuffle_each_iteration=False."
        )


def _of_model(model: keras.Model) -> Iterator[str]:
    for layer in layers_within(model):
        for name, value in vars(layer).items():
            if isinstance(value, tf.Variable | tf.random.Generator):
                kind = type(value).__name__
                yield (
                    f"{name} of {layer.name!r} is not saved: Keras does not know a "
                    f"TensorFlow {kind} as a part of the model. Use add_weight, or "
                    "keras.random.SeedGenerator."
                )
