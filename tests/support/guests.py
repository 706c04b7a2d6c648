"""Guests: who knocks at a worker's port without being of the job, or lets one knock."""

import contextlib
import json
import random
import socket
import struct
import threading

from tfdp._version import __version__
from tfdp.hosts import rendezvous
from tfdp.hosts.connect import (
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    _proof,
    _signed,
    greet,
    introduce,
    session_secret,
)
from tfdp.hosts.host_link import CHANNELS

GUEST_SECONDS = 60.0
# What a stranger may be told: a random number.
MOST_TOLD_BYTES = len(MAGIC) + NONCE_BYTES


def run_steps(steps, connection):
    """Takes the steps of a handshake on a blocking socket; what was heard."""
    heard, step = b"", next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            if isinstance(step, bytes):
                connection.sendall(step)
                step = steps.send(b"")
                continue
            data = b""
            while len(data) < step:
                part = connection.recv(step - len(data))
                if not part:
                    raise ConnectionResetError("closed")
                data += part
            heard += data
            step = steps.send(data)
    return heard


def hello_of(purpose, **changed):
    """What a worker would say, with changes."""
    if purpose == "ring":
        return {"rank": 1, "channel": 0, "distance": 1, **changed}
    usual = {"rank": 1, "workers": 3, "version": __version__, "port": 1}
    return {**usual, **changed}


class Peer:
    """Knocks at one port, from a thread of its own, until it is turned away.

    Args:
      kind: a name of KINDS.
      secret: returns what the door at hand asks for, for the kinds that know it; it
        may wait until that is known.
    """

    def __init__(self, kind, secret):
        self.kind = kind
        self._secret = secret
        self.heard = b""
        self._ends = threading.Event()
        self._connections = []
        self._stands = threading.Condition()
        self._threads = []

    def knock(self, address, purpose):
        """Returns when a connection stands, before anybody has accepted it."""
        many = 200 if self.kind == "200 at once" else 1
        for _ in range(many):
            thread = threading.Thread(
                target=self._run, args=(address, purpose), daemon=True
            )
            thread.start()
            self._threads.append(thread)
        # The kernel holds no more than the backlog until somebody accepts.
        with self._stands:
            self._stands.wait_for(
                lambda: len(self._connections) >= min(many, 100), GUEST_SECONDS
            )

    @property
    def secret(self):
        return self._secret()

    def was_closed_out(self):
        """Whether the other side has closed every connection."""
        for thread in self._threads:
            thread.join(GUEST_SECONDS)
        return not any(thread.is_alive() for thread in self._threads)

    def leave(self):
        """Ends what it still does, and waits for it."""
        self._ends.set()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(GUEST_SECONDS)
        for connection in self._connections:
            connection.close()

    def _run(self, address, purpose):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=GUEST_SECONDS)
            with self._stands:
                self._connections.append(connection)
                self._stands.notify_all()
            KINDS[self.kind](self, connection, purpose)
            while data := connection.recv(1 << 16):
                self.heard += data

    def say(self, connection, data):
        with contextlib.suppress(OSError):
            connection.sendall(data)

    def drip(self, connection, data, seconds):
        for byte in data:
            if self._ends.wait(seconds):
                return
            connection.sendall(bytes([byte]))


def random_bytes(guest, connection, purpose):
    guest.say(connection, random.Random(0).randbytes(1 << 16))


def http_request(guest, connection, purpose):
    guest.say(connection, b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n")


def tls_hello(guest, connection, purpose):
    # The record and the handshake header of a ClientHello, and 508 bytes of it.
    guest.say(connection, bytes.fromhex("160301020001 0001fc0303") + bytes(508))


def silence(guest, connection, purpose):
    pass


def drip(guest, connection, purpose):
    # Each byte in time; the whole would take more than a minute.
    guest.drip(connection, MAGIC + bytes(NONCE_BYTES + PROOF_BYTES), 1.0)


def json_line(guest, connection, purpose):
    guest.say(connection, json.dumps(hello_of(purpose, workers=7)).encode() + b"\n")


def json_bomb(guest, connection, purpose):
    guest.say(connection, b"[" * 100_000 + b"\n")


def wrong_key(guest, connection, purpose):
    steps = introduce(b"another key", purpose, hello_of(purpose))
    guest.heard += run_steps(steps, connection)


def another_purpose(guest, connection, purpose):
    other = "ring" if purpose == "meeting" else "meeting"
    hello = hello_of(purpose)
    guest.heard += run_steps(introduce(guest.secret, other, hello), connection)


def long_hello(guest, connection, purpose):
    """A length of 65,535 in the place of a hello, after a proof of nothing."""
    opening = MAGIC + bytes(NONCE_BYTES)
    guest.say(connection, opening + bytes(PROOF_BYTES) + LENGTH.pack(65535) + b"x" * 70)


def huge_header(guest, connection, purpose):
    """What an exchange begins with, and 2^62 bytes to come."""
    guest.say(connection, struct.pack("<8sQQ", b"sum", 1, 1 << 62) + b"-666" * 20)


def replayed(guest, connection, purpose):
    """What a worker with the right key said on another connection, word for word."""
    record = recorded_hello(guest.secret, purpose)
    guest.say(connection, record)


def recorded_hello(secret, purpose):
    """All bytes that a dialing worker sends in a handshake that succeeds."""
    dials = introduce(secret, purpose, hello_of(purpose))
    listens = greet(secret, purpose, lambda hello: hello)
    said, sent = b"", {"dials": b"", "listens": b""}
    ends = {"dials": (dials, "listens"), "listens": (listens, "dials")}
    steps = {name: next(end) for name, (end, _) in ends.items()}
    while steps:
        for name, (end, other) in ends.items():
            step = steps.get(name)
            if step is None:
                continue
            try:
                if isinstance(step, bytes):
                    said += step if name == "dials" else b""
                    sent[other] += step
                    steps[name] = end.send(b"")
                elif len(sent[name]) >= step:
                    data, sent[name] = sent[name][:step], sent[name][step:]
                    steps[name] = end.send(data)
            except StopIteration:
                del steps[name]
    return said


def no_worker(**changed):
    """One with the right key that says of itself what no worker says."""

    def run(guest, connection, purpose):
        hello = hello_of(purpose, **changed)
        run_steps(introduce(guest.secret, purpose, hello), connection)

    return run


def bomb_with_the_key(guest, connection, purpose):
    """The right key, and a hello that is nested 1,000 deep."""
    nonce = bytes(NONCE_BYTES)
    connection.sendall(MAGIC + nonce)
    other = connection.recv(MOST_TOLD_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
    signed = _signed(purpose, nonce, other)
    connection.sendall(_proof(guest.secret, "dials", signed))
    connection.recv(PROOF_BYTES, socket.MSG_WAITALL)
    words = b"[" * 1000
    proof = _proof(guest.secret, "says", signed + words)
    connection.sendall(LENGTH.pack(len(words)) + words + proof)


# Strangers: no key.
KINDS = {
    "random bytes": random_bytes,
    "HTTP request": http_request,
    "TLS hello": tls_hello,
    "silence": silence,
    "JSON line": json_line,
    "JSON bomb": json_bomb,
    "wrong key": wrong_key,
    "replayed hello": replayed,
    "length of 65,535": long_hello,
    "header of 2^62 bytes": huge_header,
    # With the job's key, and yet no worker of it.
    "another purpose": another_purpose,
    "rank '1'": no_worker(rank="1"),
    "rank True": no_worker(rank=True),
    "rank 1e400": no_worker(rank=float("inf")),
    "rank -1": no_worker(rank=-1),
    "rank 0": no_worker(rank=0, channel=len(CHANNELS)),
    "rank null": no_worker(rank=None),
    "port 0": no_worker(port=0, channel=-1),
    "port 70000": no_worker(port=70000, channel=len(CHANNELS)),
    "distance 3": no_worker(port=True, distance=3),
    "distance True": no_worker(port=1.5, distance=True),
    "version of a list": no_worker(version=["1"], channel=[0]),
    "bomb with the key": bomb_with_the_key,
    # Slow ones.
    "drip": drip,
    "200 at once": silence,
}
SLOW = ("drip", "200 at once")
KNOW_THE_KEY = tuple(KINDS)[
    list(KINDS).index("another purpose") : list(KINDS).index("drip")
]


class GuestedDoors:
    """Lets guests of a kind knock at every port of a job as soon as it is open.

    They knock while nobody accepts yet, so that they are first in the line.

    Args:
      monkeypatch: of the test.
      kind: a name of KINDS.
      purpose: "meeting" or "ring", which ports.
      secret: of the job.
    """

    def __init__(self, monkeypatch, kind, purpose, secret):
        self.guests = []
        self.listeners = []
        self._kind, self._purpose = kind, purpose
        self._secrets = {"meeting": secret}
        self._has_session = threading.Event()
        for name, place in (("listen_at", "meeting"), ("listen", "ring")):
            listen = getattr(rendezvous, name)
            monkeypatch.setattr(rendezvous, name, self._with_guests(listen, place))
        monkeypatch.setattr(rendezvous, "session_secret", self._noted_secret)

    def note_secret(self, secret):
        """Tells the guests what the door of the meeting asks for."""
        self._secrets["meeting"] = secret

    def _noted_secret(self, secret, session):
        self._secrets["ring"] = session_secret(secret, session)
        self._has_session.set()
        return self._secrets["ring"]

    def _secret(self):
        if self._purpose == "ring":
            self._has_session.wait(GUEST_SECONDS)
        return self._secrets[self._purpose]

    def _with_guests(self, listen, purpose):
        def open_with_guests(*address):
            opened = listen(*address)
            for listener in opened if isinstance(opened, list) else [opened]:
                self.listeners.append(listener.getsockname()[:2])
                if purpose == self._purpose:
                    guest = Peer(self._kind, self._secret)
                    self.guests.append(guest)
                    guest.knock(self.listeners[-1], purpose)
            return opened

        return open_with_guests

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for guest in self.guests:
            guest.leave()


def can_use_ipv6():
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
