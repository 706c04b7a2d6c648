"""Each method of tfdp.compression by itself: what arrives, what is left, alike on all.

The peers are threads that meet at each exchange; no strategy is involved.
"""

import threading

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support.compression_table import IDENTITIES, LOSSY, METHODS
from tfdp.compression import (
    FP8,
    Cast,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
    from_config,
)
from tfdp.errors import ConfigurationError

# Sizes that are no multiple of any block, and matrices that are high and wide.
SHAPES = [(37, 5), (3, 3, 4, 7), (2, 61)]


class Threads:
    """So many peers, each in a thread of its own."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=300)
        self.brought = [None] * size

    def run(self, function):
        results, errors = [None] * self.size, []

        def work(place):
            try:
                results[place] = function(ThreadPeer(self, place))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=[p]) for p in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class ThreadPeer:
    def __init__(self, threads, place):
        self.threads, self.place, self.size = threads, place, threads.size

    def everybody(self, mine):
        self.threads.brought[self.place] = mine
        self.threads.barrier.wait()
        brought = list(self.threads.brought)
        self.threads.barrier.wait()
        return brought

    def sum(self, tensors):
        brought = self.everybody(tensors)
        totals = list(brought[0])
        for other in brought[1:]:
            totals = [t + o for t, o in zip(totals, other, strict=True)]
        return totals

    def gather(self, words):
        assert words.dtype == tf.int32
        return tf.stack(self.everybody(words))

    def gather_ahead(self, words):
        return self.gather(words), words

    def all_to_all(self, rows):
        assert rows.dtype == tf.int32
        return tf.stack([theirs[self.place] for theirs in self.everybody(rows)])


class Alone:
    """What comes back is what one has sent."""

    def sum(self, tensors):
        return tensors


def draw(peers, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    return [
        [(size * rng.standard_normal(shape)).astype("float32") for shape in SHAPES]
        for _ in range(peers)
    ]


def exchange(method, values, step=5):
    """Each peer's `Exchanged`, as arrays."""

    def one(peer):
        mine = [tf.constant(value) for value in values[peer.place]]
        slots = [
            {name: tf.zeros(size) for name, size in method.slots(v.shape).items()}
            for v in mine
        ]
        mine, slots = method.values(mine, slots)
        found = method.exchange(mine, slots, peer, tf.constant(step, tf.int64))
        return [s.numpy() for s in found.sums], [x.numpy() for x in found.left]

    return Threads(len(values)).run(one)


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("peers", [2, 3, 5])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sums_and_what_is_left_are_the_values(method, peers):
    values = draw(peers)
    found = exchange(method, values)
    for place, _ in enumerate(SHAPES):
        total = sum(v[place].astype(float) for v in values)
        sums = [s[place] for s, _ in found]
        left = sum(x[place].astype(float) for _, x in found)
        for other in sums[1:]:  # bit for bit
            np.testing.assert_array_equal(sums[0], other)
        # A number is rounded when it is added to a sum (peers times), when a part is
        # taken from it (peers times) and, where a product of matrices stands for it, in
        # sums of up to 61 products: below 2 * peers + 2 * 61 roundings of numbers
        # below 8 * peers.
        bound = (2 * peers + 122) * 8 * peers * 2.0**-24
        np.testing.assert_allclose(sums[0] + left, total, rtol=0, atol=bound)
        assert np.abs(values[0][place]).max() < 8


@pytest.mark.parametrize("name", [n for n in IDENTITIES if n != "power-sgd-later"])
def test_identities_leave_nothing(name):
    found = exchange(IDENTITIES[name], draw(2))
    for parts in zip(*(left for _, left in found), strict=True):
        # Sums of 61 products of numbers below 8. Of a product of matrices each peer
        # may keep what the others' cancels.
        assert np.abs(sum(parts)).max() <= 4 * 61 * 8 * 2.0**-24


@pytest.mark.parametrize("method", LOSSY.values(), ids=LOSSY)
def test_lossy_methods_leave_less_than_there_was(method):
    """|x - C(x)|^2 < |x|^2, the condition for error feedback to converge."""
    values = draw(2)
    for mine, (_, left) in zip(values, exchange(method, values), strict=True):
        for value, part in zip(mine, left, strict=True):
            assert 0 < np.linalg.norm(part) < np.linalg.norm(value)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_zeros_and_numbers_at_the_ends_of_float32(method, size):
    values = draw(2, size=size)
    for sums, left in exchange(method, values):
        for total, part, value in zip(sums, left, values[0], strict=True):
            if "'float16'" not in str(method) or size < 1:
                assert np.isfinite(total).all() and np.isfinite(part).all()
            if size == 0:
                np.testing.assert_array_equal(total, np.zeros_like(value))


@pytest.mark.parametrize("most, method", [(127, Int8(32)), (7, Int4(32))])
def test_integers_are_the_nearest(most, method):
    rows = np.random.default_rng(0).standard_normal((50, 32)).astype("float32")
    sent = method.decode_rows(method.encode_rows(tf.constant(rows))).numpy()
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(most)
    # Half a step; and the product of a code below 128 and a scale is rounded.
    assert (np.abs(sent - rows) <= scale * (0.5 + 128 * 2.0**-22)).all()


@pytest.mark.parametrize(
    "form, dtype",
    [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)],
)
def test_fp8_rounds_as_ml_dtypes_does(form, dtype):
    """All 256 numbers, the halves between neighbours and what is beside those."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype("float32")
    finite = np.sort(numbers[np.isfinite(numbers)])
    halves = (finite[1:] + finite[:-1]) / 2
    wide = np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.linspace(
        -9, 6, 2000
    )
    given = [numbers, halves, np.nextafter(halves, 9e9), np.nextafter(halves, -9e9)]
    given = np.concatenate([*given, wide, [np.inf, -np.inf, np.nan, 1e30]])
    given = np.pad(given, (0, -len(given) % 256)).astype("float32").reshape(-1, 256)
    method = FP8(form)
    sent = method.decode_rows(method.encode_rows(tf.constant(given))).numpy()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(sent, given.astype(dtype).astype("float32"))


def test_fp8_with_a_scale_that_is_too_large_is_not_silent():
    found = exchange(FP8(scale=2.0**20), draw(2))
    assert all(np.isnan(total).any() for sums, _ in found for total in sums)


@pytest.mark.parametrize("peers", [2, 3])
@pytest.mark.parametrize(
    "method",
    [Int8(32), Int4(32), SignSGD(32), TopK(0.1)],
    ids=lambda m: type(m).__name__,
)
def test_what_is_not_finite_is_told_without_looking_at_all_sums(method, peers):
    def told(number, place=0):
        """With this number at one place of one peer, or everywhere."""

        def one(peer):
            value = np.full((40, 40), 0.5 if place == 0 else number, "float32")
            if peer.place == peers - 1:
                value[17, 3] = number
            given = [tf.constant(value)]
            found = method.exchange(given, [{}], peer, tf.constant(0, tf.int64))
            numbers = np.concatenate([t.numpy().ravel() for t in found.telling])
            return numbers.size, np.isfinite(numbers).all(), np.isfinite(found.sums[0])

        return Threads(peers).run(one)

    for number in (np.inf, -np.inf, np.nan):
        for size, is_finite, _ in told(number):
            assert not is_finite and size < 40 * 40
    # Sums of these overflow, and no number of them is an infinity.
    for _, is_finite, sums in told(2.5e38, place=1):
        assert not is_finite and not np.all(sums)
    for _, is_finite, sums in told(1e36, place=1):
        assert is_finite and np.all(sums)


def test_sign_sends_the_mean_size():
    method = SignSGD(32, min_bytes=0)
    rows = np.random.default_rng(0).standard_normal((9, 32)).astype("float32")
    rows[0, 0] = 0.0
    sent = method.decode_rows(method.encode_rows(tf.constant(rows))).numpy()
    mean = np.abs(rows).mean(axis=1, keepdims=True)
    expected = np.where(rows >= 0, mean, -mean)
    np.testing.assert_allclose(sent, expected, rtol=32 * 2.0**-24)


def test_top_k_sends_the_largest():
    value = np.random.default_rng(0).standard_normal((20, 10)).astype("float32")
    (total,), _ = exchange(TopK(0.05), [[value], [0 * value]])[0]
    kept = np.sort(np.abs(value).ravel())[-10:]
    np.testing.assert_array_equal(np.sort(np.abs(total).ravel())[-10:], kept)
    assert (total != 0).sum() == 10


def test_top_k_sends_no_fewer_numbers_than_its_ratio():
    value = np.random.default_rng(0).standard_normal((7, 3)).astype("float32")
    (total,), _ = exchange(TopK(0.1), [[value], [0 * value]])[0]
    assert (total != 0).sum() == 3  # of 21


def test_momentum_correction_is_that_of_the_paper():
    """u = m u + g; v = v + u; what is sent is 0 in both: algorithm 4, line by line."""
    method, momentum = TopK(0.25, momentum_correction=0.5, min_bytes=0), 0.5
    rng = np.random.default_rng(0)
    u = v = np.zeros((4, 4), "float32")
    slots, residual = [{"momentum": tf.zeros((4, 4))}], tf.zeros((4, 4))
    for step in range(5):
        gradient = rng.standard_normal((4, 4)).astype("float32")
        u = momentum * u + gradient
        v = v + u
        mask = np.abs(v) >= np.sort(np.abs(v).ravel())[-4]
        values, slots = method.values([tf.constant(gradient)], slots)

        def one(peer, values=values, slots=slots, residual=residual, step=step):
            mine = [values[0] + residual] if peer.place == 0 else [0 * values[0]]
            return method.exchange(mine, slots, peer, tf.constant(step, tf.int64))

        found = Threads(2).run(one)[0]
        np.testing.assert_array_equal(found.sums[0], v * mask)
        u, v = u * ~mask, v * ~mask
        slots, residual = found.slots, found.left[0]
        np.testing.assert_array_equal(residual, v)
        np.testing.assert_array_equal(slots[0]["momentum"], u)


def test_warm_up_of_top_k_ends_at_its_ratio():
    method = TopK(0.01, warmup_steps=4)
    counts = [int(method._count(10_000, tf.constant(s, tf.int64))) for s in range(6)]
    # 1/4, then a factor of 25^-1/4 in each step; rounding in float32 may add one.
    expected = [2500, 1119, 500, 224, 100, 100]
    assert np.abs(np.array(counts) - expected).max() <= 1
    assert counts[-1] == 100


def test_random_k_without_feedback_is_right_on_average():
    method = RandomK(0.25, error_feedback=False)
    value = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")
    total = np.zeros_like(value, float)

    @tf.function
    def sent(step):
        return method.exchange([tf.constant(value)], [{}], Alone(), step).sums[0]

    for step in range(2000):
        total += sent(tf.constant(step, tf.int64)).numpy()
    # Each mean has a deviation of |x| sqrt(3 / 2000); five of them, and 64 numbers.
    bound = 5 * np.sqrt(3 / 2000) * np.abs(value)
    assert (np.abs(total / 2000 - value) <= bound).all()


def test_random_k_chooses_other_places_in_every_step():
    method = RandomK(0.1)
    value = tf.zeros((100, 10))
    chosen = [set(method._places(value, 0, tf.constant(s)).numpy()) for s in range(3)]
    assert all(len(places) == 100 for places in chosen)
    assert len(chosen[0] & chosen[1]) < 50 > len(chosen[1] & chosen[2])


def test_power_sgd_is_the_best_of_its_rank_after_some_steps():
    """The same matrix again and again: iteration finds its singular vectors."""
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.standard_normal((30, 20)), full_matrices=False)
    sizes = 0.5 ** np.arange(20)
    value = ((u * sizes) @ v).astype("float32")
    method = PowerSGD(2, start_step=0, min_bytes=0, error_feedback=False)
    slots = [{"q": tf.zeros((20, 2))}]
    for step in range(12):

        def one(peer, slots=slots, step=step):
            mine = [tf.constant(value / 2)]
            return method.exchange(mine, slots, peer, tf.constant(step, tf.int64))

        found = Threads(2).run(one)[0]
        slots = found.slots
    best = (u[:, :2] * sizes[:2]) @ v[:2]
    # The third singular value is half of the second: what is wrong of the subspace
    # falls by 1/4 in each step, 12 times; and sums of 30 products are rounded.
    assert np.abs(found.sums[0] - best).max() <= 4.0**-12 * 10 + 60 * 2.0**-24


@pytest.mark.parametrize(
    "method, factor",
    [(Int8(), 3.9), (Int4(), 7.0), (FP8(), 3.9), (SignSGD(), 31.0), (TopK(), 12.4)],
)
def test_messages_are_as_small_as_they_say(method, factor):
    shapes = [(784, 256), (256, 128)]
    dense = 4 * sum(rows * columns for rows, columns in shapes)
    sent = method.sent_bytes(shapes, 4)
    assert 2 * dense * 3 / 4 / sent >= factor * (2 if isinstance(method, TopK) else 1)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Int8(30), "multiple of 4"),
        (lambda: Int4(12), "multiple of 8"),
        (lambda: SignSGD(True), "multiple of 32"),
        (lambda: FP8("e3m4"), "'e4m3' or 'e5m2'"),
        (lambda: FP8(scale=0.0), "finite number above 0"),
        (lambda: Cast("float32"), "'bfloat16' or 'float16'"),
        (lambda: TopK(0.0), "above 0, to 0.5"),
        (lambda: TopK(1), "places are sent as well"),
        (lambda: TopK(0.51), "more bytes than the whole gradient. Received: 0.51"),
        (lambda: TopK(0.1, momentum_correction=1.0), "from 0 to below 1"),
        (
            lambda: TopK(0.1, momentum_correction=0.9, error_feedback=False),
            "None without error_feedback",
        ),
        (lambda: TopK(0.1, warmup_steps=-1), "integer of at least 0"),
        (lambda: RandomK(1.5), "above 0, to 1"),
        (lambda: RandomK(seed=-1), "from 0 to"),
        (lambda: PowerSGD(0), "at least 1"),
        (lambda: PowerSGD(1, start_step=1.5), "integer of at least 0"),
        (lambda: PowerSGD(min_compression_rate=0), "above 0"),
        (lambda: from_config({"method": "Zip"}), "Known: Cast, FP8"),
        (lambda: from_config("int8"), "called 'int8'. Known: Cast, FP8"),
    ],
)
def test_nonsense_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_config_makes_the_same_method(method):
    assert from_config(method.get_config()) == method
