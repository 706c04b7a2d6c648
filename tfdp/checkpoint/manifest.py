"""What a checkpoint of a training says of itself, in a file that is written last.

    <directory>/step-000000000120-1f0c5a93/part-0-of-2.safetensors
                                           part-1-of-2.safetensors
                                           manifest.json

Without the manifest there is no checkpoint: worker 0 writes it once all hosts have said
that their part is on the disk. It holds a checksum of itself, the parts' sizes, and
what stands in them; a part holds whose it is and a checksum of each array.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfdp.checkpoint.model_description import NotedOptimizer
from tfdp.data.places import Place, RemotePath
from tfdp.errors import DataError
from tfdp.files.atomic import replaced, sync_folder
from tfdp.files.checked_json import checksum_of, is_count, parse_json, with_checksum

MANIFEST_NAME = "manifest.json"
FORMAT = "tfdp.checkpoint/1"
FOLDER = re.compile(r"step-(?P<step>\d{12,18})-(?P<write>[0-9a-f]{8})")
# In the message of a checkpoint that is none yet, which is no damage.
UNFINISHED = "was never finished"
UNSEEN = "is not seen here, and by worker 0 it is"
LARGEST_MANIFEST_BYTES = 256 * 2**20
MOST_PARTS = 1_000_000
#: How an entry lies in the parts: all of it in one; a range of it in each; or a row for
#: each replica, those of a host in its part.
KINDS = ("whole", "shards", "ranks")


@dataclass(frozen=True)
class Noted:
    """What the manifest says of one entry.

    Args:
      path: for people.
      kind: one of `KINDS`.
      shape: of the whole, or of one replica's.
      dtype: its name.
      parts: of "whole", the one that has it; of "shards", the elements in each.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Args:
      write: the identity of the call that wrote it, 8 hexadecimal digits.
      step: how many training steps came before.
      sizes: of the parts, in bytes.
      replicas: in each part.
      entries: by name.
      program: what else is to go on: place in the data, callbacks, history.
      optimizers: of the model, in their order.
      architecture: what `architecture_of` said of the model; None: nothing.
    """

    write: str
    step: int
    sizes: tuple[int, ...]
    replicas: tuple[int, ...]
    entries: Mapping[str, Noted]
    program: Mapping[str, Any] = field(default_factory=dict)
    optimizers: tuple[NotedOptimizer, ...] = ()
    architecture: str | None = None


def folder_name(step: int, write: str) -> str:
    """That of a checkpoint.

    >>> folder_name(120, "1f0c5a93")
    'step-000000000120-1f0c5a93'
    """
    return f"step-{step:012d}-{write}"


def part_name(number: int, parts: int) -> str:
    """That of a host's file."""
    return f"part-{number}-of-{parts}.safetensors"


def folders_newest_first(directory: Place) -> list[Place]:
    """Those in which a checkpoint was begun, finished or not."""
    found = [
        path
        for path in directory.glob("step-*")
        if FOLDER.fullmatch(path.name)
        and (isinstance(path, RemotePath) or path.is_dir())
    ]

    def age(path: Place) -> tuple[int, float, str]:
        match = FOLDER.fullmatch(path.name)
        step = int(match["step"]) if match else 0
        try:
            return step, (path / MANIFEST_NAME).stat().st_mtime, path.name
        except OSError:
            return step, 0.0, path.name

    return sorted(found, key=age, reverse=True)


def write_manifest(folder: Place, manifest: Manifest) -> None:
    """Makes what lies in a folder a checkpoint."""
    content = {"format": FORMAT, **asdict(manifest)}
    text = with_checksum(content)
    if isinstance(folder, RemotePath):
        # On an object store a file appears when it is complete.
        (folder / MANIFEST_NAME).write_text(text)
        return
    with replaced(folder / MANIFEST_NAME) as half_written:
        half_written.write_text(text)
    # The folder itself must outlast a power cut before older ones are removed.
    sync_folder(folder.parent)


def read_manifest(folder: Place) -> Manifest:
    """The manifest in a folder.

    Raises:
      DataError: there is none, or it is damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
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
        raise ValueError("its parts have no sizes, or hosts no replicas")
    write, step = content["write"], content["step"]
    if not isinstance(write, str) or not FOLDER.fullmatch(folder_name(0, write)):
        raise ValueError("its identity is none")
    if not all(is_count(number) for number in (step, *sizes, *replicas)):
        raise ValueError("its sizes are no whole numbers")
    entries = {
        name: _entry(name, e, len(sizes)) for name, e in content["entries"].items()
    }
    if not isinstance(content["program"], dict):
        raise ValueError("what it says of the program is no object")
    architecture = content.get("architecture")
    if not isinstance(architecture, str | None):
        raise ValueError("what it says of the model is no text")
    return Manifest(
        write,
        step,
        tuple(sizes),
        tuple(replicas),
        entries,
        content["program"],
        tuple(_optimizer(said) for said in content["optimizers"]),
        architecture,
    )


def _optimizer(said: Mapping[str, Any]) -> NotedOptimizer:
    names, places = said["names"], said["places"]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("its optimizers have no names")
    if places is not None and not all(is_count(place) for place in places):
        raise ValueError("the variables of its optimizers are no whole numbers")
    group_size = said.get("group_size")
    if group_size is not None and not is_count(group_size, least=1):
        raise ValueError("its replicas do not step together in groups of any size")
    known = None if places is None else tuple(places)
    return NotedOptimizer(tuple(names), known, group_size)


def _entry(name: str, said: Mapping[str, Any], parts: int) -> Noted:
    shape, places = tuple(said["shape"]), tuple(said["parts"])
    if not all(is_count(number) for number in (*shape, *places)):
        raise ValueError(f"sizes at {name!r} are no whole numbers")
    if said["kind"] not in KINDS or not isinstance(said["dtype"], str):
        raise ValueError(f"{name!r} is of no kind that is known")
    elements = 1
    for size in shape:
        elements *= size
    is_right = {
        "whole": len(places) == 1 and places[0] < parts,
        "shards": len(places) == parts and sum(places) == elements,
        "ranks": not places,
    }
    if not is_right[said["kind"]]:
        raise ValueError(f"the parts of {name!r} do not make up the whole")
    return Noted(str(said["path"]), said["kind"], shape, said["dtype"], places)


def remove_folder(folder: Place) -> None:
    """Deletes a checkpoint: first its manifest, so that it never is half of one.

    Of a link, the link: what it leads to is somebody's who put it there.

    Raises:
      OSError, DataError: something of it is left.
    """
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    # Another worker may remove it, too.
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder) if isinstance(folder, Path) else folder.remove_all()


def remove_unfinished(folder: Place) -> None:
    """Deletes what lies in a folder if it has no manifest, and so is no checkpoint.

    Raises:
      OSError, DataError: something of it is left.
    """
    try:
        read_manifest(folder)
    except DataError as error:
        # A manifest that cannot be read now, or here, may be good.
        if UNFINISHED in str(error):
            remove_folder(folder)
