"""What may lie, or not lie, in the directory of checkpoints."""

import os
import re
import threading

import pytest

import tfdp
from tests.devices.test_resume_beside import make, train
from tfdp.checkpoint import checkpoint, directories
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import UNFINISHED
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError


def test_a_directory_that_cannot_be_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        train(make(), [tfdp.callbacks.Checkpoint(tmp_path / "file")])
    # A folder that is there, in which root can make no file either.
    model = make()
    with pytest.raises(ConfigurationError, match="cannot be written to /proc/self"):
        train(model, [tfdp.callbacks.Checkpoint("/proc/self")])
    assert int(model.optimizer.iterations.numpy()) == 0
    monkeypatch.chdir(tmp_path)
    relative = tfdp.checkpoint.Checkpoint("of")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert relative.directory == str(tmp_path / "of")


def test_what_links_lead_to_stays(tmp_path):
    name = "step-000000000001-abcdef12"
    (tmp_path / "kept" / name).mkdir(parents=True)
    (tmp_path / "kept" / name / "manifest.json").write_text("{}")
    (tmp_path / "of").mkdir()
    os.symlink(tmp_path / "kept" / name, tmp_path / "of" / name)
    (tmp_path / "of" / "step-000000000002-abcdef12").touch()
    files = tfdp.checkpoint.Checkpoint(tmp_path / "of", keep=1)
    model = make()
    files.save(model, step=3)
    files.wait()
    assert (tmp_path / "kept" / name / "manifest.json").exists()
    assert files.steps() == [3] and not (tmp_path / "of" / name).exists()


class InThreads(Hosts):
    """One of two workers, each in a thread of its own."""

    def __init__(self, rank, said, barrier):
        super().__init__(rank, 2, None, None)
        self.said, self.barrier = said, barrier

    def texts(self, text, label):
        self.said[self.rank] = text
        self.barrier.wait(60)
        said = list(self.said)
        self.barrier.wait(60)
        return said

    def text_of_chief(self, text):
        return self.texts(text, "")[0]


@pytest.mark.parametrize(
    "folders, match",
    [
        (("run", "run"), None),
        (("run", "link"), None),
        (("run", "own"), "wrote to .*/run is missing in .*/own on worker 1. Give"),
        (("file", "run"), r"cannot be written to .*/file on worker 0 \("),
        (("run", "file/run"), r"cannot be written to .*/file/run on worker 1 \("),
    ],
)
def test_all_workers_refuse_what_one_cannot_use(tmp_path, monkeypatch, folders, match):
    monkeypatch.setattr(directories, "LONGEST_SIGHT_SECONDS", 0.2)
    (tmp_path / "file").touch()
    os.symlink(tmp_path / "run", tmp_path / "link")
    (tmp_path / "run").mkdir()
    said, barrier, errors = ["", ""], threading.Barrier(2), [None, None]

    def check(rank):
        try:
            hosts = InThreads(rank, said, barrier)
            directories.check_directory(tmp_path / folders[rank], hosts)
        except ConfigurationError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=check, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] == errors[1]
    assert (errors[0] is None) if match is None else re.search(match, errors[0])
    assert not list((tmp_path / "run").iterdir())


def test_a_last_save_that_fails_does_not_lose_the_model(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfdp.checkpoint.writer.write_arrays", full)
    callback = tfdp.callbacks.Checkpoint(tmp_path, every_epochs=3)
    with pytest.warns(
        CheckpointWarning, match="worker 0 could not write its part .*No"
    ):
        _, history = train(make(), [callback])
    assert len(history.epoch) == 3 and not list(tmp_path.iterdir())


def test_what_is_not_there_is_not_restored(tmp_path):
    model = make()
    files = tfdp.checkpoint.Checkpoint(tmp_path / "runs" / "good")
    files.save(model, step=3)
    files.wait()
    misspelt = tfdp.checkpoint.Checkpoint(tmp_path / "runs" / "god")
    assert misspelt.restore(model, must_exist=False) is None
    with pytest.raises(DataError, match=r"no such folder. .*/runs holds good. Give"):
        misspelt.restore(model)
    above = tfdp.checkpoint.Checkpoint(tmp_path / "runs")
    with pytest.raises(DataError, match="in .*/runs, which holds good. "):
        above.restore(model, weights_only=True)
    elsewhere = tfdp.checkpoint.Checkpoint(tmp_path / "rums" / "good")
    with pytest.raises(DataError, match=rf"folder. {tmp_path} holds runs. "):
        elsewhere.restore(model)


class OneOfTwo(Hosts):
    """Worker 0; worker 1 says what it is told to."""

    def __init__(self, note):
        super().__init__(0, 2, None, None)
        self.note = note

    def share_note(self, key, note, has_deadline=True):
        return {0: note, 1: self.note}


def test_a_host_that_sees_another_directory(tmp_path, monkeypatch):
    files, model = tfdp.checkpoint.Checkpoint(tmp_path), make()
    files.save(model, step=3)
    files.wait()
    unseen = OneOfTwo(f"{tmp_path} {UNFINISHED}: it has no manifest.")
    monkeypatch.setattr(checkpoint, "hosts_of", lambda strategy: unseen)
    with (
        pytest.warns(CheckpointWarning, match="seen by worker 1"),
        pytest.raises(DataError, match="No checkpoint"),
    ):
        files.restore(model)
    empty = tfdp.checkpoint.Checkpoint(tmp_path / "empty")
    unseen.note = "step-000000000003-abcdef12"
    with pytest.raises(DataError, match="worker 0 sees none"):
        empty.restore(model)
