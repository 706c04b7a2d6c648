"""Files past the page cache hold what was written, whatever the file system allows."""

import errno
import itertools
import os

import numpy as np
import pytest

from tests.support.open_files import open_files
from tfdp.files import direct
from tfdp.files.direct import DirectReader, DirectWriter, page_buffer

BLOCK = 4 * direct.ALIGNED_BYTES
SIZES = (0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


@pytest.fixture(params=["direct", "refused at once", "refused later", "in pieces"])
def kind(request, monkeypatch):
    """Of a file system."""
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct, "CHECK_BYTES", 2 * BLOCK)
    monkeypatch.setattr(direct, "SMALL_BYTES", 100)
    real_open, real = os.open, {"preadv": os.preadv, "pwritev": os.pwritev}
    past_cache, calls = set(), itertools.count()

    def opened(path, flags, *mode):
        if flags & os.O_DIRECT and request.param == "refused at once":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags, *mode)
        if flags & os.O_DIRECT:
            past_cache.add(descriptor)
        else:
            past_cache.discard(descriptor)
        return descriptor

    def call(name):
        def called(descriptor, buffers, at):
            is_direct = descriptor in past_cache
            if is_direct and request.param == "refused later" and next(calls):
                raise OSError(errno.EINVAL, "Invalid argument")
            if request.param == "in pieces":
                # As after a signal: any part of what was asked for. A part that is no
                # multiple of the disk's blocks is refused when it goes on from there.
                buffers = [buffers[0][: max(1, len(buffers[0]) // 2)]]
            return real[name](descriptor, buffers, at)

        return called

    monkeypatch.setattr(os, "open", opened)
    for name in real:
        monkeypatch.setattr(os, name, call(name))
    return request.param


def written(path, size_bytes):
    content = np.random.default_rng(size_bytes).bytes(size_bytes)
    with DirectWriter(path) as file:
        for begin in range(0, size_bytes, 5_000):
            file.write(content[begin : begin + 5_000])
    return content


def read(path, begin, end, buffer):
    file = DirectReader(path)
    try:
        return b"".join(block.tobytes() for block in file.blocks(begin, end, buffer))
    finally:
        file.close()


@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_was_written_is_read(tmp_path, kind, size_bytes):
    content = written(tmp_path / "some", size_bytes)
    assert (tmp_path / "some").read_bytes() == content
    small = page_buffer(direct.CHECK_BYTES)
    for begin, end in itertools.combinations_with_replacement(
        sorted({0, 1, 4096, 4097, size_bytes // 2, size_bytes - 1, size_bytes}), 2
    ):
        if 0 <= begin <= end <= size_bytes:
            expected = content[begin:end]
            assert read(tmp_path / "some", begin, end, small) == expected
            whole = page_buffer(DirectReader.buffer_bytes(begin, end))
            assert read(tmp_path / "some", begin, end, whole) == expected
            first = DirectReader.offset(begin)
            assert whole[first : first + end - begin].tobytes() == expected


def test_a_shorter_file_is_no_endless_one(tmp_path, kind):
    written(tmp_path / "some", 2 * BLOCK + 7)
    buffer = page_buffer(direct.CHECK_BYTES)
    for end in (2 * BLOCK + 8, 3 * BLOCK, 9 * BLOCK):
        with pytest.raises(ValueError, match="ends before"):
            read(tmp_path / "some", 3, end, buffer)


def test_a_full_disk_is_told_and_nothing_is_left_open(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files()
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "some", 1)
    assert not open_files() - before


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        DirectReader(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        DirectWriter(tmp_path / "none" / "some")


def test_writing_over_a_file_leaves_nothing_of_it(tmp_path):
    (tmp_path / "some").write_bytes(b"x" * 3 * BLOCK)
    content = written(tmp_path / "some", 10)
    assert (tmp_path / "some").read_bytes() == content
