"""Records are followed across blocks, members of an archive and the end of a file."""

import gzip
import io
import struct
import zlib

import pytest

from tfdp.data import framing
from tfdp.data.framing import FramingFault, digest_of_ends, scan_records

LENGTHS = [0, 1, 3, 17, 64, 5, 0]


def row_of_records(lengths=LENGTHS):
    """Checksums of zero: nobody compares them here."""
    return b"".join(
        struct.pack("<QI", length, 0) + bytes(length) + struct.pack("<I", number)
        for number, length in enumerate(lengths)
    )


def scan(tmp_path, content, compression=""):
    (tmp_path / "file").write_bytes(content)
    return scan_records(tmp_path / "file", compression)


@pytest.fixture(params=[1, 5, 12, 16, 2**20])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(framing, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("block_bytes")
def test_records_are_counted_whatever_the_blocks(tmp_path):
    content = row_of_records()
    plain = scan(tmp_path, content)
    assert plain.records == len(LENGTHS)
    half = len(content) // 2
    for packed, kind in (
        (gzip.compress(content), "GZIP"),
        (zlib.compress(content), "ZLIB"),
        (gzip.compress(content[:half]) + gzip.compress(content[half:]), "GZIP"),
    ):
        assert scan(tmp_path, packed, kind) == plain


@pytest.mark.usefixtures("block_bytes")
def test_every_cut_is_found_at_its_record(tmp_path):
    content = row_of_records()
    ends = [0]
    for length in LENGTHS:
        ends.append(ends[-1] + 16 + length)
    for size in range(len(content)):
        whole = sum(end <= size for end in ends) - 1
        if size in ends:
            assert scan(tmp_path, content[:size]).records == whole
            continue
        with pytest.raises(FramingFault) as caught:
            scan(tmp_path, content[:size])
        assert caught.value.record == whole


def test_a_cut_archive_is_found(tmp_path):
    packed = gzip.compress(row_of_records())
    for size in range(1, len(packed)):
        with pytest.raises(FramingFault):
            scan(tmp_path, packed[:size], "GZIP")


def test_order_and_checksums_are_in_the_digest(tmp_path):
    digests = {
        scan(tmp_path, content).digest
        for content in (
            row_of_records(),
            row_of_records(LENGTHS[::-1]),
            row_of_records(LENGTHS[:-1]),
            row_of_records()[:-1] + b"\x07",
        )
    }
    assert len(digests) == 4


def test_a_huge_length_takes_no_memory(tmp_path):
    for length in (2**40, 2**63, 2**64 - 1):
        content = row_of_records() + struct.pack("<QI", length, 0) + bytes(40)
        with pytest.raises(FramingFault) as caught:
            scan(tmp_path, content)
        assert caught.value.record == len(LENGTHS) and caught.value.is_claim


def test_an_archive_of_zeros_is_read_in_blocks(tmp_path):
    """64 MiB from 64 KiB: what is held at a time is a block."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as file:
        file.write(struct.pack("<QI", 2**26, 0))
        for _ in range(64):
            file.write(bytes(2**20))
        file.write(bytes(4))
    assert scan(tmp_path, packed.getvalue(), "GZIP").records == 1


def test_the_ends_are_those_of_the_file(tmp_path):
    path = tmp_path / "file"
    digests = set()
    for place in (None, 0, 4095, 5000, 20_000 - 4096, 19_999):
        content = bytearray(20_000)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        digests.add(digest_of_ends(path))
    # The middle is not looked at.
    assert len(digests) == 5
