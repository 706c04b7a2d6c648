"""`Checkpoint`: the whole state of a training, written atomically."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import updates_all_variables
from tfdp.checkpoint.array_files import ArrayFile
from tfdp.checkpoint.directories import (
    check_directory,
    no_checkpoint,
    refuse_another_view,
)
from tfdp.checkpoint.entries import Entry, entries_of
from tfdp.checkpoint.hosts import Hosts, hosts_of
from tfdp.checkpoint.keras_file import keras_file_of
from tfdp.checkpoint.manifest import (
    KERAS_FILE,
    PROGRAM,
    UNFINISHED,
    UNSEEN,
    EntryRecord,
    Manifest,
    folders_newest_first,
    read_manifest,
)
from tfdp.checkpoint.optimizer_records import optimizer_records
from tfdp.checkpoint.restored import (
    check_parts,
    open_parts,
    program_arrays,
    restore_entries,
)
from tfdp.checkpoint.writer import Content, Writer
from tfdp.checks import check_whole
from tfdp.data.places import Place, place_of
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError

MOST_STEPS = 10**18 - 1
# Sent instead of an identity: the save before has not ended.
SKIPPED = -1
# Each note key may be used once.
_note_numbers = itertools.count()


@dataclass(frozen=True)
class Restored:
    """The result of restoring a checkpoint.

    Args:
      step: training steps before the checkpoint.
      directory: of the checkpoint.
      program: what `save` was given.
      damaged: why newer checkpoints could not be used.
      arrays: what `save` was given, by name.
    """

    step: int
    directory: str
    program: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class Checkpoint:
    """Saves the state of a training and restores it on any number of replicas.

    The state is the model, optimizers with their averages, accumulators, loss scale and
    schedule, seeds, metric sums, residuals of compressed gradients, and the weights of
    replicas in local training (`tfdp.sync`). Each host writes its part; worker 0
    completes the checkpoint with a manifest once all parts are on disk. `restore`
    reports checkpoints that are unfinished or damaged and uses the one before.

    `tfdp.callbacks.Checkpoint` calls it in `fit` and adds the place in the data.

    Args:
      directory: of the checkpoints, created if missing; all hosts must see it. May be a
        URL that `tf.io.gfile` opens (`gs://bucket/run`). For one training at a time.
      keep: how many whole checkpoints to keep, from 1.

    Raises:
      ConfigurationError: an argument is not as above.

    Cost: each of H hosts writes n / H of n replicated bytes, and its own shards.
    Training waits for a copy of these bytes in host memory and, on several hosts, for
    the exchange of one number; writing is asynchronous. The copy's memory is kept for
    the next save until `forget_copies`.

    ```python
    import tempfile

    import keras
    import numpy as np
    import tfdp

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    checkpoint = tfdp.checkpoint.Checkpoint(tempfile.mkdtemp())
    checkpoint.save(model, step=1)
    checkpoint.wait()
    print(checkpoint.restore(model).step)  # 1
    ```
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
        check_whole("keep", keep, least=1)
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise ConfigurationError(
                f"directory must be a path or a URL. Received: {directory!r}."
            )
        place = place_of(directory)
        # The program may change its working directory.
        self._directory: Place = place.absolute() if isinstance(place, Path) else place
        self._writer = Writer(self._directory, keep)
        self._copies = Copies()

    @property
    def directory(self) -> str:
        return str(self._directory)

    def check_directory(self, model: keras.Model) -> None:
        """Creates and checks the directory; call it on all hosts before the first step.

        Args:
          model: what will be saved.

        Raises:
          ConfigurationError: on all hosts: one cannot write to it, or sees another.

        Cost: one temporary file per host, and three small collectives.
        """
        check_directory(self._directory, hosts_of(model.distribute_strategy))

    def save(
        self,
        model: keras.Model,
        *,
        step: int,
        program: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Copies the state and starts to write it; call it on all hosts after a step.

        Waits for an earlier save first, until that one is `timeout_seconds` old.

        Args:
          model: built and compiled.
          step: training steps so far, from 0.
          program: further JSON values that `restore` returns.
          arrays: further arrays that `restore` returns, by name; the same on all hosts.

        Raises:
          ConfigurationError: the model is not built, `step` is not such a number, or
            `program` or `arrays` cannot be written.
          DataError: on all hosts: the save before failed, and this one has started; or
            it is still running, and this one is skipped.
          CollectiveError: another host was lost.
        """
        check_whole("step", step, least=0, most=MOST_STEPS)
        _check_more(program, arrays)
        hosts = hosts_of(_built(model, "saved"))
        # Parts of two calls must not be combined.
        number = secrets.randbits(32) if self._writer.has_ended() else SKIPPED
        if hosts.is_chief and number != SKIPPED:
            self._writer.remove_leftovers()
        number = hosts.number_of_chief(number, "name of the checkpoint")
        if number == SKIPPED:
            raise self._writer.still_writes()
        failed = self._writer.take_outcome()
        if failed is not None and not isinstance(failed, DataError):
            raise failed
        write = f"{number:08x}"
        try:
            content: Content = self._content(model, hosts, step, write, program, arrays)
        except TfdpError:
            raise
        except Exception as error:
            # Such as no memory for the copies; the note to other workers says so.
            content = f"{type(error).__name__}: {str(error)[:300]}"
        self._writer.start(step, write, content, hosts)
        if failed is not None:
            raise failed

    def _content(
        self,
        model: keras.Model,
        hosts: Hosts,
        step: int,
        write: str,
        program: Mapping[str, Any] | None,
        arrays: Mapping[str, np.ndarray] | None,
    ) -> Content:
        state = entries_of(model)
        entries = state | program_entries(arrays or {})
        records, mine = assign_to_hosts(entries, hosts)
        strategy = model.distribute_strategy
        replicas = int(strategy.num_replicas_in_sync) // getattr(strategy, "hosts", 1)
        copies = self._copies.take({name: entries[name].read for name in mine})
        # The same on all hosts; worker 0 writes it.
        file = keras_file_of(model, state)
        if file is not None and hosts.is_chief:
            whole = ("whole", (len(file),), "uint8", (0,))
            records[KERAS_FILE] = EntryRecord(KERAS_FILE, *whole)
            copies[KERAS_FILE] = np.frombuffer(file, np.uint8)
        optimizers, program = optimizer_records(model), dict(program or {})
        parts = (), (replicas,)
        return Manifest(write, step, *parts, records, program, optimizers), copies

    def wait(self) -> None:
        """Waits until the save is on disk, on all hosts.

        Raises:
          DataError: it could not be written, earlier checkpoints being unchanged; or it
            is `timeout_seconds` old and still running.
          CollectiveError: another host was lost.

        Warns:
          CheckpointWarning: it is written, but an old one could not be deleted.
        """
        if not self._writer.has_ended():
            raise self._writer.still_writes()
        failed = self._writer.take_outcome()
        if failed is not None:
            raise failed

    def forget_copies(self) -> None:
        """Waits, and frees the memory of the copies, which is kept for the next `save`.

        Raises:
          DataError, CollectiveError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._copies.forget()

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, newest first; reads manifests only."""
        steps = []
        for folder in folders_newest_first(self._directory):
            with contextlib.suppress(DataError):
                steps.append(read_manifest(folder).step)
        return steps

    def restore(
        self, model: keras.Model, *, weights_only: bool = False, must_exist: bool = True
    ) -> Restored | None:
        """Restores the newest whole checkpoint into a model; call it on all hosts.

        The number of hosts and replicas, and `shard=`, may differ from when it was
        saved; plain Keras works too. See `tfdp.checkpoint.entries` for per-replica
        state.

        Args:
          model: built, of the same architecture as the saved one.
          weights_only: leave optimizer, metrics and the rest as they are: to predict,
            or to start another training.
          must_exist: raise an error if there is no checkpoint.

        Returns:
          What was restored; None if there is no checkpoint and `must_exist=False`.

        Raises:
          ConfigurationError: the model, or its optimizer, is another one.
          DataError: there is no checkpoint, or none can be used.

        Warns:
          CheckpointWarning: for each newer checkpoint that cannot be used.

        Cost: reads all bytes twice, first to verify checksums; downloads a URL once.
        """
        self.wait()
        hosts = hosts_of(_built(model, "restored"))
        # All use the list of worker 0: a file system may be stale on others.
        found = folders_newest_first(self._directory)
        names = hosts.text_of_chief(" ".join(path.name for path in found))
        if not names:
            refuse_another_view(self._directory, found, hosts, f"{next(_note_numbers)}")
        damaged: list[str] = []
        for name in names.split():
            folder = self._directory / name
            with contextlib.ExitStack() as stack:
                usable = self._usable(folder, hosts, damaged, stack)
                if usable is None:
                    continue
                manifest, files = usable
                restore_entries(
                    model, files, manifest, hosts, folder, weights_only=weights_only
                )
                arrays = program_arrays(files, manifest)
            return Restored(
                manifest.step, str(folder), manifest.program, tuple(damaged), arrays
            )
        whole = [why for why in damaged if UNFINISHED not in why]
        if whole:
            raise DataError(
                f"No checkpoint in {self._directory} can be used: {' '.join(whole)} "
                "Copy them from their source again, or start in another directory."
            )
        if must_exist:
            raise no_checkpoint(self._directory)
        return None

    def _usable(
        self,
        folder: Place,
        hosts: Hosts,
        damaged: list[str],
        stack: contextlib.ExitStack,
    ) -> tuple[Manifest, list[ArrayFile]] | None:
        """The manifest and open parts if no host found damage; else notes why."""
        why, usable = "", None
        try:
            manifest = read_manifest(folder)
            files = stack.enter_context(open_parts(folder, manifest))
            check_parts(files, hosts)
            usable = manifest, files
        except DataError as error:
            why = str(error)
        notes = hosts.share_note(f"checkpoint {next(_note_numbers)} {folder.name}", why)
        if not notes[0]:
            # Worker 0 has its manifest: the other host looks into another directory.
            notes = {rank: n.replace(UNFINISHED, UNSEEN) for rank, n in notes.items()}
        reasons = [
            f"{note} (seen by worker {rank})" if hosts.count > 1 else note
            for rank, note in sorted(notes.items())
            if note
        ]
        if not reasons:
            return usable
        damaged.append(reasons[0])
        if UNFINISHED not in reasons[0]:
            self._writer.leave_out(folder)
            warnings.warn(
                f"A checkpoint cannot be used; trying the one before it: {reasons[0]}",
                CheckpointWarning,
                stacklevel=4,
            )
        return None


def _built(model: Any, what: str) -> tf.distribute.Strategy:
    """The strategy of a built model; `ConfigurationError` if it is not built."""
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigurationError(
            f"Only a built model can be {what}: give it an Input, call it on a batch, "
            f"or call build(shape). Received: {model!r}."
        )
    compiled = getattr(model, "optimizer", None)
    if compiled is not None and not compiled.built and updates_all_variables(model):
        # As Keras does before the first step: the slots are part of the training. A
        # custom train_step alone determines its optimizer's variables.
        with model.distribute_strategy.scope():
            compiled.build(model.trainable_variables)
    return model.distribute_strategy


class Copies:
    """Copies of arrays that reuse the memory of the copies before.

    New memory pages cost more than the copy: 2.1 against 8 GB/s on Linux.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(
        self, reads: Mapping[str, Callable[[], np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Copies values, overwriting the copies taken before.

        Args:
          reads: name -> function that returns a value; its memory may change later.
        """
        kept, self._kept = self._kept, {}
        for name, read in reads.items():
            self._kept[name] = _copy(read(), kept.pop(name, None))
        return dict(self._kept)

    def forget(self) -> None:
        self._kept = {}


def _copy(value: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
        kept = np.empty(value.shape, value.dtype)
    np.copyto(kept, value)
    return kept


def _check_more(program: Any, arrays: Any) -> None:
    """Refuses what could not be written, before a thread begins to write."""
    for name, given in (("program", program), ("arrays", arrays)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigurationError(
                f"{name} must be None or a dict by name. Received: {type(given)}."
            )
    try:
        json.dumps(dict(program or {}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"program must hold JSON values only; arrays go into arrays=. {error}."
        ) from error


def program_entries(arrays: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """Entries of the arrays given to `save`."""
    entries = {}
    for name, array in arrays.items():
        read = functools.partial(np.asarray, array)
        shape, dtype = read().shape, read().dtype.name
        entry = Entry(name, "whole", shape, dtype, read, lambda value: None)
        entries[f"{PROGRAM}{name}"] = entry
    return entries


def assign_to_hosts(
    entries: Mapping[str, Entry], hosts: Hosts
) -> tuple[dict[str, EntryRecord], list[str]]:
    """The manifest's records of all entries, and the names of this host's entries."""
    records, mine = {}, []
    filled = [0] * hosts.count
    for name, entry in entries.items():
        parts = entry.lengths
        is_writer = True
        if entry.kind == "whole":
            # Replicated: the host with the least data writes it.
            part = filled.index(min(filled))
            filled[part] += math.prod(entry.shape)
            parts, is_writer = (part,), part == hosts.rank
        elif entry.kind == "shards":
            is_writer = bool(parts[hosts.rank])
        records[name] = EntryRecord(
            entry.path, entry.kind, entry.shape, entry.dtype, parts
        )
        if is_writer:
            mine.append(name)
    return records, mine
