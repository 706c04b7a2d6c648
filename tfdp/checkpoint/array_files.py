"""One file of named arrays in safetensors format, with a checksum for each array.

The last array is a JSON text: the file's identity and the checksums. We do not write
with the format's library: it copies all arrays in memory first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdp.checks import is_whole
from tfdp.cluster.scratch import scratch_folder
from tfdp.data.places import Place, RemotePath
from tfdp.errors import DataError, TfdpError
from tfdp.files.atomic import replaced
from tfdp.files.checked_json import is_count, parse_json
from tfdp.files.direct import CHECK_BYTES, DirectReader, DirectWriter, page_buffer

FACTS = "tfdp.json"
# 100,000 arrays take some 15 MB.
LONGEST_HEADER_BYTES = 100 * 2**20
LENGTH_BYTES = 8
ALIGNED_BYTES = 8
WRITTEN_BYTES = 2**20
LARGEST_CRC = 2**32 - 1
BLOCK_BYTES = 2**24
# The format's type names; other types are stored as bytes.
PLAIN = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
}

Identity = Mapping[str, Any]


def write_arrays(
    place: Place, arrays: Mapping[str, np.ndarray], identity: Identity
) -> int:
    """Writes a file atomically; returns its size in bytes.

    Cost: one pass over the arrays; copies only arrays that are not contiguous. A URL is
    written to this machine's temporary folder first.
    """
    if isinstance(place, RemotePath):
        import tensorflow as tf

        with scratch_folder() as folder:
            local = Path(folder) / place.name
            _write(local, arrays, identity)
            tf.io.gfile.copy(str(local), os.fspath(place), overwrite=True)
            return local.stat().st_size
    with replaced(place) as half_written:
        _write(half_written, arrays, identity)
        return half_written.stat().st_size


def _write(path: Path, arrays: Mapping[str, np.ndarray], identity: Identity) -> None:
    stored = {name: _stored(array) for name, array in arrays.items()}
    # The format's order: widest first, so each array is aligned.
    names = sorted(stored, key=lambda name: (-stored[name].dtype.itemsize, name))
    records = {
        name: [str(array.dtype), list(array.shape), LARGEST_CRC]
        for name, array in arrays.items()
    }
    # The header comes first and holds the length of the facts, which hold checksums
    # computed last: reserve room for the longest checksums and pad with spaces.
    facts_bytes = len(_facts(identity, records))
    with DirectWriter(path) as file:
        file.write(_header(names, stored, facts_bytes))
        for name in names:
            records[name][2] = _write_array(file, stored[name])
        file.write(_facts(identity, records).ljust(facts_bytes))


def _facts(identity: Identity, records: Mapping[str, Any]) -> bytes:
    return json.dumps({**identity, "arrays": records}).encode()


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
    """Writes an array's bytes; returns their checksum."""
    content, crc = array.reshape(-1).view(np.uint8), 0
    # Blocks fit the processor's cache. Both calls release the interpreter lock.
    for begin in range(0, content.size, WRITTEN_BYTES):
        block = content[begin : begin + WRITTEN_BYTES].data
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc


def _stored(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in PLAIN:
        return array
    return array.reshape(-1).view(np.uint8)


@dataclasses.dataclass(eq=False)
class ArrayFile:
    """An open file of arrays; `open_arrays` returns it."""

    name: str  # for messages
    file: DirectReader
    places: Mapping[str, tuple[int, int]]  # array name -> first and end byte
    arrays: Mapping[str, Any]  # array name -> dtype, shape and checksum

    def __post_init__(self) -> None:
        self._buffer = page_buffer(0)

    def check(self, name: str) -> None:
        """Reads an array to verify its checksum."""
        with self._record_of(name) as (_, _, crc):
            self._read(name, crc, CHECK_BYTES)

    def read(self, name: str) -> np.ndarray:
        """Returns an array; valid until another one is read or checked."""
        with self._record_of(name) as (dtype, shape, crc):
            begin, end = self.places[name]
            self._read(name, crc, DirectReader.buffer_bytes(begin, end))
            first = DirectReader.offset(begin)
            stored = self._buffer[first : first + end - begin]
            return stored.view(_dtype(dtype)).reshape(shape)

    @contextlib.contextmanager
    def _record_of(self, name: str) -> Iterator[Any]:
        if name not in self.arrays:
            raise DataError(
                f"{self.name} has no array {name!r}: it belongs to another checkpoint."
            )
        with damage_as_data_error(self.name):
            yield self.arrays[name]

    def _read(self, name: str, crc: int, buffer_bytes: int) -> None:
        if self._buffer.size < buffer_bytes:
            self._buffer = page_buffer(buffer_bytes)
        found = 0
        for block in self.file.blocks(*self.places[name], self._buffer):
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
        raise ValueError(f"{name!r} is not a numeric type")
    return dtype


@contextlib.contextmanager
def open_arrays(
    place: Place, size_bytes: int, identity: Identity
) -> Iterator[ArrayFile]:
    """Opens a file that `write_arrays` wrote with this size and identity.

    Raises:
      DataError: it is missing, damaged, or another one.
    """
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        with damage_as_data_error(place):
            found = place.stat().st_size
            if found != size_bytes:
                raise ValueError(f"it has {found} bytes, not {size_bytes}")
            local = stack.enter_context(_local(place))
            with local.open("rb") as begin:
                length = _header_bytes(begin, found)
                # The library validates the header.
                with safe_open(local, "np"):
                    places = _places(begin.read(length), LENGTH_BYTES + length)
            file = stack.enter_context(contextlib.closing(DirectReader(local)))
            facts = parse_json(_bytes_of(file, *places[FACTS]))
            for key, value in identity.items():
                if facts[key] != value:
                    raise ValueError(f"its {key} is {facts[key]!r}, not {value!r}")
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
    """Array name -> first and end byte: the library would return copies."""
    records = parse_json(header)
    records.pop("__metadata__", None)
    return {
        name: tuple(first_byte + offset for offset in array["data_offsets"])
        for name, array in records.items()
    }


def _check_arrays(arrays: Any, size_bytes: int) -> None:
    for name, (dtype, shape, crc) in arrays.items():
        if not isinstance(name, str) or not isinstance(dtype, str):
            raise ValueError("array names and types are not text")
        if not all(is_count(size) for size in shape) or not is_whole(crc, 0, 2**32 - 1):
            raise ValueError(f"shape or checksum of {name!r} is not a whole number")


@contextlib.contextmanager
def _local(place: Place) -> Iterator[Path]:
    if not isinstance(place, RemotePath):
        yield place
        return
    with scratch_folder() as folder:
        local = Path(folder) / "arrays"
        with place.open("rb") as source, local.open("wb") as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)
        yield local


@contextlib.contextmanager
def damage_as_data_error(path: object) -> Iterator[None]:
    """Turns any error of reading a file into a `DataError` with its name.

    Readers of archives and HDF5 raise a dozen types for changed bytes, such as
    KeyError, RuntimeError, struct.error and zlib.error.
    """
    try:
        yield
    except TfdpError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
        raise DataError(f"{path} is damaged ({what}).") from error
