"""`Checkpoint`: all that a training is, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import itertools
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
from tfdp.checkpoint.manifest import (
    UNFINISHED,
    UNSEEN,
    Manifest,
    Noted,
    folders_newest_first,
    read_manifest,
)
from tfdp.checkpoint.model_description import architecture_of, noted_optimizers
from tfdp.checkpoint.restored import (
    GIVEN,
    check_parts,
    give_back,
    given_arrays,
    open_parts,
)
from tfdp.checkpoint.writer import Content, Writer
from tfdp.checks import is_whole
from tfdp.data.places import Place, place_of
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError

MOST_STEPS = 10**18 - 1
# In the place of an identity: the save before has not ended.
LEFT_OUT = -1
# A key of a note may be used once, by whichever object.
_looks = itertools.count()


@dataclass(frozen=True)
class Restored:
    """What was restored.

    Args:
      step: how many training steps came before.
      directory: of the checkpoint that it came from.
      program: what `save` was given beside the model.
      damaged: newer ones that could not be used, and why.
      arrays: what `save` was given, by name.
    """

    step: int
    directory: str
    program: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class Checkpoint:
    """Saves all that a training is, and gives it back to any number of replicas.

    Model, optimizers with their averages, accumulators, loss scale and schedule, seeds,
    the sums of metrics, what compressed gradients have still to send, and the weights
    of replicas that train apart (`tfdp.sync`). Each host writes its part; worker 0
    makes a checkpoint of the parts, by a file that it writes last, once all of them are
    on the disk. One that was not finished, or was damaged, is never taken for a whole
    one: `restore` names it and takes the one before.

    `tfdp.callbacks.Checkpoint` calls it in `fit`, and knows the place in the data.

    Args:
      directory: of the checkpoints, made when it is not there; one that all hosts see.
        A URL that `tf.io.gfile` opens (`gs://bucket/run`) as well. For one training at
        a time.
      keep: how many whole checkpoints are left there, from 1.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: of the n bytes that all replicas have alike each of H hosts writes n / H, of
    shards its own. Training waits for a copy of these bytes within the host's memory,
    and, on several hosts, for the exchange of one number; writing runs beside it. The
    memory of the copy is kept for the next one until `forget_copies`.

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
        if not is_whole(keep, least=1):
            raise ConfigurationError(
                f"keep must be an int of at least 1. Received: {keep!r}."
            )
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise ConfigurationError(
                f"directory must be a path or a URL. Received: {directory!r}."
            )
        place = place_of(directory)
        # A program may go to another folder in between.
        self._directory: Place = place.absolute() if isinstance(place, Path) else place
        self._writer = Writer(self._directory, keep)
        self._copies = Copies()

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._directory)

    def check_directory(self, model: keras.Model) -> None:
        """Makes the directory, so that what is wrong with it is known early.

        Call it on all hosts, before the first step.

        Args:
          model: what will be saved.

        Raises:
          ConfigurationError: a host cannot write to it, or it is another one there; the
            same error on all hosts.

        Cost: one file for each host, for a moment, and three small exchanges.
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
        """Takes a copy, and begins to write it.

        Call it on all hosts after the same step. While an earlier one is still being
        written, it waits for that first, until that one is `timeout_seconds` old.

        Args:
          model: built and compiled.
          step: how many training steps came before, from 0.
          program: what else shall be there after `restore`: what JSON can hold.
          arrays: and what it cannot, by name; the same on all hosts.

        Raises:
          ConfigurationError: the model is not built, or `step` is no such number.
          DataError: the checkpoint before could not be written, and this one is begun
            all the same; or it is still being written, and this one is left out. The
            same error on all hosts.
          CollectiveError: another host was lost meanwhile.
        """
        if not is_whole(step, least=0, most=MOST_STEPS):
            raise ConfigurationError(
                f"step must be an int from 0 to {MOST_STEPS}. Received: {step!r}."
            )
        hosts = hosts_of(_built(model, "saved"))
        # An identity for each call: parts of two calls cannot be taken for one.
        number = secrets.randbits(32) if self._writer.has_ended() else LEFT_OUT
        if hosts.is_chief and number != LEFT_OUT:
            self._writer.remove_leftovers()
        number = hosts.number_of_chief(number, "name of the checkpoint")
        if number == LEFT_OUT:
            raise self._writer.still_writes()
        failed = self._writer.take_outcome()
        if failed is not None and not isinstance(failed, DataError):
            raise failed
        write = f"{number:08x}"
        content: Content
        try:
            content = self._content(model, hosts, step, write, program, arrays)
        except TfdpError:
            raise
        except Exception as error:
            # Such as no memory for the copies. The note to the other workers says so.
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
        entries = entries_of(model) | given_entries(arrays or {})
        noted, mine = deal_out(entries, hosts)
        manifest = Manifest(
            write,
            step,
            (),
            (_local_replicas(model),),
            noted,
            dict(program or {}),
            noted_optimizers(model),
            architecture_of(model),
        )
        return manifest, self._copies.take({name: entries[name].read for name in mine})

    def wait(self) -> None:
        """Waits until what was saved is on the disk, on all hosts.

        Raises:
          DataError: it could not be written; the checkpoints before are as they were.
            Or it is `timeout_seconds` old and still being written.
          CollectiveError: another host was lost meanwhile.

        Warns:
          CheckpointWarning: it is written, and an old one could not be deleted.
        """
        if not self._writer.has_ended():
            raise self._writer.still_writes()
        failed = self._writer.take_outcome()
        if failed is not None:
            raise failed

    def forget_copies(self) -> None:
        """Gives back the memory of the copies, which is kept for the next `save`.

        Raises:
          DataError, CollectiveError: as `wait`, which comes first.
        """
        try:
            self.wait()
        finally:
            self._copies.forget()

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, newest first; nothing is read but their
        manifests."""
        steps = []
        for folder in folders_newest_first(self._directory):
            try:
                steps.append(read_manifest(folder).step)
            except DataError:
                continue
        return steps

    def restore(
        self,
        model: keras.Model,
        *,
        weights_only: bool = False,
        must_exist: bool = True,
    ) -> Restored | None:
        """Gives a model what the newest checkpoint that is whole and undamaged holds.

        Call it on all hosts. The number of hosts and replicas, and `shard=`, may be
        other ones than when it was saved, none for plain Keras: see
        `tfdp.checkpoint.entries` for what replicas have of their own.

        Args:
          model: built, and alike to the one that was saved.
          weights_only: leave optimizer, metrics and all else as they are: for a model
            that shall predict, or start another training.
          must_exist: whether to raise an error when there is no checkpoint.

        Returns:
          What was restored; None, with `must_exist=False`: there is no checkpoint.

        Raises:
          ConfigurationError: the model, or its optimizer, is another one.
          DataError: there is no checkpoint, or none of them can be used.

        Warns:
          CheckpointWarning: for each newer one that could not be used, with the reason.

        Cost: reads what was written twice, the first time to see that it is undamaged;
        what is behind a URL is brought to this machine once.
        """
        self.wait()
        hosts = hosts_of(_built(model, "restored"))
        # All go by what worker 0 sees: a file system may show others less, for a while.
        found = folders_newest_first(self._directory)
        names = hosts.text_of_chief(" ".join(path.name for path in found))
        if not names:
            refuse_another_view(self._directory, found, hosts, f"{next(_looks)}")
        damaged: list[str] = []
        for name in names.split():
            folder = self._directory / name
            with contextlib.ExitStack() as stack:
                usable = self._usable(folder, hosts, damaged, stack)
                if usable is None:
                    continue
                manifest, files = usable
                give_back(model, files, manifest, hosts, weights_only=weights_only)
                arrays = given_arrays(files, manifest)
            return Restored(
                manifest.step, str(folder), manifest.program, tuple(damaged), arrays
            )
        whole = [why for why in damaged if UNFINISHED not in why]
        if whole:
            raise DataError(
                f"No checkpoint in {self._directory} can be used: {' '.join(whole)} "
                "Bring them again from where they were copied, or give another "
                "directory to begin anew."
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
        """The manifest and the parts, if no host has found anything wrong; else notes
        why. The parts are open until `stack` closes them."""
        why, usable = "", None
        try:
            manifest = read_manifest(folder)
            files = stack.enter_context(open_parts(folder, manifest))
            check_parts(files, hosts)
            usable = manifest, files
        except DataError as error:
            why = str(error)
        notes = hosts.share_note(f"checkpoint {next(_looks)} {folder.name}", why)
        if not notes[0]:
            # Worker 0 has its manifest: who has not looks into another directory.
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
                f"A checkpoint cannot be used, and the one before is taken: "
                f"{reasons[0]}",
                CheckpointWarning,
                stacklevel=4,
            )
        return None


def _built(model: Any, what: str) -> tf.distribute.Strategy:
    """The strategy of a model that is built, and its optimizer as well.

    Raises:
      ConfigurationError: it is not.
    """
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigurationError(
            f"A model is {what} when it is built: give it an Input, call it on a batch "
            f"or build(shape). Received: {model!r}."
        )
    compiled = getattr(model, "optimizer", None)
    if compiled is not None and not compiled.built and updates_all_variables(model):
        # As Keras does before the first step: its slots are part of the training. Of
        # another one only the step knows which variables are its own.
        with model.distribute_strategy.scope():
            compiled.build(model.trainable_variables)
    return model.distribute_strategy


def _local_replicas(model: keras.Model) -> int:
    strategy = model.distribute_strategy
    return int(strategy.num_replicas_in_sync) // getattr(strategy, "hosts", 1)


# Copies of a training's values that are taken again and again.


class Copies:
    """Copies into the memory of the copies before.

    New memory pages cost more than the copy itself: measured on Linux, 2.1 GB/s
    into new pages and 8 into pages that are there.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(
        self, reads: Mapping[str, Callable[[], np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Copies, in the memory of those that were taken before: nobody needs these.

        Args:
          reads: by name; what gives a value, maybe in memory that changes later.
        """
        kept, self._kept = self._kept, {}
        for name, read in reads.items():
            self._kept[name] = _copy(read(), kept.pop(name, None))
        return dict(self._kept)

    def forget(self) -> None:
        """Gives the memory back."""
        self._kept = {}


def _copy(value: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
        kept = np.empty(value.shape, value.dtype)
    np.copyto(kept, value)
    return kept


# Which host writes what of a checkpoint.


def given_entries(arrays: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """The entries of arrays that `save` was given beside the model."""
    given = {name: np.asarray(array) for name, array in arrays.items()}
    return {
        f"{GIVEN}{name}": Entry(
            name,
            "whole",
            array.shape,
            array.dtype.name,
            functools.partial(np.asarray, array),
            lambda value: None,
        )
        for name, array in given.items()
    }


def deal_out(
    entries: Mapping[str, Entry], hosts: Hosts
) -> tuple[dict[str, Noted], list[str]]:
    """What the manifest says of the entries, and the names of those of this host."""
    noted, mine = {}, []
    filled = [0] * hosts.count
    for name, entry in entries.items():
        parts = entry.lengths
        has_some = True
        if entry.kind == "whole":
            # All have it: the least loaded one writes it.
            part = filled.index(min(filled))
            filled[part] += math.prod(entry.shape)
            parts, has_some = (part,), part == hosts.rank
        elif entry.kind == "shards":
            has_some = bool(parts[hosts.rank])
        noted[name] = Noted(entry.path, entry.kind, entry.shape, entry.dtype, parts)
        if has_some:
            mine.append(name)
    return noted, mine
