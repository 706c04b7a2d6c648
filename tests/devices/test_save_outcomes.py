"""A save that fails, wherever it does: all workers get one outcome, and none waits.

Two workers in one process: each has a `Checkpoint` of its own, and notes go through
memory. Faults of real processes are drawn by tests/fault_plans.py.
"""

import os
import threading
import warnings

import keras
import pytest

from tfdp.checkpoint import Checkpoint, checkpoint, manifest, writer
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import MANIFEST_NAME
from tfdp.errors import CheckpointWarning, DataError

#: Only there to end a hang.
LONGEST_SECONDS = 60
FULL = OSError(28, "No space left on device")
STALE = OSError(116, "Stale file handle")


class Link:
    """Notes of two workers, in memory."""

    def __init__(self, rank, notes, changed):
        self.rank, self.notes, self.changed = rank, notes, changed
        self.timeout_seconds = 600.0

    def share_note(self, key, note, has_deadline=True):
        with self.changed:
            self.notes.setdefault(key, {})[self.rank] = note
            self.changed.notify_all()
            have_all = self.changed.wait_for(
                lambda: len(self.notes[key]) == 2, LONGEST_SECONDS
            )
            if not have_all:
                raise TimeoutError(f"worker {self.rank} waits for {key}")
            return dict(self.notes[key])

    def without_note(self, key):
        with self.changed:
            return sorted({0, 1} - self.notes.get(key, {}).keys())


class Company:
    """Two workers, each with its files; `on` is true while the fault strikes."""

    def __init__(self, folders, monkeypatch):
        self.numbers, self.on = [], False
        notes, changed = {}, threading.Condition()
        self.hosts = [
            Hosts(rank, 2, Link(rank, notes, changed), self.from_chief)
            for rank in (0, 1)
        ]
        self.files = [Checkpoint(folder, keep=2) for folder in folders]
        self.now = None
        monkeypatch.setattr(checkpoint, "hosts_of", lambda _: self.hosts[self.now])
        with keras.device("cpu"):
            self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            self.model.compile("sgd", "mse")

    def from_chief(self, value, label):
        if self.now == 0:
            self.numbers.append(value)
        return self.numbers[-1]

    def each(self, what):
        """What each worker hears of it."""
        heard = []
        for rank, files in enumerate(self.files):
            self.now = rank
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", CheckpointWarning)
                try:
                    what(files)
                    heard.append("".join(str(warning.message) for warning in warned))
                except DataError as error:
                    heard.append(f"error: {error}")
        return heard

    def save(self, step):
        began = self.each(lambda files: files.save(self.model, step=step))
        ended = self.each(lambda files: files.wait())
        return [*began, *ended]


def faulty(function, company, error, before=True, of=""):
    """Raises the error before, or after, it does what `function` does.

    Args:
      of: only for a file whose name holds it, or (a number) by that worker.
    """

    def does(*arguments, **options):
        is_meant = of == company.now if isinstance(of, int) else of in str(arguments[0])
        if company.on and is_meant and before:
            raise error
        result = function(*arguments, **options)
        if company.on and is_meant:
            raise error
        return result

    return does


def of_part(rank, error, before):
    return writer, "write_arrays", error, before, f"part-{rank}-of"


# Where it fails; what all workers then hear of it; whether there is a checkpoint.
FAULTS = {
    "full before part 0": (of_part(0, FULL, True), "worker 0 could not write", False),
    "full before part 1": (of_part(1, FULL, True), "worker 1 could not write", False),
    "full after part 0": (of_part(0, FULL, False), "worker 0 could not write", False),
    "stale after part 1": (of_part(1, STALE, False), "worker 1 could not write", False),
    "a wrong type": (
        of_part(1, TypeError("no number"), True),
        "worker 1 could not write its part (TypeError: no number)",
        False,
    ),
    "no memory for copies": (
        (checkpoint.Copies, "take", MemoryError("of copies"), True, 1),
        "worker 1 could not write its part (MemoryError",
        False,
    ),
    "full manifest": (
        (writer, "write_manifest", FULL),
        "worker 0 could not finish it (OSError: [Errno 28]",
        False,
    ),
    "stale rename": (
        (os, "replace", STALE, True, f"-{MANIFEST_NAME}"),
        "worker 0 could not finish it (OSError: [Errno 116]",
        False,
    ),
    "stale behind the rename": (
        (writer, "write_manifest", STALE, False),
        "is whole, but worker 0 could not finish it",
        True,
    ),
    "an old one cannot be deleted": (
        (manifest.shutil, "rmtree", STALE),
        "is whole, but worker 0 could not delete step-000000000001",
        True,
    ),
    "old ones cannot be listed": (
        (writer, "folders_newest_first", STALE),
        "is whole, but worker 0 could not delete old checkpoints",
        True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_workers_hear_of_a_fault_and_go_on(tmp_path, monkeypatch, name):
    (owner, method, *fault), words, is_whole = FAULTS[name]
    company = Company([tmp_path, tmp_path], monkeypatch)
    at_fault = faulty(getattr(owner, method), company, *fault)
    monkeypatch.setattr(owner, method, at_fault)
    for step in (1, 2):
        assert company.save(step) == [""] * 4
    company.on = True
    heard = company.save(3)
    company.on = False
    assert heard[0] == heard[1] == "" and heard[2] == heard[3] and words in heard[2]
    assert heard[2].startswith("error") != is_whole and str(tmp_path) in heard[2]
    assert company.files[0].steps()[:2] == ([3, 2] if is_whole else [2, 1])
    whole = {path.parent.name for path in tmp_path.glob(f"*/{MANIFEST_NAME}")}
    left, write = set(), writer.write_arrays

    def looks(place, *arguments):
        left.update(
            {path.parent for path in tmp_path.glob("*/part-*")} - {place.parent}
        )
        return write(place, *arguments)

    monkeypatch.setattr(writer, "write_arrays", looks)
    assert company.save(4) == [""] * 4
    # Of the one that failed nothing was left when the next one was written.
    assert {path.name for path in left} <= whole
    whole = {path.parent.name for path in tmp_path.glob(f"*/{MANIFEST_NAME}")}
    assert {path.name for path in tmp_path.iterdir()} == whole
    assert company.files[0].steps() == [4, 3 if is_whole else 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_that_is_another_one_for_a_while(tmp_path, monkeypatch, rank):
    company = Company([tmp_path / "run", tmp_path / "run"], monkeypatch)
    assert company.save(1) == [""] * 4
    with monkeypatch.context() as patch:
        own = tmp_path / "own"
        patch.setattr(company.files[rank]._writer, "_directory", own)
        heard = company.save(2)
    assert heard[2] == heard[3] and "worker 1 has written its part" in heard[2]
    assert "worker 0 does not find it" in heard[2]
    assert not list(own.iterdir()), "the part that was in vain takes room"
    assert company.save(3) == [""] * 4 and company.files[0].steps() == [3, 1]
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_what_a_start_before_has_left_goes_before_the_next_save(tmp_path, monkeypatch):
    company = Company([tmp_path, tmp_path], monkeypatch)
    assert company.save(1) == [""] * 4
    left = tmp_path / "step-000000000009-0000000a"
    left.mkdir()
    (left / "part-1-of-2.safetensors").write_bytes(bytes(1000))
    write = writer.write_arrays

    def needs_room(*arguments):
        if left.exists():
            raise FULL
        return write(*arguments)

    monkeypatch.setattr(writer, "write_arrays", needs_room)
    again = Company([tmp_path, tmp_path], monkeypatch)
    assert again.save(2) == [""] * 4 and again.files[0].steps() == [2, 1]


def test_a_save_that_lasts_is_left_to_its_disk(tmp_path, monkeypatch):
    company = Company([tmp_path, tmp_path], monkeypatch)
    assert company.save(1) == [""] * 4
    go, write = threading.Event(), writer.write_arrays

    def slow(place, *arguments):
        if "part-1-of" in str(place):
            assert go.wait(LONGEST_SECONDS)
        return write(place, *arguments)

    monkeypatch.setattr(writer, "write_arrays", slow)
    company.each(lambda files: files.save(company.model, step=2))
    for hosts in company.hosts:
        hosts.link.timeout_seconds = 0.0
    # Worker 0 has written its part as soon as its note is there.
    key = f"checkpoint {int(company.numbers[-1]):08x}"
    with company.hosts[0].link.changed:
        notes = company.hosts[0].link.notes
        company.hosts[0].link.changed.wait_for(lambda: 0 in notes.get(key, {}), 60)
    heard = [*company.save(3), *company.save(4)]
    assert all("is still being written" in said for said in heard)
    assert all("by worker 1;" in said for said in heard)
    go.set()
    for hosts in company.hosts:
        hosts.link.timeout_seconds = 600.0
    assert company.save(5) == [""] * 4
    # The slow one is whole, and those that came meanwhile were left out.
    assert company.files[0].steps() == [5, 2]
