"""The manifest of a checkpoint, written last.

    <directory>/step-000000000120-1f0c5a93/part-0-of-2.safetensors
                                           part-1-of-2.safetensors
                                           manifest.json

Without the manifest there is no checkpoint: worker 0 writes it when all hosts have
reported that their part is on disk. It holds its own checksum, the parts' sizes and
their contents; each part holds its identity and a checksum per array.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfdp.checkpoint.optimizer_records import OptimizerRecord
from tfdp.data.places import Place, RemotePath
from tfdp.errors import DataError
from tfdp.files.atomic import replaced, sync_folder
from tfdp.files.checked_json import checksum_of, is_count, parse_json, with_checksum

MANIFEST_NAME = "manifest.json"
FORMAT = "tfdp.checkpoint/1"
FOLDER = re.compile(r"step-(?P<step>\d{12,18})-(?P<write>[0-9a-f]{8})")
# In messages about an unfinished checkpoint, which is no damage.
UNFINISHED = "was never finished"
UNSEEN = "is not visible here, only to worker 0"
LARGEST_MANIFEST_BYTES = 256 * 2**20
MOST_PARTS = 1_000_000
#: In one part; a range in each part; one row per replica, in its host's part.
KINDS = ("whole", "shards", "ranks")
# Entries that are no state of the model: the arrays given to `save`, and the file of
# `tfdp.checkpoint.keras_file`.
PROGRAM = "program/"
KERAS_FILE = "keras file"


@dataclass(frozen=True)
class EntryRecord:
    """The manifest's record of one entry."""

    path: str  # for messages
    kind: str  # one of `KINDS`
    shape: tuple[int, ...]  # of the whole, or of one replica's value
    dtype: str
    # Of "whole", the part that has it; of "shards", the elements in each.
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    write: str  # the identity of the save, 8 hexadecimal digits
    step: int  # training steps before the checkpoint
    sizes: tuple[int, ...]  # of the parts, in bytes
    replicas: tuple[int, ...]  # in each part
    entries: Mapping[str, EntryRecord]
    # Further state: place in the data, callbacks, history.
    program: Mapping[str, Any] = field(default_factory=dict)
    optimizers: tuple[OptimizerRecord, ...] = ()


def folder_name(step: int, write: str) -> str:
    """The folder name of a checkpoint, such as `step-000000000120-1f0c5a93`."""
    return f"step-{step:012d}-{write}"


def part_name(number: int, parts: int) -> str:
    """The file name of a host's part."""
    return f"part-{number}-of-{parts}.safetensors"


def folders_newest_first(directory: Place) -> list[Place]:
    """The checkpoint folders, finished or not."""
    found = [path for path in directory.glob("step-*") if FOLDER.fullmatch(path.name)]
    found = [path for path in found if isinstance(path, RemotePath) or path.is_dir()]

    def age(path: Place) -> tuple[int, float, str]:
        match = FOLDER.fullmatch(path.name)
        step = int(match["step"]) if match else 0
        try:
            return step, (path / MANIFEST_NAME).stat().st_mtime, path.name
        except OSError:
            return step, 0.0, path.name

    return sorted(found, key=age, reverse=True)


def write_manifest(folder: Place, manifest: Manifest) -> None:
    """Writes the manifest, which completes the checkpoint."""
    content = {"format": FORMAT, **asdict(manifest)}
    text = with_checksum(content)
    if isinstance(folder, RemotePath):
        # On an object store a file appears when it is complete.
        (folder / MANIFEST_NAME).write_text(text)
        return
    with replaced(folder / MANIFEST_NAME) as half_written:
        half_written.write_text(text)
    # The folder must survive a power failure before older ones are removed.
    sync_folder(folder.parent)


def read_manifest(folder: Place) -> Manifest:
    """The manifest in a folder; `DataError` if there is none, or it is damaged."""
    path = folder / MANIFEST_NAME
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise ValueError("it is not a file")  # a pipe would block
        size_bytes = path.stat().st_size
        if size_bytes > LARGEST_MANIFEST_BYTES:
            raise ValueError(f"it has {size_bytes} bytes")
        return _checked(parse_json(path.read_text()))
    except FileNotFoundError as error:
        raise DataError(f"{folder} {UNFINISHED}: it has no manifest.") from error
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
        raise DataError(f"{path} is damaged ({what}).") from error


def _checked(content: Any) -> Manifest:
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
    if content["checksum"] != checksum_of(content):
        raise ValueError("it was changed after it was written: its checksum differs")
    sizes, replicas = content["sizes"], content["replicas"]
    if not 1 <= len(sizes) <= MOST_PARTS or len(replicas) != len(sizes):
        raise ValueError("the sizes or replicas of its parts are missing")
    write, step = content["write"], content["step"]
    if not isinstance(write, str) or not FOLDER.fullmatch(folder_name(0, write)):
        raise ValueError("its identity is invalid")
    if not all(is_count(number) for number in (step, *sizes, *replicas)):
        raise ValueError("its sizes are not whole numbers")
    entries = {
        name: _entry(name, e, len(sizes)) for name, e in content["entries"].items()
    }
    program = content["program"]
    if not isinstance(program, dict):
        raise ValueError("its program state is not an object")
    optimizers = tuple(_optimizer(record) for record in content["optimizers"])
    parts = tuple(sizes), tuple(replicas)
    return Manifest(write, step, *parts, entries, program, optimizers)


def _optimizer(record: Mapping[str, Any]) -> OptimizerRecord:
    names, places = record["names"], record["places"]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("its optimizers have no names")
    if places is not None and not all(is_count(place) for place in places):
        raise ValueError("the variables of its optimizers are not whole numbers")
    group_size = record.get("group_size")
    if group_size is not None and not is_count(group_size, least=1):
        raise ValueError("its group size is not a positive whole number")
    sync = record.get("sync")
    if not isinstance(sync, str | None):
        raise ValueError("its sync is not text")
    indices = None if places is None else tuple(places)
    return OptimizerRecord(tuple(names), indices, group_size, sync)


def _entry(name: str, record: Mapping[str, Any], parts: int) -> EntryRecord:
    shape, places = tuple(record["shape"]), tuple(record["parts"])
    if not all(is_count(number) for number in (*shape, *places)):
        raise ValueError(f"sizes at {name!r} are not whole numbers")
    if record["kind"] not in KINDS or not isinstance(record["dtype"], str):
        raise ValueError(f"{name!r} is of an unknown kind")
    is_right = {
        "whole": len(places) == 1 and places[0] < parts,
        "shards": len(places) == parts and sum(places) == math.prod(shape),
        "ranks": not places,
    }
    if not is_right[record["kind"]]:
        raise ValueError(f"the parts of {name!r} do not make up the whole")
    return EntryRecord(
        str(record["path"]), record["kind"], shape, record["dtype"], places
    )


def remove_folder(folder: Place) -> None:
    """Deletes a checkpoint, its manifest first; of a symbolic link, the link only."""
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    # Another worker may remove it, too.
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder) if isinstance(folder, Path) else folder.remove_all()


def remove_unfinished(folder: Place) -> None:
    """Deletes a folder without a manifest."""
    try:
        read_manifest(folder)
    except DataError as error:
        # A manifest that cannot be read now, or on this host, may be good.
        if UNFINISHED in str(error):
            remove_folder(folder)
