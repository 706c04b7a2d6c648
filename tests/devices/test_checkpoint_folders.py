"""What may lie, or not lie, in the directory of checkpoints."""

import os

import pytest

import tfdp
from tests.devices.test_resume_beside import make, train
from tfdp.checkpoint import checkpoint
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import UNFINISHED
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError


def test_a_directory_that_cannot_be_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        train(make(), [tfdp.callbacks.Checkpoint(tmp_path / "file")])
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
