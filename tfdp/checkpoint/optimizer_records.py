"""The optimizers of a checkpoint: which they are, and which variables they update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import keras

from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.errors import ConfigurationError
from tfdp.step.find_optimizers import innermost_optimizers, optimizers_of


@dataclass(frozen=True)
class OptimizerRecord:
    """The manifest's record of an optimizer.

    Shapes alone do not identify it: SGD with momentum has the same as Lion, and a model
    with a frozen first layer may have the same as one with a frozen second. An
    optimizer that only a custom `train_step` uses is built in the first step.
    """

    names: tuple[str, ...]  # of its class, without wrappers; several if it is a group
    # Indices in `model.variables` of those it was built with; None: it was not built,
    # or they are not the model's.
    places: tuple[int, ...] | None
    group_size: int | None = None  # replicas that step together in local training
    # That of a `DistributedOptimizer`, as text; "": none; None: of an older file.
    sync: str | None = None


def optimizer_records(model: keras.Model) -> tuple[OptimizerRecord, ...]:
    """Records of the optimizers of a model, in the order of `optimizers_of`."""
    places = {id(variable): at for at, variable in enumerate(model.variables)}
    records = []
    for optimizer in optimizers_of(model):
        names = tuple(type(one).__name__ for one in innermost_optimizers(optimizer))
        group_size = getattr(getattr(optimizer, "rounds", None), "group_size", None)
        sync = getattr(optimizer, "sync", None)
        record = OptimizerRecord(
            names, _places(optimizer, places), group_size, repr(sync) if sync else ""
        )
        records.append(record)
    return tuple(records)


def _places(
    optimizer: keras.optimizers.Optimizer, places: dict[int, int]
) -> tuple[int, ...] | None:
    if not optimizer.built:
        return None
    found = [places.get(id(v)) for v in variables_built_with(optimizer)]
    in_model = tuple(place for place in found if place is not None)
    return in_model if len(in_model) == len(found) else None


def build_as_saved(model: keras.Model, records: Sequence[OptimizerRecord]) -> None:
    """Builds optimizers as in the checkpoint; `ConfigurationError` if others."""
    here = optimizer_records(model)
    variables = model.variables
    if [one.names for one in here] != [one.names for one in records]:
        raise ConfigurationError(
            f"The checkpoint is of another optimizer: {_text(records)}, not "
            f"{_text(here)}. Use that one, or restore the weights alone "
            "(weights_only=True)."
        )
    for optimizer, mine, theirs in zip(
        optimizers_of(model), here, records, strict=True
    ):
        if theirs.places is None or theirs.places == mine.places:
            continue
        if optimizer.built or max(theirs.places, default=-1) >= len(variables):
            raise ConfigurationError(
                f"{theirs.names[0]} updates {len(variables_built_with(optimizer))} "
                f"variables here, and {len(theirs.places)} in the checkpoint, or "
                "others: the trainable layers differ. Freeze the same layers, or "
                "restore the weights alone (weights_only=True)."
            )
        with model.distribute_strategy.scope():
            optimizer.build([variables[place] for place in theirs.places])


def other_sync(
    here: Sequence[OptimizerRecord], saved: Sequence[OptimizerRecord]
) -> str | None:
    """How the `sync` of an optimizer differs from that in a checkpoint; None: not."""
    for mine, theirs in zip(here, saved, strict=True):
        if theirs.sync is not None and mine.sync != theirs.sync:
            return (
                f"The checkpoint is of a training with sync={theirs.sync or None}, and "
                f"{mine.names[0]} has sync={mine.sync or None} here, which keeps other "
                "state. Resume with the same sync, or restore the weights alone "
                "(weights_only=True)."
            )
    return None


def _text(records: Sequence[OptimizerRecord]) -> str:
    return ", ".join("+".join(one.names) for one in records) or "none"
