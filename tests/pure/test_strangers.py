"""Random damage to what comes from outside in words: variables, and bytes at ports.

A typed error, or what was said; never another error, and no hang. Each row prints its
seed and what came of it. 500 always, 10,000 in the tier `all`.
"""

import collections
import itertools
import json
import random
import socket
import threading

import pytest

from tests.pure.test_cluster import NAMES, SOURCES
from tests.support import mutations
from tests.support.guests import hello_of
from tfdp.cluster import Cluster, find_cluster
from tfdp.errors import ClusterError, ConfigurationError
from tfdp.hosts.connect import (
    LENGTH,
    StrangerError,
    _proof,
    _signed,
    greet,
    introduce,
)
from tfdp.hosts.membership import LONGEST_LINE_BYTES, Membership
from tfdp.hosts.rendezvous import _parse_hello

SEED = 20261123
COUNTS = [500, pytest.param(10_000, marks=pytest.mark.slow)]
SECRET, PURPOSE = b"of the job", "meeting"
#: Only there to end a hang.
SECONDS = 60.0


def is_json(text):
    try:
        return isinstance(json.loads(text), dict) and json.loads(text) != {}
    except (RecursionError, ValueError):
        return False


def changed_variables(chance, environment):
    """One to three variables get another value or name, or are dropped."""
    environment = dict(environment)
    for _ in range(chance.choice([1, 1, 2, 3])):
        if not environment:
            break
        name = chance.choice(sorted(environment))
        text = environment.pop(name)
        kind = chance.choice(["bytes", "bytes", "json", "value", "drop", "rename"])
        if kind == "json" and is_json(text):
            text = mutations.edit_json(chance, text).decode()
        elif kind == "value":
            text = str(chance.choice(mutations.VALUES))
        elif text and kind != "rename":
            raw = text.encode("utf-8", "surrogatepass") * 2
            damaged = chance.choice(mutations.BYTES)(chance, raw)
            text = damaged.decode("utf-8", "surrogateescape")
        if kind == "rename":
            name = chance.choice([n for source, _ in SOURCES for n in source])
        if kind != "drop":
            # What an environment can hold.
            environment[name] = text.replace("\0", "")
    return environment


@pytest.mark.parametrize("count", COUNTS)
def test_variables_of_launchers(count):
    outcomes = collections.Counter()
    for number in range(count):
        chance = random.Random(f"{SEED} {number}")
        place = chance.randrange(len(SOURCES))
        environment = changed_variables(chance, SOURCES[place][0])
        try:
            found = find_cluster(environment)
        except (ClusterError, ConfigurationError) as error:
            outcomes["typed error"] += 1
            assert len(str(error)) < 5000, number
            continue
        if found is None:
            outcomes["no cluster"] += 1
            continue
        outcomes["a cluster"] += 1
        assert isinstance(found, Cluster) and 0 <= found.rank < found.workers, number
    print(f"{NAMES}: seed {SEED}, {count} mutations, {dict(outcomes)}")
    assert len(outcomes) == 3


def shake(change_flight, hello):
    """What who listens makes of a dialer whose flights are changed on the way."""
    ends = {
        "dials": introduce(SECRET, PURPOSE, hello),
        "listens": greet(SECRET, PURPOSE, _parse_hello),
    }
    heard = dict.fromkeys(ends, b"")
    wants = {name: next(steps) for name, steps in ends.items()}
    flights = itertools.count()
    while True:
        has_moved = False
        for name, step in list(wants.items()):
            said = b""
            if isinstance(step, bytes):
                to = "listens" if name == "dials" else "dials"
                is_changed = name == "dials"
                heard[to] += change_flight(next(flights), step) if is_changed else step
            elif len(heard[name]) >= step:
                said, heard[name] = heard[name][:step], heard[name][step:]
            else:
                continue
            has_moved = True
            try:
                wants[name] = ends[name].send(said)
            except StopIteration as ended:
                if name == "listens":
                    return ended.value
                del wants[name]
            except StrangerError:
                if name == "listens":
                    raise
                del wants[name]
        if not has_moved:
            # Both wait, or one is gone: somebody closes the connection.
            ends["listens"].throw(ConnectionResetError())


@pytest.mark.parametrize("count", COUNTS)
def test_handshakes_of_who_does_not_know_the_key(count):
    sound = shake(lambda flight, data: data, hello_of(PURPOSE))
    outcomes = collections.Counter()
    for number in range(count):
        chance = random.Random(f"{SEED} {number}")
        struck, damage = chance.randrange(3), chance.choice(mutations.BYTES)

        def change(flight, data, chance=chance, struck=struck, damage=damage):
            return damage(chance, data) if flight == struck else data

        try:
            found = shake(change, hello_of(PURPOSE))
        except (StrangerError, ConnectionResetError):
            outcomes["turned away"] += 1
            continue
        # Bytes behind the end, or a swap of what is alike.
        outcomes["taken as it was"] += 1
        assert found == sound, number
    print(f"handshakes: seed {SEED}, {count} mutations, {dict(outcomes)}")
    assert outcomes["turned away"] > 0.7 * count


@pytest.mark.parametrize("count", COUNTS)
def test_hellos_of_who_knows_the_key(count):
    outcomes = collections.Counter()
    sound = json.dumps(hello_of(PURPOSE)).encode()
    for number in range(count):
        chance = random.Random(f"{SEED} {number}")
        damage = chance.choice([*mutations.BYTES, *[mutations.edit_json] * 8])
        words = damage(chance, sound)
        listens = greet(SECRET, PURPOSE, _parse_hello)
        try:
            next(listens)
            listens.send(b"tfdp 2\r\n")
            answer = listens.send(bytes(32))
            signed = _signed(PURPOSE, bytes(32), answer[-32:])
            listens.send(b"")
            listens.send(_proof(SECRET, "dials", signed))
            listens.send(b"")
            listens.send(LENGTH.pack(len(words) % 2**16))
            listens.send(words)
            listens.send(_proof(SECRET, "says", signed + words))
            listens.send(b"")
        except StrangerError:
            outcomes["turned away"] += 1
        except StopIteration as ended:
            outcomes["taken"] += 1
            hello = ended.value
            assert 1 <= hello.rank < hello.workers and 1 <= hello.port < 2**16, number
            assert len(hello.version) < 5000, number
    print(f"hellos: seed {SEED}, {count} mutations, {dict(outcomes)}")
    assert sum(outcomes.values()) == count and len(outcomes) == 2


LINES = [
    {"note": ["another key", "words"]},
    {"at": {"step": {"1": 3}, "host": {"1": 2}}},
    {"failure": "worker 1 has failed"},
    {"left": {"1": [None, False]}},
    {"goodbye": [None, False]},
    {"notes": ["another key", {"1": "words"}]},
]


@pytest.mark.parametrize("count", COUNTS)
def test_lines_between_workers(count):
    outcomes = collections.Counter()
    for number in range(count):
        chance = random.Random(f"{SEED} {number}")
        line = json.dumps(chance.choice(LINES)).encode()
        damage = chance.choice([*mutations.BYTES, *[mutations.edit_json] * 8])
        mine, other = socket.socketpair()
        failed = threading.Event()
        member = Membership(0, 2, {1: mine}, SECONDS, failed.set)
        with other:
            other.sendall(damage(chance, line) + b"\n")
            other.sendall(json.dumps({"note": ["key", "words"]}).encode() + b"\n")
            try:
                found = member.share_note("key", "mine", SECONDS)
                assert found == {0: "mine", 1: "words"}, number
                outcomes["goes on"] += 1
            except ConnectionError as error:
                # Garbage; or a goodbye, or a failure in words of its own.
                assert 0 < len(str(error)) < LONGEST_LINE_BYTES, number
                outcomes["told"] += 1
        # Its thread ends at once: the other end is closed.
        member.leave()
    print(f"lines: seed {SEED}, {count} mutations, {dict(outcomes)}")
    assert len(outcomes) == 2
