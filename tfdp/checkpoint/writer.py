"""Writes a checkpoint beside the training: one at a time, in a thread of its own.

Every save has one outcome. Worker 0 decides it once the notes of all workers say how
their parts ended, and all workers get it: whatever failed, on any worker, each of them
raises the same error, and none waits for a note that does not come. These waits have no
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
from tfdp.data.places import Place
from tfdp.errors import CheckpointWarning, DataError, TfdpError
from tfdp.files.checked_json import parse_json
from tfdp.hosts.worker_names import name_workers

# Of the workers whose parts failed: a full disk that all share fails on each of them.
MOST_NAMED = 8
# What is saved, or why this worker has none of it.
Content: TypeAlias = tuple[Manifest, Mapping[str, np.ndarray]] | str


@dataclass
class _Save:
    """One save, from its beginning until its outcome was taken.

    Args:
      folder: of the checkpoint.
      write: its identity.
      step: how many training steps came before.
      hosts: who writes together.
      thread: that writes.
      began_seconds: when, by the monotonic clock.
      waits_for: the key of the notes that it waits for.
      error: why there is no checkpoint.
      warning: what else failed.
    """

    folder: Place
    write: str
    step: int
    hosts: Hosts
    thread: threading.Thread
    began_seconds: float
    waits_for: str = ""
    error: TfdpError | None = None
    warning: str = ""


class Writer:
    """Writes what it is given; `take_outcome` says how the last one ended.

    Args:
      directory: of the checkpoints.
      keep: how many whole ones are left there.
    """

    def __init__(self, directory: Place, keep: int):
        self._directory = directory
        self._keep = keep
        self._save: _Save | None = None
        self._damaged: set[str] = set()
        # A start that was killed may have left some.
        self._may_have_leftovers = True

    def leave_out(self, folder: Place) -> None:
        """Counts one that was found damaged for none: what is before it is needed."""
        self._damaged.add(folder.name)

    def remove_leftovers(self) -> None:
        """Removes what failed saves have left; on worker 0, while no worker writes.

        A nearly full disk needs that room for the next save.
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
            # Tried again before the next save, which fails if it lacks the room.
            self._may_have_leftovers = True

    def start(
        self,
        step: int,
        write: str,
        content: Content,
        hosts: Hosts,
    ) -> None:
        """Begins to write; the outcome of the one before must have been taken.

        Args:
          step: how many training steps came before.
          write: the identity of this save.
          content: the manifest, without the parts' sizes and hosts' replicas, and this
            host's arrays by name, which do not change any more; or why there are none.
          hosts: who writes together.
        """

        def run() -> None:
            try:
                save.warning = self._write(save, content)
            except TfdpError as error:
                save.error = error
            except Exception as error:
                save.error = _failed(save, f"worker {hosts.rank}: {_words(error)}")

        folder = self._directory / folder_name(step, write)
        # Not a daemon: a program that ends lets it come to its end.
        thread = threading.Thread(target=run, name="tfdp-checkpoint")
        save = _Save(folder, write, step, hosts, thread, time.monotonic())
        self._save = save
        thread.start()

    def has_ended(self) -> bool:
        """Waits for the save before; false: it lasts longer than `timeout_seconds`.

        Counted from its beginning. Of one host alone there is no such time.
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
        """Waits for the save before; what failed, once.

        Warns:
          CheckpointWarning: a checkpoint was written, and something else failed.
        """
        save, self._save = self._save, None
        if save is None:
            return None
        save.thread.join()
        if save.warning:
            warnings.warn(save.warning, CheckpointWarning, stacklevel=4)
        return save.error

    def still_writes(self) -> DataError:
        """Why no other save can begin, with the workers that the save waits for."""
        save = self._save
        if save is None:
            return DataError("No checkpoint is being written.")
        return DataError(
            f"The checkpoint {save.folder} is still being written after more than "
            f"{save.hosts.timeout_seconds or 0:g} seconds, by "
            f"{name_workers(save.hosts.without_note(save.waits_for))}; no other one is "
            "begun before it has ended. Look at the disk of that worker. If it is only "
            "slow, save less often."
        )

    def _write(self, save: _Save, content: Content) -> str:
        """What failed although there is a checkpoint now.

        Raises:
          DataError: there is none; the same on all workers.
          CollectiveError: a worker was lost.
        """
        hosts = save.hosts
        save.waits_for = f"checkpoint {save.write}"
        said = json.dumps(self._write_part(save, content))
        notes = hosts.share_note(save.waits_for, said, has_deadline=False)
        outcome = {}
        if hosts.is_chief:
            outcome = self._finish(save, content, notes)
        save.waits_for = f"checkpoint {save.write} has ended"
        said = json.dumps(outcome)
        notes = hosts.share_note(save.waits_for, said, has_deadline=False)
        outcome = parse_json(notes[0])
        if outcome["error"]:
            # Where the directory is not that of worker 0 this part is still there.
            self._remove_unfinished(save.folder)
            raise DataError(str(outcome["error"]))
        progress.note_saved(save.step)
        return str(outcome["warning"])

    def _write_part(
        self,
        save: _Save,
        content: Content,
    ) -> dict[str, object]:
        """Writes this host's part; the note of how that ended."""
        if isinstance(content, str):
            return {"error": content}
        manifest, arrays = content
        rank, count = save.hosts.rank, save.hosts.count
        try:
            save.folder.mkdir(parents=True, exist_ok=True)
            size_bytes = write_arrays(
                save.folder / part_name(rank, count),
                arrays,
                identity(save.write, rank, count),
            )
        except Exception as error:
            return {"error": _words(error)}
        return {"size": size_bytes, "replicas": manifest.replicas[0]}

    def _finish(
        self,
        save: _Save,
        content: Content,
        notes: Mapping[int, str],
    ) -> dict[str, str]:
        """On worker 0: makes a checkpoint of the parts; the outcome for all."""
        failed = ""
        try:
            said = [parse_json(notes[rank]) for rank in range(save.hosts.count)]
            failed = _failed_parts(said) or _unseen_parts(save.folder, said)
            if not failed and not isinstance(content, str):
                manifest = replace(
                    content[0],
                    sizes=tuple(int(theirs["size"]) for theirs in said),
                    replicas=tuple(int(theirs["replicas"]) for theirs in said),
                )
                write_manifest(save.folder, manifest)
        except Exception as error:
            failed = f"worker 0 could not finish it ({_words(error)})"
        # A failure after the manifest was renamed leaves a whole checkpoint.
        if failed and not _is_whole(save.folder):
            self._remove_unfinished(save.folder)
            return {"error": str(_failed(save, failed)), "warning": ""}
        failed = "; ".join(filter(None, (failed, self._remove_old(save.folder))))
        if failed:
            failed = f"The checkpoint {save.folder} is whole, but {failed}."
        return {"error": "", "warning": failed}

    def _remove_old(self, newest: Place) -> str:
        """Leaves the newest ones, and nothing that was not finished before them.

        Returns:
          What could not be removed.
        """
        failed: list[str] = []
        try:
            for folder in self._too_many(newest):
                try:
                    remove_folder(folder)
                except Exception as error:
                    self._may_have_leftovers = True
                    failed.append(f"{folder.name} ({_words(error)})")
        except Exception as error:
            failed.append(f"old checkpoints ({_words(error)})")
        if not failed:
            return ""
        return f"worker 0 could not delete {', '.join(failed[:MOST_NAMED])}"

    def _too_many(self, newest: Place) -> Iterator[Place]:
        whole, is_before = 0, False
        for folder in folders_newest_first(self._directory):
            if folder == newest:
                whole, is_before = whole + 1, True
                continue
            is_unfinished, is_whole = False, True
            try:
                read_manifest(folder)
            except DataError as error:
                # A manifest that cannot be read now, or here, may be good.
                is_unfinished, is_whole = UNFINISHED in str(error), False
            is_whole = is_whole and folder.name not in self._damaged
            whole += is_whole
            has_enough = whole > self._keep if is_whole else whole >= self._keep
            # What is newer may be somebody's who has begun to write it.
            if has_enough or (is_unfinished and is_before):
                yield folder


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _failed(save: _Save, what: str) -> DataError:
    return DataError(
        f"The checkpoint {save.folder} of step {save.step} was not written: {what}. "
        "The checkpoints before are as they were."
    )


def _failed_parts(said: list[dict[str, Any]]) -> str:
    failed = [
        f"worker {rank} could not write its part ({theirs['error']})"
        for rank, theirs in enumerate(said)
        if "error" in theirs
    ]
    more = f"; and {len(failed) - MOST_NAMED} more" if failed[MOST_NAMED:] else ""
    return "; ".join(failed[:MOST_NAMED]) + more


def _unseen_parts(folder: Place, said: list[dict[str, Any]]) -> str:
    for rank, theirs in enumerate(said):
        path = folder / part_name(rank, len(said))
        try:
            why, found = "", path.stat().st_size
        except (OSError, DataError) as error:
            why, found = f" ({_words(error)})", -1
        if found != theirs["size"]:
            return (
                f"worker {rank} has written its part, and worker 0 does not find it at "
                f"{path}{why}. Give a directory that all hosts see: a shared file "
                "system, or a URL (gs://bucket/run). Give each training its own: two "
                "of them remove what the other has begun"
            )
    return ""


def _is_whole(folder: Place) -> bool:
    try:
        read_manifest(folder)
    except DataError:
        return False
    return True
