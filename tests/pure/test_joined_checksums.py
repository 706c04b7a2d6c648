"""CRC-32 of bytes in a row, from the CRC-32 of each part, against zlib's own."""

import random
import zlib

import pytest

from tfdp.data.tar_samples import joined_crc32


@pytest.mark.parametrize("seed", range(20))
def test_parts_have_the_checksum_of_the_whole(seed):
    drawn = random.Random(seed)
    content = drawn.randbytes(drawn.randrange(1 << drawn.randrange(1, 18)))
    at = drawn.choice([0, len(content), drawn.randrange(len(content) + 1)])
    first, second = zlib.crc32(content[:at]), zlib.crc32(content[at:])
    assert joined_crc32(first, second, len(content) - at) == zlib.crc32(content)


def test_a_part_may_be_longer_than_memory():
    # Zeros behind zeros, by halves: each half has the checksum of the other.
    half, size_bytes = zlib.crc32(bytes(1 << 20)), 1 << 20
    for _ in range(4):
        half, size_bytes = joined_crc32(half, half, size_bytes), 2 * size_bytes
    assert half == zlib.crc32(bytes(size_bytes))
