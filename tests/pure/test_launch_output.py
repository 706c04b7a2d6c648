"""Prefixed lines, the last lines of a worker, ports and signal names."""

import contextlib
import errno
import io
import itertools
import os
import random
import signal
import socket

import pytest

from tfdp.cluster import addresses as port_module
from tfdp.cluster.addresses import any_port, checked_port, free_port, held_port
from tfdp.errors import ConfigurationError
from tfdp.launch import output
from tfdp.launch.console import Outlet
from tfdp.launch.output import MOST_BYTES, LineRelay, Tail, WorkerLogs
from tfdp.launch.signals import received_signals, signal_name


def relay(*pieces, lines=10):
    target, tail = io.BytesIO(), Tail(lines)
    relay = LineRelay(target, b"[1] ", tail)
    for piece in pieces:
        relay.feed(piece)
    relay.close()
    return target.getvalue().decode("utf-8", "replace"), tail.text_lines()


@pytest.mark.parametrize(
    "pieces, expected",
    [
        ([], []),
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"no end"], ["no end"]),
        ([b"o", b"ne\nt", b"wo", b"\n"], ["one", "two"]),
        ([b"a\n\nb\n"], ["a", "", "b"]),
        ([b"a\r\nb\r", b"\nc\r\n"], ["a", "b", "c"]),
        # A progress bar: its last state.
        ([b"1/3\r2/3\r", b"3/3\ndone\r"], ["3/3", "done"]),
        ([b"Epoch 1/2\n\r1/3\b\b\b\r", b"2/3\b\b\b\r3/3\n"], ["Epoch 1/2", "3/3"]),
        # An accented letter cut in two.
        ([b"caf\xc3", b"\xa9\n"], ["café"]),
    ],
)
def test_whole_lines_with_the_rank(pieces, expected):
    text, _ = relay(*pieces)
    assert text == "".join(f"[1] {line}\n" for line in expected)


def test_a_bar_becomes_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(output, "REDRAW_SECONDS", 0.0)
    text, _ = relay(b"1/3\b\b\r", b"\r2/3\r3/3\n")
    assert text == "[1] 1/3\n[1] 2/3\n[1] 3/3\n"


KERAS = (
    b"Epoch 1/2\n\r\x1b[1m 1/24\x1b[0m \x1b[37m\xe2\x94\x81\x1b[0m "
    b"\x1b[1m5s\x1b[0m 240ms/step - loss: 2.1\b\b\r"
    b"\x1b[1m24/24\x1b[0m \x1b[32m\xe2\x94\x81\x1b[0m \x1b[1m1s\x1b[0m "
    b"2ms/step - loss: 1.9\n24/24 - 1s - 9ms/step - loss: 1.8\nmine 3/4\n4/5 of it\n"
)


def test_only_the_chief_shows_its_progress_bar_and_logs_hold_all():
    target, log, tail = io.BytesIO(), io.BytesIO(), Tail()
    relay = LineRelay(target, b"[1] ", tail, log=log, shows_bars=False)
    relay.feed(KERAS)
    relay.close()
    assert target.getvalue() == b"[1] mine 3/4\n[1] 4/5 of it\n"
    lines = log.getvalue().splitlines()
    assert lines[0] == b"Epoch 1/2" and len(lines) == 5 and b"\b" not in log.getvalue()
    assert len(tail.text_lines()) == 5
    target = io.BytesIO()
    relay = LineRelay(target, b"[0] ", Tail())
    relay.feed(KERAS)
    assert len(target.getvalue().splitlines()) == 5


def test_logs_of_several_starts_are_one_file(tmp_path):
    logs = WorkerLogs(str(tmp_path / "a" / "b"))
    for text in (b"one\n", b"two\n"):
        logs.begin()
        logs.of(0).write(text)
    logs.close()
    lines = (tmp_path / "a" / "b" / "worker-0.log").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        *("--- start 1", "one"),
        *("--- start 2", "two"),
    ]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--log-dir .* cannot be used"):
        WorkerLogs(str(tmp_path / "file" / "x"))


def test_any_cut_gives_the_same_lines():
    data = "".join(f"line {i} é{end}" for i in range(20) for end in ("\n", "\r\n"))
    data = data.encode()
    whole, _ = relay(data)
    generator = random.Random(0)
    for _ in range(50):
        cuts = sorted(generator.sample(range(len(data)), 10))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert relay(*pieces)[0] == whole


def test_a_line_without_end_is_not_held_back_for_ever():
    text, _ = relay(b"x" * (MOST_BYTES + 1), b"y\n")
    assert text.splitlines() == ["[1] " + "x" * (MOST_BYTES + 1), "[1] y"]


def test_the_tail_keeps_the_last_lines_that_say_something():
    _, tail = relay(b"a\nb\n\n  \nc\nd\xff\n", lines=3)
    assert tail == ["b", "c", "d\ufffd"]


WARNINGS = [
    "/a/trainer.py:134: LocalMeanWarning: In a step of model 'gpt' ...",
    "  outputs = self.distribute_strategy.run(step_function, args=(data,))",
    "/a/b.py:9: keras.src.x.MineWarning: no",
    "W0000 00:00:1796061572.265334     865 op_kernel.cc:1845] UNKNOWN",
    "2026-11-30 18:00:00.123456: W tensorflow/core/x.cc:1] late",
    "WARNING:absl:old",
]


def test_the_tail_leaves_warnings_out():
    text = "\n".join(["step 3", *WARNINGS, "Killed by a bad row", *WARNINGS, ""])
    _, tail = relay(text.encode())
    assert tail == ["step 3", "Killed by a bad row"]


def test_a_tail_of_warnings_alone_is_kept():
    _, tail = relay("\n".join([*WARNINGS, ""]).encode())
    assert tail == WARNINGS


def test_two_streams_share_a_tail():
    tail = Tail()
    out, err = (LineRelay(io.BytesIO(), b"", tail) for _ in range(2))
    out.feed(b"first\n")
    err.feed(b"second\n")
    out.feed(b"third\n")
    assert tail.text_lines() == ["first", "second", "third"]


def test_a_free_port_can_be_listened_on():
    port = free_port()
    assert 20000 <= port <= 29999
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ConfigurationError, match=f"--port {port}"):
            checked_port(port)
    assert checked_port(port) == port


def test_taken_ports_are_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        offered = [taken.getsockname()[1], free_port()]
        expected = offered[1]
        monkeypatch.setattr(port_module, "any_port", lambda: offered.pop(0))
        assert free_port() == expected


def test_a_held_port_is_chosen_once(monkeypatch):
    with held_port() as held:
        for choose in (held_port, lambda: contextlib.nullcontext(free_port())):
            ports = itertools.chain([held], iter(any_port, held))
            monkeypatch.setattr(port_module, "any_port", ports.__next__)
            with choose() as port:
                assert port != held


def test_no_free_port_is_an_error(monkeypatch):
    monkeypatch.setattr(port_module, "_is_free", lambda port, address: False)
    with pytest.raises(ConfigurationError, match="no free port"):
        free_port()


def test_ports_differ_between_launches():
    assert len({any_port() for _ in range(20)}) > 1


@pytest.mark.parametrize("number, name", [(9, "SIGKILL"), (200, "signal 200")])
def test_signal_names(number, name):
    assert signal_name(number) == name


def test_signals_are_noted_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    # Whoever runs the tests may ignore it (pytest-xdist does).
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with received_signals() as received:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert received == [signal.SIGTERM, signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, interrupt)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with received_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stream_that_takes_nothing_loses_lines_and_raises_nothing():
    full = os.open("/dev/full", os.O_WRONLY)
    outlet = Outlet(full)
    outlet.write(b"one\n")
    outlet.flush()
    os.close(full)
    assert outlet.failure == os.strerror(errno.ENOSPC)
    assert not outlet.has_pending and not outlet.reader_left
    reads, writes = os.pipe()
    os.close(reads)
    outlet = Outlet(writes)
    outlet.write(b"two\n")
    outlet.flush()
    assert outlet.reader_left and not outlet.has_pending
    outlet.write(b"three\n")
    assert not outlet.has_pending
    os.close(writes)
