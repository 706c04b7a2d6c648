"""The places of the largest numbers are those that ordering all of them gives."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.compression import TopK, top_k
from tfdp.compression.top_k import count_of, largest_places

# Above 100 times the least count for which a sample is taken.
ELEMENTS = 200_003
NORMAL = np.random.default_rng(0).standard_normal(ELEMENTS).astype("float32")
PLACES = np.arange(ELEMENTS)


def sparse(filled):
    """All but so many are zeros."""
    numbers = np.zeros(ELEMENTS, "float32")
    chosen = np.random.default_rng(1).permutation(ELEMENTS)[:filled]
    numbers[chosen] = NORMAL[chosen]
    return numbers


INPUTS = {
    "normal": NORMAL,
    # Some 40 different sizes, so that thousands are equal at the edge.
    "tied": np.round(NORMAL * 10) / np.float32(10),
    "two sizes": np.where(NORMAL > 1, np.float32(-2), np.float32(1)),
    "all equal": np.full(ELEMENTS, -3.0, "float32"),
    "all zero": np.where(PLACES % 2, np.float32(-0.0), np.float32(0.0)),
    "fewer numbers than are asked for": sparse(700),
    "a few more than are asked for": sparse(2100),
    "10^-38 to 10^38": np.clip(
        NORMAL * 10.0 ** (NORMAL.astype(float) * 10), -3e38, 3e38
    ),
    "below 1e-38": (NORMAL * np.float32(1e-40)).astype("float32"),
    "zeros, some below 1e-38": sparse(5000) * np.float32(1e-40),
    "growing": np.arange(ELEMENTS, dtype="float32"),
    "falling": -np.arange(ELEMENTS, dtype="float32")[::-1],
    # All of one place of an axis of 16, and a sample of every 16th would see none.
    "one of sixteen": np.where(PLACES % 16 == 5, NORMAL * 1000, NORMAL),
    "the largest at the end": np.where(PLACES < ELEMENTS - 2000, NORMAL, NORMAL * 100),
}
INPUTS = {name: numbers.astype("float32") for name, numbers in INPUTS.items()}


def expected(numbers, count):
    """The set, in the order of the places: largest first, of equal ones the first."""
    sizes = numbers.view(np.uint32) & 0x7FFFFFFF
    return np.sort(np.lexsort((PLACES[: len(sizes)], -sizes.astype(np.int64)))[:count])


@tf.function
def in_a_graph(numbers, count, least):
    return largest_places(numbers, count, least)


@pytest.mark.parametrize("count", [2001, 40_001])
@pytest.mark.parametrize("numbers", INPUTS.values(), ids=INPUTS)
def test_the_places_are_those_of_ordering_all(numbers, count):
    wanted = expected(numbers, count)
    # In a graph as well: TensorFlow's threads take numbers below 1e-38 for zeros.
    for found in (
        largest_places(tf.constant(numbers), count, count),
        in_a_graph(tf.constant(numbers), count, count),
        in_a_graph(tf.constant(numbers), tf.constant(count), 2001),
    ):
        assert found.dtype == tf.int32
        np.testing.assert_array_equal(np.sort(found), wanted)


def test_a_guess_that_is_too_high_changes_nothing(monkeypatch):
    monkeypatch.setattr(top_k, "DEVIATIONS", -6)
    found = largest_places(tf.constant(NORMAL), 2001, 2001)
    np.testing.assert_array_equal(np.sort(found), expected(NORMAL, 2001))


@pytest.mark.parametrize("kind, most", [("normal", 4000), ("one of sixteen", 8000)])
def test_few_numbers_are_ordered(kind, most, monkeypatch):
    """Else all this is for nothing."""
    ordered = []
    top_k = tf.math.top_k

    def noted(numbers, *rest, **options):
        ordered.append(numbers.shape[0])
        return top_k(numbers, *rest, **options)

    monkeypatch.setattr(tf.math, "top_k", noted)
    largest_places(tf.constant(INPUTS[kind]), 2001, 2001)
    sample, candidates = ordered
    # A sample of every 15th number; 1.5 times 2001.
    assert sample < ELEMENTS / 14 and 2001 <= candidates < most


def test_what_is_not_finite_comes_first():
    numbers = NORMAL.copy()
    places = [7, 70_000, 70_001, ELEMENTS - 1]
    numbers[places] = [np.nan, -np.inf, np.inf, -np.nan]
    found = largest_places(tf.constant(numbers), 2001, 2001).numpy()
    assert set(places) < set(found)
    np.testing.assert_array_equal(np.sort(found), expected(numbers, 2001))
    few = largest_places(tf.constant(numbers), 2, 2).numpy()
    assert set(few) == {7, ELEMENTS - 1}


class Both:
    """A peer beside another one, whose message is known."""

    size, place = 2, 0

    def __init__(self, theirs):
        self.theirs = theirs
        self.message = None

    def gather(self, words):
        self.message = words
        return tf.stack([words, words if self.theirs is None else self.theirs])


@pytest.mark.parametrize("kind", ["normal", "tied", "all zero"])
def test_an_exchange_has_the_bits_that_numpy_gives(kind):
    """Of two values each, one that is sampled and one that is not."""
    method = TopK(0.011, momentum_correction=0.9)
    values = [
        [INPUTS[kind][:200_000].reshape(400, 500), NORMAL[:1200].reshape(30, 40)],
        [INPUTS["growing"][:200_000].reshape(400, 500), NORMAL[5:1205].reshape(30, 40)],
    ]
    momenta = [[value * np.float32(0.5) for value in of_peer] for of_peer in values]
    theirs = Both(None)
    found = None
    for mine, slots in zip(reversed(values), reversed(momenta), strict=True):
        peer = Both(theirs.message)
        slots = [{"momentum": tf.constant(momentum)} for momentum in slots]
        found = method.exchange([tf.constant(m) for m in mine], slots, peer, 0)
        theirs = peer
    for place in range(2):
        total = np.zeros(values[0][place].size, "float32")
        for of_peer in values:
            flat = of_peer[place].ravel()
            at = expected(flat, count_of(0.011, flat.size))
            total[at] += flat[at]
        own = values[0][place].ravel()
        at = expected(own, count_of(0.011, own.size))
        left, momentum = own.copy(), momenta[0][place].ravel().copy()
        left[at], momentum[at] = 0, 0
        for tensor, wanted in [
            (found.sums[place], total),
            (found.left[place], left),
            (found.slots[place]["momentum"], momentum),
        ]:
            words = tensor.numpy().ravel().view("int32")
            np.testing.assert_array_equal(words, wanted.view("int32"))
