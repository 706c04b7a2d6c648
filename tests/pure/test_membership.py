"""What peers send between exchanges: garbage is a failure, told, never a hang."""

import concurrent.futures
import json
import socket
import threading

import pytest

from tfdp.hosts import membership
from tfdp.hosts.membership import Membership

SECONDS = 60.0

GARBAGE = {
    "no JSON": b"hello\n",
    "not UTF-8": b"\xff\xfe\n",
    "no object": b"[1, 2]\n",
    "nested": b"[" * 10_000 + b"\n",
    "nested within": b'{"at": ' + b"[" * 10_000 + b"\n",
    "left is a number": {"left": 1},
    "left is a list": {"left": ["1"]},
    "left names a text": {"left": {"x": [None, False]}},
    "left names nobody": {"left": {"7": [None, False]}},
    "a goodbye of one": {"goodbye": 1},
    "a goodbye of a number": {"goodbye": [1, False]},
    "failure is a list": {"failure": ["x"]},
    "failure without a word": {"failure": ""},
    "note of three": {"note": ["a", "b", "c"]},
    "note of a number": {"note": ["a", 1]},
    "notes of nobody": {"notes": ["a", {"9": "b"}]},
    "notes of a list": {"notes": ["a", ["b"]]},
    "at a text": {"at": {"step": {"0": "1"}}},
    "at true": {"at": {"step": {"0": True}}},
    "at nobody": {"at": {"step": {"1e400": 1}}},
    "at no channel": {"at": {"walk": {"0": 1}}},
    "at a channel of none": {"at": {"step": [1]}},
    "at a list": {"at": [1]},
    "a large number": b'{"at": {"step": {"0": ' + b"9" * 5000 + b"}}}\n",
}


def watched(rank):
    """A member of two workers, the other's end, and an event that a failure sets."""
    mine, other = socket.socketpair()
    failed = threading.Event()
    member = Membership(rank, 2, {1 - rank: mine}, SECONDS, failed.set)
    return member, other, failed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_a_failure(kind, rank):
    message = GARBAGE[kind]
    if isinstance(message, dict):
        message = json.dumps(message).encode() + b"\n"
    member, other, failed = watched(rank)
    with other:
        other.sendall(message)
        assert failed.wait(SECONDS)
        assert f"worker {1 - rank} sent what no worker sends" in member.failure
        with pytest.raises(ConnectionError, match="what no worker sends"):
            member.share_note("key", "note", SECONDS)
        member.leave()


def test_a_line_without_an_end_takes_no_memory(monkeypatch):
    monkeypatch.setattr(membership, "LONGEST_LINE_BYTES", 1 << 16)
    member, other, failed = watched(0)
    with other, concurrent.futures.ThreadPoolExecutor(1) as threads:
        sent = threads.submit(other.sendall, b"x" * (1 << 18))
        assert failed.wait(SECONDS)
        assert "a line without an end" in member.failure
        member.leave()
        assert sent.exception(SECONDS) is None or isinstance(sent.exception(), OSError)


def test_what_workers_send_is_none():
    pairs = [socket.socketpair() for _ in range(2)]
    failed = threading.Event()
    members = [
        Membership(0, 3, {1: pairs[0][0], 2: pairs[1][0]}, SECONDS, failed.set),
        Membership(1, 3, {0: pairs[0][1]}, SECONDS, failed.set),
        Membership(2, 3, {0: pairs[1][1]}, SECONDS, failed.set),
    ]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for member in members:
            member.arrive(5, "step")
        found = threads.map(
            lambda member: member.share_note("k", f"of {member.rank}", SECONDS), members
        )
        assert list(found) == [{0: "of 0", 1: "of 1", 2: "of 2"}] * 3
        list(threads.map(Membership.leave, reversed(members)))
    assert not failed.is_set()
