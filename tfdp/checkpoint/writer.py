"""Writes a checkpoint beside the training: one at a time, in a thread of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace

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
    write_manifest,
)
from tfdp.checkpoint.restored import identity
from tfdp.cluster import progress
from tfdp.data.places import Place
from tfdp.errors import DataError, TfdpError

__all__ = ["Writer"]


class Writer:
    """Writes what it is given; `wait` says how the last one ended.

    Args:
      directory: of the checkpoints.
      keep: how many whole ones are left there.
    """

    def __init__(self, directory: Place, keep: int):
        self._directory = directory
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: TfdpError | None = None
        self._damaged: set[str] = set()

    def leave_out(self, folder: Place) -> None:
        """Counts one that was found damaged for none: what is before it is needed."""
        self._damaged.add(folder.name)

    def start(
        self, manifest: Manifest, arrays: Mapping[str, np.ndarray], hosts: Hosts
    ) -> None:
        """Begins to write; the one before must have been waited for.

        Args:
          manifest: without the parts' sizes and hosts' replicas.
          arrays: this host's, by name; nobody writes to them any more.
          hosts: who writes together.
        """

        def run() -> None:
            try:
                self._write(manifest, arrays, hosts)
            except TfdpError as error:
                self._error = error
            except Exception as error:
                self._error = DataError(
                    f"A checkpoint of step {manifest.step} could not be written to "
                    f"{self._directory} ({type(error).__name__}: {str(error)[:300]}). "
                    "The one before is as it was."
                )

        # Not a daemon: a program that ends lets it come to its end.
        self._thread = threading.Thread(target=run, name="tfdp-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until all is written.

        Raises:
          DataError: it could not be; the checkpoints before are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(
        self, manifest: Manifest, arrays: Mapping[str, np.ndarray], hosts: Hosts
    ) -> None:
        folder = self._directory / folder_name(manifest.step, manifest.write)
        said = self._write_part(folder, manifest, arrays, hosts)
        notes = hosts.share_note(f"checkpoint {manifest.write}", json.dumps(said))
        everybody = [json.loads(notes[rank]) for rank in range(hosts.count)]
        for rank, theirs in enumerate(everybody):
            if "error" in theirs:
                raise DataError(
                    f"A checkpoint of step {manifest.step} was not finished: worker "
                    f"{rank} could not write its part ({theirs['error']}). The one "
                    "before is as it was."
                )
        if hosts.is_chief:
            sizes = tuple(int(theirs["size"]) for theirs in everybody)
            self._check_all_are_seen(folder, sizes)
            replicas = tuple(int(theirs["replicas"]) for theirs in everybody)
            write_manifest(folder, replace(manifest, sizes=sizes, replicas=replicas))
            self._remove_old(folder)
        # Nobody goes on, or ends, before worker 0 has said that it is one.
        hosts.share_note(f"checkpoint {manifest.write} is whole", "")
        progress.note_saved(manifest.step)

    def _write_part(
        self,
        folder: Place,
        manifest: Manifest,
        arrays: Mapping[str, np.ndarray],
        hosts: Hosts,
    ) -> dict[str, object]:
        """What this host has to say of its part."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            size_bytes = write_arrays(
                folder / part_name(hosts.rank, hosts.count),
                arrays,
                identity(manifest.write, hosts.rank, hosts.count),
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        return {"size": size_bytes, "replicas": manifest.replicas[0]}

    def _check_all_are_seen(self, folder: Place, sizes: tuple[int, ...]) -> None:
        for number, size_bytes in enumerate(sizes):
            path = folder / part_name(number, len(sizes))
            try:
                found = path.stat().st_size
            except OSError:
                found = -1
            if found != size_bytes:
                raise DataError(
                    f"Worker {number} has written its part of a checkpoint to {path}, "
                    "and worker 0 does not find it there. Give a directory that all "
                    "hosts see: a shared file system, or a URL (gs://bucket/run). "
                    "Give each training its own: two of them remove what the other "
                    "has begun."
                )

    def _remove_old(self, newest: Place) -> None:
        """Leaves the newest ones, and nothing that was not finished before them."""
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
                remove_folder(folder)
