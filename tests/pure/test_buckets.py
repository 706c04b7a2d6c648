import math
import random

import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import (
    SMALLEST_SPLIT_BYTES,
    TensorInfo,
    plan_buckets,
    predecessors,
)

MIB = 1 << 20


def infos(*sizes, dtype="float32"):
    return [TensorInfo(size, dtype) for size in sizes]


def test_order_is_that_of_backprop_last_first():
    plan = plan_buckets(infos(4, 4, 4), bucket_bytes=4, first_bucket_bytes=4)
    assert [b.indices for b in plan] == [(2,), (1,), (0,)]


def test_the_first_and_the_last_bucket_are_small_and_the_rest_fill_up():
    plan = plan_buckets(
        infos(*[MIB] * 60), bucket_bytes=25 * MIB, first_bucket_bytes=MIB
    )
    assert [b.size_bytes // MIB for b in plan] == [1, 25, 25, 8, 1]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        # A small classifier behind a large layer, and convolutions, which take long.
        ([74_000, 5_000_000, 6_000], [5_006_000, 74_000]),
        # The large layer is all there is to hide: it does not join.
        ([5_000_000, 6_000], [6_000, 5_000_000]),
        # Above the limit it travels alone.
        ([74_000, 30_000_000, 6_000], [6_000, 30_000_000, 74_000]),
        # The end is one tensor, where that is larger than the first bucket.
        ([3_000_000, 5_000_000, 2_000_000], [2_000_000, 5_000_000, 3_000_000]),
        # Many small ones at the end are one bucket.
        ([400_000] * 5 + [9_000_000] * 2, [9_000_000, 10_200_000, 800_000]),
    ],
)
def test_large_layers_do_not_wait_for_small_ones(sizes, expected):
    plan = plan_buckets(infos(*sizes), bucket_bytes=25 * MIB, first_bucket_bytes=MIB)
    assert [b.size_bytes for b in plan] == expected


def test_several_tensors_are_never_one_pack_of_everything():
    half = SMALLEST_SPLIT_BYTES // 2
    plan = plan_buckets(infos(half, half), bucket_bytes=MIB, first_bucket_bytes=MIB)
    assert len(plan) == 2


def test_a_tiny_set_is_one_message():
    plan = plan_buckets(infos(8, 8, 8), bucket_bytes=MIB, first_bucket_bytes=MIB)
    assert [b.indices for b in plan] == [(2, 1, 0)]


def test_what_is_ready_last_travels_last_whatever_its_type():
    tensors = infos(*[MIB] * 6) + infos(MIB // 4, dtype="float16") + infos(*[MIB] * 5)
    plan = plan_buckets(tensors, bucket_bytes=25 * MIB, first_bucket_bytes=MIB)
    assert [(b.dtype, b.size_bytes / MIB) for b in plan] == [
        ("float32", 1),
        ("float16", 0.25),
        ("float32", 9),
        ("float32", 1),
    ]


def test_a_tensor_above_the_limit_travels_alone():
    plan = plan_buckets(infos(10, 1000, 10), bucket_bytes=100, first_bucket_bytes=100)
    assert [b.indices for b in plan] == [(2,), (1,), (0,)]


def test_types_do_not_mix():
    mixed = [
        TensorInfo(8, "float32"),
        TensorInfo(8, "float16"),
        TensorInfo(8, "float32"),
    ]
    plan = plan_buckets(mixed, bucket_bytes=100, first_bucket_bytes=100)
    assert {b.dtype: b.indices for b in plan} == {
        "float32": (2, 0),
        "float16": (1,),
    }


def test_empty_tensors_stay_home_and_unknown_sizes_travel_alone():
    plan = plan_buckets(infos(8, 0, None, 8), bucket_bytes=100, first_bucket_bytes=100)
    assert sorted(b.indices for b in plan) == [(2,), (3, 0)]
    assert {b.size_bytes for b in plan} == {None, 16}


def test_random_sets_keep_every_promise():
    rng = random.Random(1)
    for _ in range(300):
        sizes = [rng.choice([0, 4, 400, 40_000, 4_000_000]) for _ in range(40)]
        tensors = [TensorInfo(s, rng.choice(["float32", "float16"])) for s in sizes]
        limit, first = rng.choice([(MIB, MIB), (5 * MIB, 1000), (100, 10**9)])
        plan = plan_buckets(tensors, bucket_bytes=limit, first_bucket_bytes=first)
        seen = [i for b in plan for i in b.indices]
        assert sorted(seen) == [i for i, s in enumerate(sizes) if s]
        for bucket in plan:
            assert {tensors[i].dtype for i in bucket.indices} == {bucket.dtype}
            assert bucket.size_bytes == sum(sizes[i] for i in bucket.indices)
            assert len(bucket.indices) == 1 or bucket.size_bytes <= limit
            assert list(bucket.indices) == sorted(bucket.indices, reverse=True)
        if sum(sizes) >= SMALLEST_SPLIT_BYTES and len(seen) > 1:
            assert len(plan) > 1
        last = plan[-1]
        assert min(seen) in last.indices or tensors[min(seen)].size_bytes is None
        small = max(first, SMALLEST_SPLIT_BYTES)
        assert len(last.indices) == 1 or last.size_bytes <= small


def test_the_number_of_buckets_is_what_the_sizes_say():
    sizes = [MIB] * 161
    plan = plan_buckets(infos(*sizes), bucket_bytes=25 * MIB, first_bucket_bytes=MIB)
    assert len(plan) == 2 + math.ceil(159 / 25)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucket_bytes": 0, "first_bucket_bytes": 1},
        {"bucket_bytes": 1, "first_bucket_bytes": 0},
    ],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ConfigurationError, match="Received"):
        plan_buckets(infos(4, 4), **arguments)


@pytest.mark.parametrize(
    "sizes, between_bytes, expected",
    [
        ([4, 4, 4, 4], 1, (None, None, 0, 1)),
        ([4, 4, 4, 4], 5, (None, None, None, 0)),
        # Every second one is small: two large ones are there at once, and no third.
        ([8, 1, 8, 1, 8], 8, (None, None, None, 1, 1)),
        ([4, 4], 9, (None, None)),
        ([], 1, ()),
    ],
)
def test_a_bucket_waits_for_the_one_so_many_bytes_ahead(sizes, between_bytes, expected):
    # The plan begins at the last tensor.
    plan = plan_buckets(infos(*sizes[::-1]), bucket_bytes=1, first_bucket_bytes=1)
    assert [bucket.size_bytes for bucket in plan] == sizes
    assert predecessors(plan, between_bytes=between_bytes) == expected
