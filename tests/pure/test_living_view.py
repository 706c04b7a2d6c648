"""What a host makes of another's answer; and what no host sends is refused."""

import dataclasses
import json
import random

import numpy as np
import pytest

from tfdp.hosts.elastic_transfers import (
    ElasticHello,
    fingerprint_of_arrays,
    parse_hello,
)
from tfdp.hosts.elastic_view import (
    ALIVE,
    DONE,
    GONE,
    OUT,
    View,
    ViewReply,
    judge,
    parse_answer,
)

ANSWER = ViewReply(
    session="s",
    is_in=True,
    epoch=7,
    done=20,
    at=None,
    members=(0, 1),
    addresses={0: ("h", 1), 1: ("h", 2)},
    place=(0, 0),
)
VIEW = View(rank=1, session="s", is_in=True, epoch=7, done=20, members=(0, 1))


@pytest.mark.parametrize(
    "changes, update, meaning",
    [
        ({}, 24, ALIVE),
        # It died, and another process has its place; or it has lost what it had.
        ({"session": ""}, 24, GONE),
        ({"is_in": False}, 24, GONE),
        # It went on without this host: in a meeting that is done, or is about to.
        ({"epoch": 8, "members": (0,), "done": 24}, 24, OUT),
        ({"members": (0,)}, 24, OUT),
        # It knows less than this host, and will learn that it is in.
        ({"epoch": 6, "members": (0,)}, 24, ALIVE),
        # It has done the meeting that this host is in, or one before.
        ({"epoch": 8, "done": 24}, 24, DONE),
        ({"epoch": 8, "done": 24}, None, ALIVE),
        ({"epoch": 6, "done": 16}, 24, ALIVE),
    ],
)
def test_what_an_answer_means(changes, update, meaning):
    assert judge(VIEW, dataclasses.replace(ANSWER, **changes), update) == meaning


def test_what_a_host_says_is_what_another_hears():
    view = View("s", True, 3, 8, 12, (0, 2), {0: ("h", 5)}, (4, 1), rank=2)
    answer = parse_answer(json.loads(json.dumps(view.as_json())), 3)
    assert answer == ViewReply("s", True, 3, 8, 12, (0, 2), {0: ("h", 5)}, (4, 1))
    view.is_excluded = True
    assert not parse_answer(view.as_json(), 3).is_in
    view.drop(0)
    assert view.members == (2,)


def test_terms_tell_shapes_and_types_apart():
    a, b = np.zeros((2, 3), "float32"), np.zeros((3, 2), "float32")
    terms = [
        fingerprint_of_arrays(v) for v in ([a], [b], [a, b], [a.astype("float64")])
    ]
    assert len(set(terms)) == 4 and terms[0] == fingerprint_of_arrays([a + 1])


NONSENSE = (None, -1, 2**70, 1.5, "", "x" * 300, [], [[]], {}, {"a": 1}, True, [1, 1])


@pytest.mark.parametrize("seed", range(4))
def test_what_no_host_sends_is_a_value_error(seed):
    draw = random.Random(seed)
    hello = dataclasses.asdict(ElasticHello("come", 1, 3, 5, epoch=2, update=8))
    for valid, parse in (
        (View("s", rank=1, members=(0, 1), addresses={0: ("h", 5)}).as_json(), 0),
        (hello, 1),
    ):
        for _ in range(2500):
            message = dict(valid)
            for name in draw.sample(sorted(message), draw.randint(1, 3)):
                message[name] = draw.choice(NONSENSE)
            try:
                parse_hello(message) if parse else parse_answer(message, 3)
            except ValueError:
                continue
