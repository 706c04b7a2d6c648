"""A checkpoint's file of arrays, beside the library of its format."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tfdp.checkpoint import array_files
from tfdp.checkpoint.array_files import PLAIN, open_arrays, write_arrays
from tfdp.errors import DataError

WHO = {"write": "a", "number": 0}


def drawn(dtype, shape):
    rng = np.random.default_rng(len(shape))
    return rng.integers(0, 2, shape).astype(dtype)


def arrays():
    found = {}
    for name in PLAIN:
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
        for shape in ((), (0, 3), (3,), (2, 5)):
            found[f"{name} {shape}"] = drawn(dtype, shape)
    found["turned"] = np.arange(12.0).reshape(3, 4).T
    found["long"] = np.random.default_rng(0).normal(size=300_001)
    return found


def test_the_library_of_the_format_reads_what_is_written(tmp_path):
    given, path = arrays(), tmp_path / "some.safetensors"
    size_bytes = write_arrays(path, given, WHO)
    assert size_bytes == path.stat().st_size
    # It checks types, places and that nothing lies between or behind.
    found = load_file(path)
    del found[array_files.FACTS]
    assert found.keys() == given.keys()
    for name, array in given.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("block_bytes", [1, 7, 2**20])
def test_what_was_written_is_read_whatever_the_blocks(
    tmp_path, monkeypatch, block_bytes
):
    monkeypatch.setattr(array_files, "WRITTEN_BYTES", block_bytes)
    given, path = arrays(), tmp_path / "some.safetensors"
    if block_bytes < 2**20:
        del given["long"]
    # What the format has no name for travels as bytes.
    given["small"] = np.ones((2, 3), ml_dtypes.float8_e4m3fn)
    size_bytes = write_arrays(path, given, WHO)
    with open_arrays(path, size_bytes, WHO) as file:
        assert set(file.arrays) == set(given)
        for name, array in given.items():
            found = file.read(name)
            assert found.dtype == array.dtype and found.shape == array.shape
            assert found.tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_each_array_begins_at_its_own_alignment(tmp_path):
    path = tmp_path / "some.safetensors"
    write_arrays(path, arrays(), WHO)
    content = path.read_bytes()
    begin = array_files.LENGTH_BYTES + int.from_bytes(content[:8], "little")
    assert begin % 8 == 0
    places = array_files._places(content[8:begin], begin)
    for name, (first, _) in places.items():
        if name in arrays():
            assert first % arrays()[name].dtype.itemsize == 0


@pytest.mark.parametrize("look", ["check", "read"])
def test_a_changed_byte_is_seen_without_and_with_use_of_the_array(tmp_path, look):
    path = tmp_path / "some.safetensors"
    size_bytes = write_arrays(path, {"a": np.arange(5, dtype="float32")}, WHO)
    changed = bytearray(path.read_bytes())
    begin = array_files.LENGTH_BYTES + int.from_bytes(changed[:8], "little")
    changed[begin] ^= 1
    path.write_bytes(bytes(changed))
    with (
        open_arrays(path, size_bytes, WHO) as file,
        pytest.raises(DataError, match="have changed"),
    ):
        getattr(file, look)("a")


def test_every_changed_byte_of_an_array_is_seen(tmp_path):
    path = tmp_path / "some.safetensors"
    given = {"a": np.arange(5, dtype="float32"), "b": np.arange(3, dtype="int8")}
    size_bytes = write_arrays(path, given, WHO)
    sound = path.read_bytes()
    begin = array_files.LENGTH_BYTES + int.from_bytes(sound[:8], "little")
    for place in range(begin, begin + 5 * 4 + 3):
        changed = bytearray(sound)
        changed[place] ^= 1 << place % 8
        path.write_bytes(bytes(changed))
        with (
            pytest.raises(DataError, match="have changed"),
            open_arrays(path, size_bytes, WHO) as file,
        ):
            for name in file.arrays:
                file.read(name)
