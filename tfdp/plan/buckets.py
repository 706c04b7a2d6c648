"""The bucket plan: which gradients travel together. Pure; no framework is imported.

Backprop computes the last layers' gradients first, so buckets are filled in the reverse
order of the variables. The first bucket is small, to start its exchange early; so is
the last, which no computation hides. Those between are large enough to use the link
well. (Li et al. 2020, "PyTorch Distributed", section 3.2.3, uses the same two sizes;
its last bucket is not kept small.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdp.errors import ConfigurationError

# Smaller messages cost their latency only: two of them cost twice as much as one and
# overlap nothing, so sets below this size are not split.
SMALLEST_SPLIT_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's size in bytes (None: unknown before the step runs) and element type.

    Buckets never mix types.
    """

    size_bytes: int | None
    dtype: str


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that travel as one buffer, in the order of `indices`.

    `size_bytes` is None when one size is unknown.
    """

    indices: tuple[int, ...]
    dtype: str
    size_bytes: int | None


@dataclasses.dataclass
class _OpenBucket:
    indices: list[int]
    size_bytes: int = 0


def plan_buckets(
    tensors: Sequence[TensorInfo], *, bucket_bytes: int, first_bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Groups tensors into buckets, in the order in which backprop computes them.

    A bucket holds one dtype and at most `bucket_bytes`; a larger tensor travels alone,
    and so does one of unknown size. The first bucket leaves with the tensor that fills
    it to `first_bucket_bytes`, or to half of all bytes. The last one holds at most
    `first_bucket_bytes`, or one tensor. Several tensors never end up in one bucket of
    everything, except sets below 64 KiB, which are not split: a second message costs
    more there than it hides. Empty tensors are left out.

    The tensors become ready last to first. Returns the buckets in launch order.

    >>> sizes = [TensorInfo(400, "float32")] * 5
    >>> [b.indices for b in plan_buckets(sizes, bucket_bytes=800,
    ...                                  first_bucket_bytes=400)]
    [(4,), (3, 2), (1, 0)]
    """
    if bucket_bytes < 1 or first_bucket_bytes < 1:
        raise ConfigurationError(
            "bucket_bytes and first_bucket_bytes must be at least 1. Received: "
            f"bucket_bytes={bucket_bytes}, first_bucket_bytes={first_bucket_bytes}."
        )
    total_bytes = sum(t.size_bytes or 0 for t in tensors)
    first_limit = min(first_bucket_bytes, bucket_bytes)
    if total_bytes >= SMALLEST_SPLIT_BYTES:
        first_limit = min(first_limit, -(-total_bytes // 2))

    places = reversed(range(len(tensors)))
    sent = [place for place in places if tensors[place].size_bytes != 0]
    closed = _filled(sent, tensors, bucket_bytes, first_limit)
    # A bucket of a rare type fills slowly: launch buckets by their last tensor.
    turn = {place: number for number, place in enumerate(sent)}
    closed.sort(key=lambda bucket: turn[bucket.indices[-1]])
    if closed:
        closed[-1:] = _with_small_end(closed[-1], tensors, first_bucket_bytes)
    return tuple(closed)


def merge_if_fits(buckets: Sequence[Bucket], bucket_bytes: int) -> tuple[Bucket, ...]:
    """One bucket where all are of one type and fit together, else `buckets`.

    For tensors that become ready together: a bucket gains nothing by leaving early.

    >>> merge_if_fits([Bucket((2,), "float32", 8), Bucket((1, 0), "float32", 16)], 24)
    (Bucket(indices=(2, 1, 0), dtype='float32', size_bytes=24),)
    """
    sizes = [bucket.size_bytes for bucket in buckets]
    if len({bucket.dtype for bucket in buckets}) != 1 or None in sizes:
        return tuple(buckets)
    all_bytes = sum(size or 0 for size in sizes)
    if all_bytes > bucket_bytes:
        return tuple(buckets)
    places = tuple(place for bucket in buckets for place in bucket.indices)
    return (Bucket(places, buckets[0].dtype, all_bytes),)


def _filled(
    sent: Sequence[int],
    tensors: Sequence[TensorInfo],
    bucket_bytes: int,
    first_limit: int,
) -> list[Bucket]:
    """Buckets of one type each, in the order in which they become full."""
    closed: list[Bucket] = []
    open_buckets: dict[str, _OpenBucket] = {}

    def close(dtype: str) -> None:
        bucket = open_buckets.pop(dtype)
        closed.append(Bucket(tuple(bucket.indices), dtype, bucket.size_bytes))

    for place in sent:
        info = tensors[place]
        if info.size_bytes is None:
            closed.append(Bucket((place,), info.dtype, None))
            continue
        # The first bucket takes the tensor that fills it, unless that is the last of
        # all. In a bucket with the following layers it would wait for them, and a
        # model's first layers often take most of the time.
        fills = not closed and place != sent[-1]
        limit = bucket_bytes if closed or fills else first_limit
        bucket = open_buckets.get(info.dtype)
        if bucket is not None and bucket.size_bytes + info.size_bytes > limit:
            close(info.dtype)
            bucket = None
        if bucket is None:
            bucket = open_buckets[info.dtype] = _OpenBucket([])
        bucket.indices.append(place)
        bucket.size_bytes += info.size_bytes
        if bucket.size_bytes >= (bucket_bytes if closed else first_limit):
            close(info.dtype)
    for dtype in list(open_buckets):
        close(dtype)
    return closed


def _with_small_end(
    bucket: Bucket, tensors: Sequence[TensorInfo], most_bytes: int
) -> list[Bucket]:
    """Splits a bucket if needed: the second part has `most_bytes`, or one tensor."""
    all_bytes = bucket.size_bytes or 0
    is_small = all_bytes <= max(most_bytes, SMALLEST_SPLIT_BYTES)
    if len(bucket.indices) == 1 or is_small:
        return [bucket]
    start, end_bytes = len(bucket.indices), 0
    while start > 1:
        size_bytes = tensors[bucket.indices[start - 1]].size_bytes or 0
        if end_bytes and end_bytes + size_bytes > most_bytes:
            break
        start, end_bytes = start - 1, end_bytes + size_bytes
    return [
        Bucket(bucket.indices[:start], bucket.dtype, all_bytes - end_bytes),
        Bucket(bucket.indices[start:], bucket.dtype, end_bytes),
    ]


def predecessors(
    buckets: Sequence[Bucket], *, between_bytes: int
) -> tuple[int | None, ...]:
    """The place, for each bucket, of the one to finish before its tensors are computed.

    So few buckets are in memory at any time: the one that is being computed, and those
    after its predecessor, which hold `between_bytes` or little more. None: no wait.

    >>> sizes = [TensorInfo(400, "float32")] * 4
    >>> plan = plan_buckets(sizes, bucket_bytes=400, first_bucket_bytes=400)
    >>> predecessors(plan, between_bytes=400)
    (None, None, 0, 1)
    """
    found: list[int | None] = []
    for number in range(len(buckets)):
        total_bytes, place = 0, number - 1
        while place >= 0 and total_bytes < between_bytes:
            total_bytes += buckets[place].size_bytes or 0
            place -= 1
        found.append(place if place >= 0 and total_bytes >= between_bytes else None)
    return tuple(found)
