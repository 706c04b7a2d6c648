"""The experiments of a diagnosis: changes to both sides of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfdp.layers import SyncBatchNormalization
from tfdp.losses import on_all_rows
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tools.testing.batches import repeat_first_share, trim_to_multiple
from tfdp.tools.testing.model_parts import HALF_PRECISION, inner_optimizers, layers_of
from tfdp.tools.testing.trainee import CheckedTraining, ModelChange

# For experiments that replace an optimizer other than SGD.
LEARNING_RATE = 0.01


def apply_changes(
    setting: CheckedTraining, names: Iterable[str]
) -> CheckedTraining | None:
    """`setting` with the named changes; None if no batch is left."""
    for name in names:
        setting = CHANGES[name](setting)
    return setting if setting.batches else None


def is_local_batch_norm(layer: keras.layers.Layer, replicas: int) -> bool:
    """Whether a layer normalizes over fewer rows than the global batch."""
    if isinstance(layer, SyncBatchNormalization):
        return layer.group_size not in (None, replicas)
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized


def is_synchronized_by_keras(layer: keras.layers.Layer) -> bool:
    """Whether a layer is Keras' own synchronized batch normalization."""
    return (
        isinstance(layer, keras.layers.BatchNormalization)
        and not isinstance(layer, SyncBatchNormalization)
        and layer.synchronized
    )


def _batch_change(
    change: Callable[..., Any],
) -> Callable[[CheckedTraining], CheckedTraining]:
    def changed(setting: CheckedTraining) -> CheckedTraining:
        batches = change(setting.batches, setting.replicas)
        return dataclasses.replace(setting, batches=batches)

    return changed


def _model_change(change: ModelChange) -> Callable[[CheckedTraining], CheckedTraining]:
    def changed(setting: CheckedTraining) -> CheckedTraining:
        return dataclasses.replace(setting, changes=(*setting.changes, change))

    return changed


def _remove_clipping(model: keras.Model, replicas: int) -> None:
    for outer in optimizers_of(model):
        for optimizer in inner_optimizers(outer):
            optimizer.clipnorm = optimizer.global_clipnorm = optimizer.clipvalue = None


def _freeze(model: keras.Model, replicas: int) -> None:
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False


def _compute_in_float32(model: keras.Model, replicas: int) -> None:
    for layer in layers_of(model):
        if layer.compute_dtype in HALF_PRECISION:
            layer.dtype_policy = keras.DTypePolicy("float32")


def _take_all_rows(model: keras.Model, replicas: int) -> None:
    on_all_rows(model)


def _plain_sgd(scale: Callable[[int], float]) -> ModelChange:
    def change(model: keras.Model, replicas: int) -> None:
        rate = LEARNING_RATE
        if isinstance(model.optimizer, keras.optimizers.SGD):
            rate = float(model.optimizer.learning_rate.numpy())
        model.optimizer = keras.optimizers.SGD(rate * scale(replicas))

    return change


CHANGES: dict[str, Callable[[CheckedTraining], CheckedTraining]] = {
    "even_batches": _batch_change(trim_to_multiple),
    "no_clipping": _model_change(_remove_clipping),
    "freeze_batch_norm": _model_change(_freeze),
    "freeze_synchronized_batch_norm": _model_change(_freeze),
    "compute_in_float32": _model_change(_compute_in_float32),
    "same_rows": _batch_change(repeat_first_share),
    "all_rows": _model_change(_take_all_rows),
    "sgd": _model_change(_plain_sgd(lambda replicas: 1.0)),
    "sgd_divided": _model_change(_plain_sgd(lambda replicas: 1.0 / replicas)),
    "sgd_multiplied": _model_change(_plain_sgd(lambda replicas: float(replicas))),
}
