"""One file of named arrays, in the format safetensors, and what tells that it is whole.

The format is a header of names, types and places, and then the bytes: nothing in it is
executed when it is read. After the arrays comes one more, the text of a JSON object:
whose file this is, and a checksum of each array.

It is written here and not by the format's library, which first makes a copy of all
arrays in memory, and only then could a checksum be taken of what is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdp.checkpoint.parts import damage_named
from tfdp.checks import is_whole
from tfdp.cluster.scratch import scratch_folder
from tfdp.data.places import Place, RemotePath, open_binary
from tfdp.errors import DataError
from tfdp.files.atomic import replaced
from tfdp.files.checked_json import is_count, parse_json
from tfdp.files.direct import CHECK_BYTES, DirectReader, DirectWriter, page_buffer

FACTS = "tfdp.json"
# A header of more is nobody's: 100,000 arrays take some 15 MB.
LONGEST_HEADER_BYTES = 100 * 2**20
LENGTH_BYTES = 8
ALIGNED_BYTES = 8
WRITTEN_BYTES = 2**20
LARGEST_CRC = 2**32 - 1
BLOCK_BYTES = 2**24
# Whoever reads takes the checkpoint before.
NO_REMEDY = ""
# The format's names; what it has none for is stored as bytes.
PLAIN = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}

Identity = Mapping[str, Any]


def write_arrays(
    place: Place, arrays: Mapping[str, np.ndarray], identity: Identity
) -> int:
    """Writes a file whole, or not at all.

    Args:
      place: of the file.
      arrays: by name.
      identity: what tells it from others: what `open_arrays` will be asked for.

    Returns:
      The file's size in bytes.

    Raises:
      OSError: when it cannot be written.

    Cost: one pass over the arrays, and no copy of one whose bytes lie in order. Behind
    a URL, a file in the temporary folder of this machine first.
    """
    if isinstance(place, RemotePath):
        with scratch_folder() as folder:
            local = Path(folder) / place.name
            _write(local, arrays, identity)
            _copy_to(local, place)
            return local.stat().st_size
    with replaced(place) as half_written:
        _write(half_written, arrays, identity)
        return half_written.stat().st_size


def _write(path: Path, arrays: Mapping[str, np.ndarray], identity: Identity) -> None:
    stored = {name: _stored(array) for name, array in arrays.items()}
    # The format's order: the widest first, so that each begins at its own alignment.
    names = sorted(stored, key=lambda name: (-stored[name].dtype.itemsize, name))
    noted = {
        name: [str(array.dtype), list(array.shape), LARGEST_CRC]
        for name, array in arrays.items()
    }
    # The header comes first and says how long the facts are, whose checksums are known
    # last: room for the longest, and spaces after the others.
    facts_bytes = len(_facts(identity, noted))
    with DirectWriter(path) as file:
        file.write(_header(names, stored, facts_bytes))
        for name in names:
            noted[name][2] = _write_array(file, stored[name])
        file.write(_facts(identity, noted).ljust(facts_bytes))


def _facts(identity: Identity, noted: Mapping[str, Any]) -> bytes:
    return json.dumps({**identity, "arrays": noted}).encode()


def _header(
    names: list[str], stored: Mapping[str, np.ndarray], facts_bytes: int
) -> bytes:
    header, end = {}, 0
    for name in names:
        array = stored[name]
        begin, end = end, end + array.nbytes
        header[name] = _header_entry(array.dtype.name, array.shape, begin, end)
    header[FACTS] = _header_entry("uint8", (facts_bytes,), end, end + facts_bytes)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // ALIGNED_BYTES) * ALIGNED_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _header_entry(
    dtype: str, shape: tuple[int, ...], begin: int, end: int
) -> dict[str, Any]:
    return {"dtype": PLAIN[dtype], "shape": shape, "data_offsets": [begin, end]}


def _write_array(file: DirectWriter, array: np.ndarray) -> int:
    """Writes its bytes; returns their checksum."""
    content, crc = array.reshape(-1).view(np.uint8), 0
    # In blocks that the processor's cache still holds when the file copies them. Both
    # calls release the interpreter's lock.
    for begin in range(0, content.size, WRITTEN_BYTES):
        block = content[begin : begin + WRITTEN_BYTES].data
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc


def _copy_to(local: Path, place: RemotePath) -> None:
    import tensorflow as tf

    tf.io.gfile.copy(os.fspath(local), os.fspath(place), overwrite=True)


def _stored(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in PLAIN:
        return array
    return array.reshape(-1).view(np.uint8)


class ArrayFile:
    """An open file of arrays; `open_arrays` makes it.

    Args:
      name: what to call it in messages.
      file: its bytes.
      places: by name of the array, where its bytes begin and end.
      arrays: by name, what `write_arrays` noted of each.
    """

    def __init__(
        self,
        name: str,
        file: DirectReader,
        places: Mapping[str, tuple[int, int]],
        arrays: Mapping[str, Any],
    ):
        self._name, self._file = name, file
        self._places, self._arrays = places, arrays
        self._buffer = page_buffer(0)

    @property
    def names(self) -> list[str]:
        """Those of all arrays."""
        return list(self._arrays)

    def check(self, name: str) -> None:
        """Reads an array, and forgets it.

        Raises:
          DataError: as `read`.
        """
        with self._noted(name) as (_, _, crc):
            self._read(name, crc, CHECK_BYTES)

    def read(self, name: str) -> np.ndarray:
        """An array, as it was written, until another one is read or checked.

        Raises:
          DataError: there is none of that name, or its bytes have changed.
        """
        with self._noted(name) as (dtype, shape, crc):
            begin, end = self._places[name]
            self._read(name, crc, DirectReader.buffer_bytes(begin, end))
            first = DirectReader.offset(begin)
            stored = self._buffer[first : first + end - begin]
            # The type is looked up by name among NumPy's, and those of ml_dtypes.
            return stored.view(_dtype(dtype)).reshape(shape)

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[Any]:
        if name not in self._arrays:
            raise DataError(
                f"{self._name} holds no {name!r}: it is another file's part."
            )
        with damage_named(self._name, NO_REMEDY):
            yield self._arrays[name]

    def _read(self, name: str, crc: int, buffer_bytes: int) -> None:
        if self._buffer.size < buffer_bytes:
            self._buffer = page_buffer(buffer_bytes)
        found = 0
        for block in self._file.blocks(*self._places[name], self._buffer):
            found = zlib.crc32(block.data, found)
        if found != crc:
            raise ValueError(f"the bytes of {name!r} have changed")


def _dtype(name: str) -> np.dtype:
    if name not in PLAIN or name == "bfloat16":
        import ml_dtypes

        if hasattr(ml_dtypes, name):
            return np.dtype(getattr(ml_dtypes, name))
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"{name!r} is no type of numbers")
    return dtype


@contextlib.contextmanager
def open_arrays(
    place: Place, size_bytes: int, identity: Identity
) -> Iterator[ArrayFile]:
    """Opens a file that `write_arrays` wrote with that size and identity.

    Raises:
      DataError: it is missing, damaged, or another one; naming it.
    """
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        with damage_named(place, NO_REMEDY):
            found = place.stat().st_size
            if found != size_bytes:
                raise ValueError(f"it has {found} bytes, not {size_bytes}")
            local = stack.enter_context(_local(place))
            with open_binary(local) as file:
                length = _header_bytes(file, found)
                # Whether the header is one is the library's to say.
                with safe_open(local, "np"):
                    places = _places(file.read(length), LENGTH_BYTES + length)
            file = stack.enter_context(contextlib.closing(DirectReader(local)))
            facts = parse_json(_bytes_of(file, *places[FACTS]))
            for key, value in identity.items():
                if facts[key] != value:
                    raise ValueError(f"it is of {key} {facts[key]!r}, not {value!r}")
            _check_arrays(facts["arrays"], found)
        yield ArrayFile(str(place), file, places, facts["arrays"])


def _bytes_of(file: DirectReader, begin: int, end: int) -> bytes:
    buffer = page_buffer(DirectReader.buffer_bytes(begin, end))
    return b"".join(block.tobytes() for block in file.blocks(begin, end, buffer))


def _header_bytes(file: BinaryIO, size_bytes: int) -> int:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if not 2 <= length <= min(size_bytes - LENGTH_BYTES, LONGEST_HEADER_BYTES):
        raise ValueError(f"its header claims {length} bytes")
    return length


def _places(header: bytes, first_byte: int) -> dict[str, tuple[int, int]]:
    """Where the bytes of each array begin and end: the library reads copies only."""
    noted = parse_json(header)
    noted.pop("__metadata__", None)
    return {
        name: tuple(first_byte + offset for offset in array["data_offsets"])
        for name, array in noted.items()
    }


def _check_arrays(arrays: Any, size_bytes: int) -> None:
    for name, (dtype, shape, crc) in arrays.items():
        if not isinstance(name, str) or not isinstance(dtype, str):
            raise ValueError("names and types of arrays are no text")
        if not all(is_count(size) for size in shape) or not is_whole(crc, 0, 2**32 - 1):
            raise ValueError(f"what it says of {name!r} are no whole numbers")


@contextlib.contextmanager
def _local(place: Place) -> Iterator[Path]:
    if not isinstance(place, RemotePath):
        yield place
        return
    with scratch_folder() as folder:
        local = Path(folder) / "arrays"
        with place.open() as source, local.open("wb") as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)
        yield local
