"""Gives a training back what a checkpoint holds."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np

from tfdp._private.optimizer_hooks import strategy_of
from tfdp.checkpoint.array_files import ArrayFile, open_arrays
from tfdp.checkpoint.entries import Entry, Rows, entries_of, sum_of
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import Manifest, Noted, part_name
from tfdp.checkpoint.model_description import (
    build_as_noted,
    noted_optimizers,
)
from tfdp.data.places import Place
from tfdp.errors import ConfigurationError, DataError
from tfdp.step.compression import compression_entries, make_compression_entries
from tfdp.step.find_optimizers import optimizers_of
from tfdp.variables.global_seed import make_global_seed_states

# What a run may have that another has not: it starts as new there.
SEEDS = "seeds/"
# Of the program that wrote it, not of a model.
GIVEN = "program/"
OPTIONAL = (SEEDS, "metrics/", GIVEN)
COMPRESSION = "/compression/"
OF_OPTIMIZER = re.compile(r"optimizer(\d+)/")


@contextlib.contextmanager
def open_parts(folder: Place, manifest: Manifest) -> Iterator[list[ArrayFile]]:
    """All parts of a checkpoint.

    Raises:
      DataError: one is missing, damaged or of another call; naming it.
    """
    parts = len(manifest.sizes)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                open_arrays(
                    folder / part_name(number, parts),
                    size_bytes,
                    identity(manifest.write, number, parts),
                )
            )
            for number, size_bytes in enumerate(manifest.sizes)
        ]


def identity(write: str, number: int, parts: int) -> dict[str, object]:
    """What tells a part from all others."""
    return {"write": write, "part": number, "parts": parts}


def check_parts(files: Sequence[ArrayFile], hosts: Hosts) -> None:
    """Reads this host's share of the parts, and forgets it.

    Raises:
      DataError: something in it has changed since it was written.
    """
    for file in files[hosts.rank :: hosts.count]:
        for name in file.names:
            file.check(name)


def give_back(
    model: keras.Model,
    files: Sequence[ArrayFile],
    manifest: Manifest,
    hosts: Hosts,
    *,
    weights_only: bool,
) -> None:
    """Assigns to all variables what the parts hold.

    Args:
      model: built, and its optimizers.
      files: the parts.
      manifest: the checkpoint's.
      hosts: who trains now.
      weights_only: leave the optimizer and all else as it is.

    Raises:
      ConfigurationError: the model is another one than was saved.
      DataError: a part holds other things than its manifest says.

    Cost: every host reads what all have alike; one variable at a time in memory.
    """
    if weights_only:
        wanted = {
            name: entry
            for name, entry in entries_of(model).items()
            if name.startswith("model/")
        }
    else:
        build_as_noted(model, manifest.optimizers)
        _make_what_waits(model, manifest)
        wanted = entries_of(model)
    _check_identical(wanted, manifest.entries, weights_only)
    before = _CheckpointWorkers.of_manifest(manifest)
    now = _CheckpointWorkers.of_model(model, hosts)
    for name, entry in wanted.items():
        noted = manifest.entries.get(name)
        if noted is not None:
            value = _value(name, entry, noted, files, hosts)
            if isinstance(value, Rows):
                value = _every_worker_has(value, name, before, now)
            entry.give(value)
        elif COMPRESSION in name:
            local = len(entry.read())
            nothing = np.zeros((local, *entry.shape), entry.read().dtype)
            entry.give(Rows(nothing, nothing, 0, local))


def given_arrays(
    files: Sequence[ArrayFile], manifest: Manifest
) -> dict[str, np.ndarray]:
    """The arrays that `save` was given beside the model, by name."""
    return {
        name.removeprefix(GIVEN): files[noted.parts[0]].read(name).copy()
        for name, noted in manifest.entries.items()
        if name.startswith(GIVEN) and noted.kind == "whole"
    }


def _make_what_waits(model: keras.Model, manifest: Manifest) -> None:
    """What is made in the first steps, if the checkpoint has it."""
    seeds = [n.removeprefix(SEEDS) for n in manifest.entries if n.startswith(SEEDS)]
    make_global_seed_states(model.distribute_strategy, seeds)
    for number, optimizer in enumerate(optimizers_of(model)):
        group = f"optimizer{number}{COMPRESSION}"
        names = [n.removeprefix(group) for n in manifest.entries if n.startswith(group)]
        if names and strategy_of(optimizer) is not None:
            make_compression_entries(optimizer, names)
            if not compression_entries(optimizer):
                raise ConfigurationError(
                    "The checkpoint holds what compressed gradients have still to "
                    "send, and this run does not compress: that would be lost. Train "
                    "with the Communication(compression=...) of the run that wrote it, "
                    "or read the weights alone (weights_only=True)."
                )


def _check_identical(
    wanted: Mapping[str, Entry], noted: Mapping[str, Noted], weights_only: bool
) -> None:
    for name, entry in wanted.items():
        if name not in noted:
            if name.startswith(OPTIONAL) or COMPRESSION in name:
                continue
            raise ConfigurationError(
                f"The checkpoint has nothing for {entry.path!r} ({name}): it is of "
                "another model or optimizer. Restore into what was saved, or, where "
                "only the optimizer is another one, the weights alone "
                "(weights_only=True)."
            )
        if noted[name].dtype != entry.dtype and not weights_only:
            raise ConfigurationError(
                f"{entry.path!r} ({name}) is of {entry.dtype}, and in the checkpoint "
                f"of {noted[name].dtype}: a training goes on with the dtype policy "
                "that it began with. The weights alone (weights_only=True) may be "
                "rounded."
            )
        if noted[name].shape != entry.shape:
            raise ConfigurationError(
                f"{entry.path!r} ({name}) has the shape {entry.shape}, and in the "
                f"checkpoint {noted[name].path!r} has {noted[name].shape} there: it is "
                "of another model or optimizer."
            )
    left = [
        name
        for name in noted
        if name not in wanted
        and not name.startswith(OPTIONAL)
        and not (weights_only and not name.startswith("model/"))
    ]
    if left:
        raise ConfigurationError(
            f"The checkpoint holds {noted[left[0]].path!r} ({left[0]}) and "
            f"{len(left) - 1} more that this model or optimizer has no place for: it "
            "is of another one. Restore into what was saved, or the weights alone "
            "(weights_only=True)."
        )


def _value(
    name: str,
    entry: Entry,
    noted: Noted,
    files: Sequence[ArrayFile],
    hosts: Hosts,
) -> np.ndarray | Rows:
    if noted.kind == "whole":
        value = files[noted.parts[0]].read(name)
    elif noted.kind == "shards":
        pieces = [
            file.read(name) if length else np.zeros(0, noted.dtype)
            for file, length in zip(files, noted.parts, strict=True)
        ]
        value = np.concatenate(pieces)
        if value.size != int(np.prod(noted.shape)):
            raise DataError(
                f"The parts of {noted.path!r} ({name}) do not make the whole."
            )
        value = value.reshape(noted.shape)
    if noted.kind != "ranks":
        if value.shape != entry.shape:
            raise DataError(f"{noted.path!r} ({name}) has the shape {value.shape}.")
        if entry.kind != "ranks":
            return value
        local = len(entry.read())
        ranks = hosts.rank * local, hosts.count * local
        if entry.is_sum:  # of which each replica gets its part, and none all of it
            return Rows(value[None], None, *ranks)
        # All had the same: so has each now.
        return Rows(value[None], np.stack([value] * local), *ranks)
    return _rows(name, entry, noted, files, hosts)


@dataclasses.dataclass(frozen=True)
class _CheckpointWorkers:
    """Who trains: the replicas of each host, and in which groups for each optimizer."""

    replicas: tuple[int, ...]
    group_sizes: tuple[int | None, ...]

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> _CheckpointWorkers:
        sizes = (optimizer.group_size for optimizer in manifest.optimizers)
        return cls(manifest.replicas, tuple(sizes))

    @classmethod
    def of_model(cls, model: keras.Model, hosts: Hosts) -> _CheckpointWorkers:
        local = int(model.distribute_strategy.num_replicas_in_sync) // hosts.count
        sizes = (optimizer.group_size for optimizer in noted_optimizers(model))
        return cls((local,) * hosts.count, tuple(sizes))


def _every_worker_has(
    rows: Rows, name: str, before: _CheckpointWorkers, now: _CheckpointWorkers
) -> Rows:
    """`rows`, which are nobody's own where other replicas train, or in other groups."""
    is_same = before.replicas == now.replicas
    group_size, of_optimizer = None, OF_OPTIMIZER.match(name)
    if of_optimizer is not None:
        number = int(of_optimizer[1])
        group_size = before.group_sizes[number]
        # Files of before that was noted have None.
        is_same = is_same and group_size in (None, now.group_sizes[number])
    own = rows.own if is_same else None
    return dataclasses.replace(rows, own=own, group_size=group_size)


def _rows(
    name: str, entry: Entry, noted: Noted, files: Sequence[ArrayFile], hosts: Hosts
) -> np.ndarray | Rows:
    parts = [file.read(name) for file in files]
    if any(part.shape[1:] != noted.shape for part in parts):
        raise DataError(f"{noted.path!r} ({name}) has not the shape {noted.shape}.")
    everything = np.concatenate(parts)
    if entry.kind != "ranks":
        if entry.is_sum:
            return sum_of(everything).astype(everything.dtype)
        # One process without a strategy now: what it would have had.
        is_sum = name.startswith("metrics/")
        return everything.sum(axis=0) if is_sum else everything[0]
    local = len(entry.read())
    first_rank, replicas = hosts.rank * local, hosts.count * local
    is_same = len(files) == hosts.count and {len(part) for part in parts} == {local}
    return Rows(
        everything, parts[hosts.rank] if is_same else None, first_rank, replicas
    )
