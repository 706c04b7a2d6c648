"""Files appear whole; what dead writers left is removed, a live one's is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tfdp.files import atomic
from tfdp.files.atomic import remove_leftovers, replaced, temporary_name

WRITER = """
import sys, pathlib
from tfdp.files.atomic import temporary_name
folder = pathlib.Path(sys.argv[1])
(folder / temporary_name("model.keras")).write_text("half")
print("written", flush=True)
sys.stdin.read()
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(path, text="new"):
    with replaced(path) as half_written:
        half_written.write_text(text)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "model.weights.h5"
    path.write_text("old")
    with replaced(path) as half_written:
        assert half_written.name.endswith("model.weights.h5")
        half_written.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == [path.name]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(KeyError), replaced(path) as half_written:
        half_written.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert names(tmp_path) == [path.name]


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 250 + ".json")
    write(path)
    assert path.read_text() == "new"


def test_what_a_dead_writer_left_is_removed_and_a_live_ones_is_not(tmp_path):
    command = [sys.executable, "-c", WRITER, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        try:
            assert writer.stdout.readline() == b"written\n"
            (leftover,) = names(tmp_path)
            write(tmp_path / "other.json")
            assert names(tmp_path) == [leftover, "other.json"]
        finally:
            writer.send_signal(signal.SIGKILL)
    write(tmp_path / "other.json")
    assert names(tmp_path) == ["other.json"]


def test_a_process_number_that_is_used_again_is_another_writer(tmp_path):
    """This process lives, but began at another time than the one that wrote."""
    place, pid, start, number, name = temporary_name("a.json").split("-")[1:]
    earlier = f".writing-{place}-{pid}-{int(start) - 1}-{number}-{name}"
    (tmp_path / earlier).write_text("half")
    (tmp_path / temporary_name("a.json")).write_text("half")
    remove_leftovers(tmp_path)
    assert len(names(tmp_path)) == 1 and earlier not in names(tmp_path)


def test_what_another_machine_left_is_removed_after_a_day(tmp_path):
    old, young = (f".writing-{'0' * 16}-1-1-{number}-a.json" for number in range(2))
    for name in (old, young):
        (tmp_path / name).write_text("half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / old, (two_days_ago, two_days_ago))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [young]


@pytest.mark.parametrize("name", [".writing-", ".writing-notes.txt", ".writing-1-a"])
def test_files_of_others_stay(tmp_path, name):
    (tmp_path / name).write_text("mine")
    os.utime(tmp_path / name, (1, 1))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [name]


def test_a_file_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    """The name must not outlive the content in a power cut."""
    done = []

    def note(kind, function):
        def noted(*args):
            done.append(kind)
            return function(*args)

        return noted

    monkeypatch.setattr(os, "fsync", note("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", note("rename", os.replace))
    write(tmp_path / "file.json")
    assert done == ["fsync", "rename", "fsync"]


def test_without_proc_the_age_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_start_of", lambda pid: None)
    mine = temporary_name("a.json")
    (tmp_path / mine).write_text("half")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [mine]
    os.utime(tmp_path / mine, (1, 1))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []
