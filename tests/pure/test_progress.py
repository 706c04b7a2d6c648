"""What a training loop notes of its progress, and what a reader makes of the file."""

import math
import multiprocessing
import os
import random
import threading
import time
import zlib

import pytest

from tfdp.cluster import START_AGAIN, progress, restarts
from tfdp.cluster.progress import (
    BODY,
    RECORD_BYTES,
    Progress,
    begin_notes,
    note_resumed,
    note_saved,
    note_step,
    note_strategy,
    parse_progress,
    read_progress,
)
from tfdp.errors import ClusterError, ConfigurationError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A launcher's folder; the notes of this process begin anew."""
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    forget = progress._forget  # noqa: SLF001
    forget()
    yield tmp_path
    forget()


def read(folder):
    return read_progress(str(folder), os.getpid())


def test_what_is_noted_is_read(folder):
    assert read(folder) is None
    before_seconds = time.monotonic()
    note_resumed(1200)
    note_step(1234)
    found = read(folder)
    assert (found.resumed_step, found.saved_step, found.step) == (1200, None, 1234)
    assert before_seconds <= found.resumed_seconds <= time.monotonic()
    assert found.saved_seconds is None
    assert found.reached_step == 1234
    note_saved(2**63 - 1)
    found = read(folder)
    assert (found.step, found.saved_step) == (1234, 2**63 - 1)
    assert found.resumed_seconds <= found.saved_seconds <= time.monotonic()
    assert len(list(folder.iterdir())) == 1


def repr_of(value):
    return "long" if value == 1 << 20_000 else repr(value)


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(progress.FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    note_step(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "step", [-1, 1.0, True, None, "7", 2**63, 1 << 20_000], ids=repr_of
)
@pytest.mark.parametrize("note", [note_resumed, note_saved, note_step])
def test_what_is_no_step_is_refused(note, step, folder):
    with pytest.raises(ConfigurationError, match="a step must be a Python int from 0"):
        note(step)
    assert read(folder) is None


def test_a_folder_that_is_gone_is_no_error(monkeypatch, folder):
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(folder / "gone"))
    note_step(1)
    (folder / "gone").mkdir()
    note_saved(2)
    found = read(folder / "gone")
    assert (found.step, found.saved_step) == (1, 2)


def test_a_fork_notes_for_itself(folder):
    note_step(5)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=note_saved, args=(9,))
    child.start()
    child.join()
    found = read_progress(str(folder), child.pid)
    assert (found.step, found.saved_step) == (None, 9)
    assert (read(folder).step, read(folder).saved_step) == (5, None)


def test_threads_lose_no_note(folder):
    def save():
        for step in range(2000):
            note_saved(step)

    thread = threading.Thread(target=save)
    thread.start()
    for step in range(2000):
        note_step(step)
        assert read(folder) is not None  # nothing half written is seen in one process
    thread.join()
    assert (read(folder).step, read(folder).saved_step) == (1999, 1999)


def path_of(folder):
    return folder / f"{os.getpid()}.progress"


HOSTILE = {
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(RECORD_BYTES)),
    "empty": lambda path: path.write_bytes(b""),
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "folder": lambda path: path.mkdir(),
    "huge": lambda path: (path.write_bytes(b""), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_record_says_nothing(kind, folder):
    HOSTILE[kind](path_of(folder))
    assert read(folder) is None
    note_step(1)  # and lets no training wait


def test_a_record_with_a_changed_byte_says_nothing(folder):
    note_resumed(3)
    whole = path_of(folder).read_bytes()
    for place in range(RECORD_BYTES):
        for change in (1, 128):
            changed = bytearray(whole)
            changed[place] ^= change
            path_of(folder).write_bytes(changed)
            assert read(folder) is None
    for length in (0, 1, RECORD_BYTES - 1, RECORD_BYTES + 1):
        path_of(folder).write_bytes((whole * 2)[:length])
        assert read(folder) is None


def record(*values):
    body = BODY.pack(progress.MARK, *values)
    return body + progress.CHECKSUM.pack(zlib.crc32(body))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_a_time_that_cannot_be_is_left_out(seconds, folder):
    body = BODY.pack(progress.MARK, 1, 2, -1, -1, seconds, seconds)
    checksum = progress.CHECKSUM.pack(progress.zlib.crc32(body))
    path_of(folder).write_bytes(body + checksum)
    assert read(folder) == Progress(resumed_step=1, saved_step=2)
    body = BODY.pack(progress.MARK, 1, 2, -2, -1, 0.0, 0.0)
    path_of(folder).write_bytes(
        body + progress.CHECKSUM.pack(progress.zlib.crc32(body))
    )
    assert read(folder) is None


def test_strategies_are_counted_from_0_where_the_launcher_could_make_the_file(folder):
    begin_notes(str(folder / "gone"), os.getpid())
    assert read(folder / "gone") is None
    begin_notes(str(folder), os.getpid())
    assert read(folder) == Progress(strategies=0)
    note_strategy()
    note_step(7)
    note_strategy()
    assert read(folder) == Progress(step=7, strategies=2)
    # What the process has noted before stays.
    begin_notes(str(folder), os.getpid())
    assert read(folder) == Progress(step=7, strategies=2)
    assert len(list(folder.iterdir())) == 1


def test_progress_travels_by_age():
    now_seconds = time.monotonic()
    told = Progress(3, 4, None, now_seconds - 20, now_seconds - 10, strategies=2)
    found = parse_progress(told.to_text().encode())
    assert found.strategies == 2
    assert (found.resumed_step, found.saved_step, found.step) == (3, 4, None)
    # Between telling and hearing the clock goes on; it is heard as later, not earlier.
    assert 0 <= found.saved_seconds - told.saved_seconds < 5
    assert found.resumed_seconds < found.saved_seconds
    assert parse_progress(Progress().to_text().encode()) == Progress()


@pytest.mark.parametrize("text", [b"", b"3", b"zz", b"\xff", b"0" * 100_000])
def test_a_line_of_nonsense_says_nothing(text):
    assert parse_progress(text) is None


@pytest.mark.parametrize("place", range(4))
def test_a_count_of_nonsense_says_nothing(place):
    counts = [1, 1, 1, 1]
    counts[place] = -2
    assert parse_progress(record(*counts, 0.0, 0.0).hex().encode()) is None


@pytest.mark.parametrize("age", [math.nan, math.inf, -1.0, 1e308])
def test_an_age_of_nonsense_is_left_out(age):
    text = record(-1, 2, 1, -1, age, age).hex().encode()
    assert parse_progress(text) == Progress(saved_step=2, step=1)


def test_how_often_it_was_started_again():
    assert restarts({}) == 0
    assert restarts({"TFDP_RESTARTS": "3"}) == 3
    with pytest.raises(ClusterError, match="TFDP_RESTARTS must be an integer"):
        restarts({"TFDP_RESTARTS": "-1"})
    assert START_AGAIN == os.EX_TEMPFAIL
