"""Writes checkpoints asynchronously, one at a time, in a thread.

Every save has one outcome, which worker 0 decides from the notes of all workers about
their parts, and which all workers raise as the same error. The waits for notes have no
deadline, as a disk may be slow; they end when a worker is lost.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from tfdp.checkpoint.array_files import write_arrays
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import (
    UNFINISHED,
    Manifest,
    folder_name,
    folders_newest_first,
    part_name,
    read_manifest,
    remove_folder,
    remove_unfinished,
    write_manifest,
)
from tfdp.checkpoint.restored import identity
from tfdp.cluster import progress
from tfdp.cluster.worker_names import name_workers
from tfdp.data.places import Place
from tfdp.errors import CheckpointWarning, DataError, TfdpError
from tfdp.files.checked_json import parse_json

# Of failed workers: a full shared disk fails on each of them.
MOST_NAMED = 8
# What to save, or why this worker has nothing to save.
Content: TypeAlias = tuple[Manifest, Mapping[str, np.ndarray]] | str


@dataclass
class _Save:
    """One save, until its outcome is taken."""

    folder: Place
    write: str
    step: int
    hosts: Hosts
    thread: threading.Thread
    began_seconds: float  # by the monotonic clock
    waits_for: str = ""  # the key of the notes that it waits for
    error: TfdpError | None = None  # why there is no checkpoint
    warning: str = ""  # what else failed


class Writer:
    """Writes checkpoints to `directory` and keeps the `keep` newest whole ones."""

    def __init__(self, directory: Place, keep: int):
        self._directory = directory
        self._keep = keep
        self._save: _Save | None = None
        self._damaged: set[str] = set()
        # A killed run may have left some.
        self._may_have_leftovers = True

    def leave_out(self, folder: Place) -> None:
        """Does not count a damaged checkpoint: the one before it is needed."""
        self._damaged.add(folder.name)

    def remove_leftovers(self) -> None:
        """Removes the folders of failed saves; on worker 0, while no worker writes.

        On a nearly full disk the next save needs that room.
        """
        if not self._may_have_leftovers:
            return
        self._may_have_leftovers = False
        try:
            for folder in folders_newest_first(self._directory):
                self._remove_unfinished(folder)
        except Exception:
            self._may_have_leftovers = True

    def _remove_unfinished(self, folder: Place) -> None:
        try:
            remove_unfinished(folder)
        except Exception:
            # Retried before the next save, which fails if it lacks the room.
            self._may_have_leftovers = True

    def start(self, step: int, write: str, content: Content, hosts: Hosts) -> None:
        """Starts to write; the outcome of the save before must have been taken.

        `content` has the manifest, without sizes and replicas of the parts, and this
        host's arrays, which must no longer change; or why there are none.
        """

        def run() -> None:
            try:
                save.warning = self._write(save, content)
            except TfdpError as error:
                save.error = error
            except Exception as error:
                save.error = _failed(save, f"worker {hosts.rank}: {_error_text(error)}")

        folder = self._directory / folder_name(step, write)
        # Not a daemon: the program waits for it when it exits.
        thread = threading.Thread(target=run, name="tfdp-checkpoint")
        save = _Save(folder, write, step, hosts, thread, time.monotonic())
        self._save = save
        thread.start()

    def has_ended(self) -> bool:
        """Waits for the save before; false if it takes longer than `timeout_seconds`.

        The time starts with the save. A single host waits without limit.
        """
        save = self._save
        if save is None:
            return True
        seconds = save.hosts.timeout_seconds
        if seconds is not None:
            seconds = max(seconds - (time.monotonic() - save.began_seconds), 0.0)
        save.thread.join(seconds)
        return not save.thread.is_alive()

    def take_outcome(self) -> TfdpError | None:
        """Waits for the save before; returns its error, once, or warns."""
        save, self._save = self._save, None
        if save is None:
            return None
        save.thread.join()
        if save.warning:
            warnings.warn(save.warning, CheckpointWarning, stacklevel=4)
        return save.error

    def still_writes(self) -> DataError:
        """The error for a save that is still running, with the workers it waits for."""
        save = self._save
        if save is None:
            return DataError("No checkpoint is being written.")
        return DataError(
            f"The checkpoint {save.folder} is still being written after more than "
            f"{save.hosts.timeout_seconds or 0:g} seconds, by "
            f"{name_workers(save.hosts.without_note(save.waits_for))}; no other save "
            "starts before it ends. Check that worker's disk, or save less often."
        )

    def _write(self, save: _Save, content: Content) -> str:
        """Returns what failed after the manifest was written; the same on all."""

        def share(key: str, value: object) -> dict[int, str]:
            save.waits_for, note = key, json.dumps(value)
            return save.hosts.share_note(key, note, has_deadline=False)

        # Set before the part is written, which may take long.
        key = save.waits_for = f"checkpoint {save.write}"
        notes = share(key, self._write_part(save, content))
        is_chief = save.hosts.is_chief
        outcome = self._finish(save, content, notes) if is_chief else {}
        outcome = parse_json(share(f"{key} has ended", outcome)[0])
        if outcome["error"]:
            # If workers do not share a directory, this part is still here.
            self._remove_unfinished(save.folder)
            raise DataError(str(outcome["error"]))
        progress.note_saved(save.step)
        return str(outcome["warning"])

    def _write_part(self, save: _Save, content: Content) -> dict[str, object]:
        """Writes this host's part; returns the note about it."""
        if isinstance(content, str):
            return {"error": content}
        manifest, arrays = content
        rank, count = save.hosts.rank, save.hosts.count
        try:
            save.folder.mkdir(parents=True, exist_ok=True)
            place = save.folder / part_name(rank, count)
            size_bytes = write_arrays(place, arrays, identity(save.write, rank, count))
        except Exception as error:
            return {"error": _error_text(error)}
        return {"size": size_bytes, "replicas": manifest.replicas[0]}

    def _finish(
        self, save: _Save, content: Content, notes: Mapping[int, str]
    ) -> dict[str, str]:
        """Completes the checkpoint on worker 0; returns the outcome for all."""
        failed = ""
        try:
            parts = [parse_json(notes[rank]) for rank in range(save.hosts.count)]
            failed = _failed_parts(parts) or _unseen_parts(save.folder, parts)
            if not failed and not isinstance(content, str):
                sizes = tuple(int(part["size"]) for part in parts)
                replicas = tuple(int(part["replicas"]) for part in parts)
                manifest = replace(content[0], sizes=sizes, replicas=replicas)
                write_manifest(save.folder, manifest)
        except Exception as error:
            failed = f"worker 0 could not finish it ({_error_text(error)})"
        # A failure after the manifest was renamed leaves a whole checkpoint.
        if failed and not _is_whole(save.folder):
            self._remove_unfinished(save.folder)
            return {"error": str(_failed(save, failed)), "warning": ""}
        failed = "; ".join(filter(None, (failed, self._remove_old(save.folder))))
        if failed:
            failed = f"The checkpoint {save.folder} is whole, but {failed}."
        return {"error": "", "warning": failed}

    def _remove_old(self, newest: Place) -> str:
        """Removes old and unfinished checkpoints; returns what could not be removed."""
        failed: list[str] = []
        try:
            for folder in self._too_many(newest):
                try:
                    remove_folder(folder)
                except Exception as error:
                    self._may_have_leftovers = True
                    failed.append(f"{folder.name} ({_error_text(error)})")
        except Exception as error:
            failed.append(f"old checkpoints ({_error_text(error)})")
        if not failed:
            return ""
        return f"worker 0 could not delete {', '.join(failed[:MOST_NAMED])}"

    def _too_many(self, newest: Place) -> Iterator[Place]:
        whole, is_before = 0, False
        for folder in folders_newest_first(self._directory):
            if folder == newest:
                whole, is_before = whole + 1, True
                continue
            is_unfinished, is_whole = False, folder.name not in self._damaged
            try:
                read_manifest(folder)
            except DataError as error:
                # A manifest that cannot be read now, or here, may be good.
                is_unfinished, is_whole = UNFINISHED in str(error), False
            is_whole = is_whole and folder.name not in self._damaged
            if is_whole and _step_of(folder) == _step_of(newest):
                yield folder  # the newest replaces it, as at the end of a training
                continue
            whole += is_whole
            has_enough = whole > self._keep if is_whole else whole >= self._keep
            # Another host may have started to write a newer one.
            if has_enough or (is_unfinished and is_before):
                yield folder


def _step_of(folder: Place) -> str:
    return str(folder.name).rpartition("-")[0]


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _failed(save: _Save, what: str) -> DataError:
    return DataError(
        f"The checkpoint {save.folder} of step {save.step} was not written: {what}. "
        "Earlier checkpoints are unchanged."
    )


def _failed_parts(parts: list[dict[str, Any]]) -> str:
    failed = [
        f"worker {rank} could not write its part ({part['error']})"
        for rank, part in enumerate(parts)
        if "error" in part
    ]
    more = f"; and {len(failed) - MOST_NAMED} more" if failed[MOST_NAMED:] else ""
    return "; ".join(failed[:MOST_NAMED]) + more


def _unseen_parts(folder: Place, parts: list[dict[str, Any]]) -> str:
    for rank, part in enumerate(parts):
        path = folder / part_name(rank, len(parts))
        try:
            why, found = "", path.stat().st_size
        except (OSError, DataError) as error:
            why, found = f" ({_error_text(error)})", -1
        if found != part["size"]:
            return (
                f"worker {rank} has written its part, but worker 0 does not find it at "
                f"{path}{why}. Give a directory that all hosts see: a shared file "
                "system, or a URL (gs://bucket/run). Give each training its own "
                "directory: two in one remove each other's unfinished files"
            )
    return ""


def _is_whole(folder: Place) -> bool:
    try:
        read_manifest(folder)
    except DataError:
        return False
    return True
