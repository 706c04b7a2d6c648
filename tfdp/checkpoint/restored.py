"""Restores a training from the parts of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np

from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME, strategy_of
from tfdp.chain.compression import compression_entries
from tfdp.checkpoint.array_files import ArrayFile, open_arrays
from tfdp.checkpoint.entries import Entry, ReplicaValues, entries_of, sum_of
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import (
    KERAS_FILE,
    PROGRAM,
    EntryRecord,
    Manifest,
    part_name,
)
from tfdp.checkpoint.optimizer_records import (
    build_as_saved,
    optimizer_records,
    other_sync,
)
from tfdp.data.places import Place
from tfdp.errors import ConfigurationError, DataError
from tfdp.step.find_optimizers import optimizers_of
from tfdp.variables.global_seed import make_global_seed_states

# State that is optional: it starts from scratch where the checkpoint has none.
SEEDS = "seeds/"
METRICS = "metrics/"
OPTIONAL = (SEEDS, METRICS, PROGRAM, KERAS_FILE)
MODEL = "model/"
COMPRESSION = "/compression/"
NUMBERED = re.compile(r"_\d+(/|$)")
OF_OPTIMIZER = re.compile(r"optimizer(\d+)/")


@contextlib.contextmanager
def open_parts(folder: Place, manifest: Manifest) -> Iterator[list[ArrayFile]]:
    """Opens all parts; `DataError` names one that is missing, damaged or other."""
    parts, files = len(manifest.sizes), []
    with contextlib.ExitStack() as stack:
        for number, size_bytes in enumerate(manifest.sizes):
            place = folder / part_name(number, parts)
            expected = identity(manifest.write, number, parts)
            file = open_arrays(place, size_bytes, expected)
            files.append(stack.enter_context(file))
        yield files


def identity(write: str, number: int, parts: int) -> dict[str, object]:
    """The identity of a part: its write, its number and the number of parts."""
    return {"write": write, "part": number, "parts": parts}


def check_parts(files: Sequence[ArrayFile], hosts: Hosts) -> None:
    """Verifies the checksums of this host's share of the parts; raises `DataError`."""
    for file in files[hosts.rank :: hosts.count]:
        for name in file.arrays:
            file.check(name)


def restore_entries(
    model: keras.Model,
    files: Sequence[ArrayFile],
    manifest: Manifest,
    hosts: Hosts,
    folder: Place,
    *,
    weights_only: bool,
) -> None:
    """Assigns the stored values to all variables; reads one variable at a time.

    Raises:
      ConfigurationError: the checkpoint is of another model.
      DataError: a part does not match the manifest.
    """
    why = None
    if weights_only:
        entries = entries_of(model)
        entries = {n: e for n, e in entries.items() if n.startswith(MODEL)}
    else:
        build_as_saved(model, manifest.optimizers)
        _create_lazy_state(model, manifest)
        entries = entries_of(model)
        why = other_sync(optimizer_records(model), manifest.optimizers)
    _check_same_model(entries, manifest.entries, folder, weights_only, why)
    _check_same_order(entries, manifest.entries)
    before = _Workers.of_manifest(manifest)
    now = _Workers.of_model(model, hosts)
    for name, entry in entries.items():
        record = manifest.entries.get(name)
        if record is not None:
            value = _value(name, entry, record, files, hosts)
            if isinstance(value, ReplicaValues):
                value = _for_workers(value, name, before, now)
            entry.restore(value)
        elif COMPRESSION in name:
            local = len(entry.read())
            nothing = np.zeros((local, *entry.shape), entry.read().dtype)
            entry.restore(ReplicaValues(nothing, nothing, 0, local))


def program_arrays(
    files: Sequence[ArrayFile], manifest: Manifest
) -> dict[str, np.ndarray]:
    """The arrays given to `save`, by name."""
    return {
        name.removeprefix(PROGRAM): files[record.parts[0]].read(name).copy()
        for name, record in manifest.entries.items()
        if name.startswith(PROGRAM) and record.kind == "whole"
    }


def _create_lazy_state(model: keras.Model, manifest: Manifest) -> None:
    """Creates state that the first steps would create, if the checkpoint has it."""
    seeds = [n.removeprefix(SEEDS) for n in manifest.entries if n.startswith(SEEDS)]
    make_global_seed_states(model.distribute_strategy, seeds)
    for number, optimizer in enumerate(optimizers_of(model)):
        group = f"optimizer{number}{COMPRESSION}"
        names = [n.removeprefix(group) for n in manifest.entries if n.startswith(group)]
        if names and strategy_of(optimizer) is not None:
            if not compression_entries(optimizer, names):
                raise ConfigurationError(
                    "The checkpoint holds residuals of compressed gradients, which "
                    "would be lost: this run does not compress. Train with the "
                    "Communication(compression=...) of the run that wrote it, or "
                    "restore the weights alone (weights_only=True)."
                )


def _check_same_model(
    entries: Mapping[str, Entry],
    records: Mapping[str, EntryRecord],
    folder: Place,
    weights_only: bool,
    why: str | None,
) -> None:
    """`why`: for which reason optimizers have other state; None: for none."""

    def another(name: str, difference: str, advice: str = "") -> ConfigurationError:
        if why is not None and OF_OPTIMIZER.match(name):
            return ConfigurationError(why)
        is_weight = name.startswith(MODEL)
        more = "" if is_weight else ", or restore only the weights (weights_only=True)"
        advice = advice or (
            f"{folder} is of another model or optimizer. Restore into the model that "
            f"was saved, or give this one another directory{more}"
        )
        return ConfigurationError(f"{difference}: {advice}.")

    for name, entry in entries.items():
        if name not in records:
            if name.startswith(OPTIONAL) or COMPRESSION in name:
                continue
            raise another(name, f"The checkpoint lacks {entry.path!r} ({name})")
        if records[name].dtype != entry.dtype and not weights_only:
            raise another(
                name,
                f"{entry.path!r} ({name}) is of {entry.dtype}, and in the checkpoint "
                f"of {records[name].dtype}",
                "use the dtype policy that the training started with, or restore the "
                "weights alone (weights_only=True)",
            )
        if records[name].shape != entry.shape:
            raise another(
                name,
                f"{entry.path!r} ({name}) has the shape {entry.shape}, but "
                f"{records[name].path!r} in the checkpoint has {records[name].shape}",
            )
    left = [n for n in records if n not in entries and not n.startswith(OPTIONAL)]
    if weights_only:
        left = [name for name in left if name.startswith(MODEL)]
    if left:
        raise another(
            left[0],
            f"The checkpoint holds {records[left[0]].path!r} ({left[0]}) and "
            f"{len(left) - 1} more that this model or optimizer lacks",
        )


def _check_same_order(
    entries: Mapping[str, Entry], records: Mapping[str, EntryRecord]
) -> None:
    """Refuses weights that lie in another order by the names that a user gave.

    Values are restored by place. Keras numbers the names that it gives itself, and
    counts on in each process: those with a number tell nothing.
    """

    def given(states: Mapping[str, Entry] | Mapping[str, EntryRecord]) -> list[str]:
        paths = [s.path for name, s in states.items() if name.startswith(MODEL)]
        return [path for path in paths if not NUMBERED.search(path)]

    now = given(entries)
    saved = given({name: records[name] for name in entries if name in records})
    before = Counter(saved)
    both = {path for path, n in Counter(now).items() if n == before[path] == 1}
    for here, there in zip(
        filter(both.__contains__, now), filter(both.__contains__, saved), strict=True
    ):
        if here != there:
            raise ConfigurationError(
                f"{here!r} stands where {there!r} does in the checkpoint: each would "
                "get the other's values. Build the model with its inputs, outputs and "
                "layers in the order in which the saved model had them."
            )


def _value(
    name: str,
    entry: Entry,
    record: EntryRecord,
    files: Sequence[ArrayFile],
    hosts: Hosts,
) -> np.ndarray | ReplicaValues:
    if record.kind == "ranks" and entry.kind == "ranks":
        return _rows(name, entry, record, files, hosts)
    value = whole_of(name, record, files)
    if value.shape != entry.shape:
        raise DataError(f"{record.path!r} ({name}) has the shape {value.shape}.")
    if entry.kind != "ranks":
        return value
    local = len(entry.read())
    ranks = hosts.rank * local, hosts.count * local
    if entry.is_sum:  # each replica gets its share
        return ReplicaValues(value[None], None, *ranks)
    return ReplicaValues(value[None], np.stack([value] * local), *ranks)


def whole_of(name: str, record: EntryRecord, files: Sequence[ArrayFile]) -> np.ndarray:
    """The value that one device without a strategy has."""
    if record.kind == "whole":
        return files[record.parts[0]].read(name)
    if record.kind == "shards":
        pieces = [
            file.read(name) if length else np.zeros(0, record.dtype)
            for file, length in zip(files, record.parts, strict=True)
        ]
        value = np.concatenate(pieces)
        if value.size != math.prod(record.shape):
            raise DataError(
                f"The parts of {record.path!r} ({name}) do not add up to the whole."
            )
        return value.reshape(record.shape)
    rows = np.concatenate(_parts_of_rows(name, record, files))
    if ACCUMULATOR_NAME in record.path:
        return sum_of(rows).astype(rows.dtype)
    return rows.sum(axis=0, dtype=rows.dtype) if name.startswith(METRICS) else rows[0]


@dataclasses.dataclass(frozen=True)
class _Workers:
    """The replicas of each host, and the group size of each optimizer."""

    replicas: tuple[int, ...]
    group_sizes: tuple[int | None, ...]

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> _Workers:
        sizes = (optimizer.group_size for optimizer in manifest.optimizers)
        return cls(manifest.replicas, tuple(sizes))

    @classmethod
    def of_model(cls, model: keras.Model, hosts: Hosts) -> _Workers:
        local = int(model.distribute_strategy.num_replicas_in_sync) // hosts.count
        sizes = (optimizer.group_size for optimizer in optimizer_records(model))
        return cls((local,) * hosts.count, tuple(sizes))


def _for_workers(
    rows: ReplicaValues, name: str, before: _Workers, now: _Workers
) -> ReplicaValues:
    """`rows` without own rows if replicas or groups differ from the checkpoint."""
    is_same = before.replicas == now.replicas
    group_size, of_optimizer = None, OF_OPTIMIZER.match(name)
    if of_optimizer is not None:
        number = int(of_optimizer[1])
        group_size = before.group_sizes[number]
        # Older files have None.
        is_same = is_same and group_size in (None, now.group_sizes[number])
    own = rows.own if is_same else None
    return dataclasses.replace(rows, own=own, group_size=group_size)


def _rows(
    name: str,
    entry: Entry,
    record: EntryRecord,
    files: Sequence[ArrayFile],
    hosts: Hosts,
) -> ReplicaValues:
    parts = _parts_of_rows(name, record, files)
    local = len(entry.read())
    first_rank, replicas = hosts.rank * local, hosts.count * local
    is_same = len(files) == hosts.count and {len(part) for part in parts} == {local}
    own = parts[hosts.rank] if is_same else None
    return ReplicaValues(np.concatenate(parts), own, first_rank, replicas)


def _parts_of_rows(
    name: str, record: EntryRecord, files: Sequence[ArrayFile]
) -> list[np.ndarray]:
    parts = [file.read(name) for file in files]
    if any(part.shape[1:] != record.shape for part in parts):
        raise DataError(
            f"{record.path!r} ({name}) does not have the shape {record.shape}."
        )
    return parts
