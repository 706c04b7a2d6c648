"""The CRC-32 of bytes in a row, by the CRC-32 of each part: without the bytes."""

from __future__ import annotations

import functools

__all__ = ["joined_crc32"]

# Of polynomials over two elements, the highest bit the lowest power: x^0, and the one
# by which CRC-32 divides, without its x^32.
ONE, DIVISOR = 1 << 31, 0xEDB88320


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """As `zlib.crc32` of both parts, one behind the other.

        crc(A B) = crc(A) x^(8 |B|) + crc(B)

    Args:
      first: `zlib.crc32` of the first part.
      second: that of the second.
      second_bytes: length of the second, at least 0.

    Source: Mark Adler, `crc32_combine` of zlib 1.2.12.

    >>> import zlib
    >>> joined_crc32(zlib.crc32(b"12"), zlib.crc32(b"345"), 3) == zlib.crc32(b"12345")
    True
    """
    shift, bit = ONE, 3  # a byte is 2^3 bits
    while second_bytes:
        if second_bytes & 1:
            shift = _product(_power(bit), shift)
        second_bytes >>= 1
        bit += 1
    return _product(shift, first) ^ second


@functools.cache
def _power(bit: int) -> int:
    """x^(2^bit)."""
    if not bit:
        return ONE >> 1
    half = _power(bit - 1)
    return _product(half, half)


def _product(one: int, other: int) -> int:
    product = 0
    while one:
        if one & ONE:
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (DIVISOR if other & 1 else 0)
    return product
